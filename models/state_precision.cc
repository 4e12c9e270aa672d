#include "models/state_precision.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <stdexcept>

#include "base/hash.h"

namespace replayeval {
namespace {

[[noreturn]] void reject(const std::string& message) { throw std::invalid_argument(message); }

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

template <class Integer>
std::optional<Integer> parse_integer(std::string_view text) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

template <class Value, size_t count>
using NameTable = std::array<std::pair<std::string_view, Value>, count>;

constexpr NameTable<GdnFold, 2> kGdnFolds = {
    {{"rederive", GdnFold::rederive}, {"cached", GdnFold::cached}}};
constexpr NameTable<FlushOutput, 2> kFlushOutputs = {
    {{"recurrence", FlushOutput::recurrence}, {"read", FlushOutput::read}}};
constexpr NameTable<RingType, 2> kRingTypes = {
    {{"activation", RingType::activation}, {"fp32", RingType::fp32}}};
constexpr NameTable<RecordType, 2> kRecordTypes = {
    {{"fp32", RecordType::fp32}, {"bf16", RecordType::bf16}}};
constexpr NameTable<DotType, 3> kDotTypes = {
    {{"fp32", DotType::fp32}, {"tf32", DotType::tf32}, {"bf16", DotType::bf16}}};
constexpr NameTable<Span, 3> kSpans = {
    {{"head", Span::head}, {"row", Span::row}, {"layer", Span::layer}}};
constexpr NameTable<ScaleRounding, 3> kScaleRoundings = {{{"nearest", ScaleRounding::nearest},
                                                          {"up", ScaleRounding::up},
                                                          {"down", ScaleRounding::down}}};
constexpr NameTable<bool, 2> kOverflows = {{{"saturate", false}, {"inf", true}}};

template <class Value, size_t count>
Value parse_name(const NameTable<Value, count>& table, std::string_view text) {
  std::string known;
  for (const auto& [name, value] : table) {
    if (name == text) return value;
    known += (known.empty() ? "" : " ") + std::string(name);
  }
  reject("expected one of " + known + ", got " + quoted(text));
}

template <class Value, size_t count>
std::string_view find_name(const NameTable<Value, count>& table, Value value) {
  for (const auto& [name, entry] : table) {
    if (entry == value) return name;
  }
  throw std::logic_error("state precision: an option value without a name");
}

/// One `@` option: how it is set, and its value in the canonical name (empty: as the experiment
/// says, left out).
struct OptionRule {
  std::string_view name;
  void (*set)(StatePrecision&, std::string_view);
  std::string (*spell)(const StatePrecision&, const StateOptions&);
};

/// Rule for an option whose value has a table of names.
#define NAMED_OPTION(member, table)                                                                \
  OptionRule {                                                                                     \
#member, [](StatePrecision& p, std::string_view v) { p.options.member = parse_name(table, v); }, \
        [](const StatePrecision& p, const StateOptions& d) {                                       \
          return p.options.member == d.member ? std::string()                                      \
                                              : std::string(find_name(table, p.options.member));   \
        } \
  }

constexpr OptionRule kOptions[] = {
    {"L",
     [](StatePrecision& p, std::string_view v) {
       const auto window = parse_integer<int>(v);
       if (!window || *window < 1 || *window > kMaxWindow) {
         reject("expected a window length from 1 to " + std::to_string(kMaxWindow) + ", got " +
                quoted(v));
       }
       p.options.window = *window;
     },
     [](const StatePrecision& p, const StateOptions& d) {
       return p.options.window == d.window ? std::string() : std::to_string(p.options.window);
     }},
    NAMED_OPTION(gdn_fold, kGdnFolds),
    NAMED_OPTION(flush_output, kFlushOutputs),
    NAMED_OPTION(ring, kRingTypes),
    NAMED_OPTION(ring_u, kRecordTypes),
    NAMED_OPTION(beta, kRecordTypes),
    NAMED_OPTION(dot, kDotTypes),
    {"span", [](StatePrecision& p, std::string_view v) { p.span = parse_name(kSpans, v); },
     [](const StatePrecision& p, const StateOptions&) {
       return p.span ? std::string(find_name(kSpans, *p.span)) : std::string();
     }},
    {"scale_rounding",
     [](StatePrecision& p, std::string_view v) {
       p.scale_rounding = parse_name(kScaleRoundings, v);
     },
     [](const StatePrecision& p, const StateOptions&) {
       return p.scale_rounding ? std::string(find_name(kScaleRoundings, *p.scale_rounding))
                               : std::string();
     }},
    {"overflow",
     [](StatePrecision& p, std::string_view v) {
       p.overflow_to_infinity = parse_name(kOverflows, v);
     },
     [](const StatePrecision& p, const StateOptions&) {
       return p.overflow_to_infinity ? std::string("inf") : std::string();
     }},
    {"layers", [](StatePrecision& p, std::string_view v) { p.layers = parse_index_selection(v); },
     [](const StatePrecision& p, const StateOptions&) {
       return p.layers.all() ? std::string() : p.layers.text();
     }},
    {"heads", [](StatePrecision& p, std::string_view v) { p.heads = parse_index_selection(v); },
     [](const StatePrecision& p, const StateOptions&) {
       return p.heads.all() ? std::string() : p.heads.text();
     }},
    {"else",
     [](StatePrecision& p, std::string_view v) {
       auto outside = std::make_shared<StatePrecision>();
       outside->name = v;  // parsed once all options are known
       p.outside = std::move(outside);
     },
     [](const StatePrecision& p, const StateOptions&) {
       return p.outside ? p.outside->name : std::string();
     }},
    {"seed",
     [](StatePrecision& p, std::string_view v) {
       const auto seed = parse_integer<uint64_t>(v);
       if (!seed) reject("expected a whole number from 0 to 2^64 - 1, got " + quoted(v));
       p.options.seed = *seed;
       p.seed_in_name = true;
     },
     [](const StatePrecision& p, const StateOptions&) {
       return p.seed_in_name ? std::to_string(p.options.seed) : std::string();
     }},
};
#undef NAMED_OPTION

std::string option_names() {
  std::string names;
  for (const OptionRule& rule : kOptions)
    names += (names.empty() ? "" : " ") + std::string(rule.name);
  return names;
}

std::shared_ptr<const StateFormat> with_name(const std::shared_ptr<const StateFormat>& format,
                                             const std::string& name) {
  if (format->name == name) return format;
  auto renamed = std::make_shared<StateFormat>(*format);
  renamed->name = name;
  return renamed;
}

std::shared_ptr<const StateFormat> lookup(std::string_view name, const NamedFormats& formats) {
  const auto named = formats.find(name);
  if (named != formats.end()) return with_name(named->second, named->first);
  std::string known;
  for (const BuiltinFormat& builtin : builtin_formats()) {
    if (builtin.name == name) return with_name(find_format(name), builtin.name);
    known += " " + builtin.name;
  }
  for (const auto& [format, description] : formats) known += " " + format;
  std::string hint;
  if (!name.empty() && name.find_first_not_of("0123456789-") == std::string_view::npos) {
    hint = " (a list item that contains a comma needs quotes)";
  }
  reject("unknown format " + quoted(name) + hint + "; known:" + known);
}

StateCodec parse_codec(std::string_view text, const NamedFormats& formats) {
  StateCodec codec;
  const size_t plus = text.find('+');
  const std::string_view name = text.substr(0, plus);
  if (plus != std::string_view::npos) {
    if (text.substr(plus) != "+sr") {
      reject("expected '+sr' (stochastic rounding) or no suffix (nearest, ties to even), got " +
             quoted(text.substr(plus)));
    }
    codec.rounding = Rounding::stochastic;
  }
  codec.format = lookup(name, formats);
  if (codec.rounding == Rounding::stochastic && codec.format->library == nullptr &&
      codec.format->descriptor.element == ElementKind::fp32) {
    reject("'+sr' has no meaning where every bit of the state is kept; expected " + quoted(name));
  }
  return codec;
}

using Change =
    std::function<std::shared_ptr<const StateFormat>(const std::shared_ptr<const StateFormat>&)>;

/// Changes the format of each role that the option applies to; throws what the last one throws when
/// that is neither. False when the formats are so already.
bool change_formats(StatePrecision* precision, std::string_view option, const Change& change) {
  bool applied = false;
  bool changed = false;
  std::string reason;
  for (StateCodec* codec :
       {&precision->recurrence, precision->read ? &*precision->read : nullptr}) {
    if (codec == nullptr) continue;
    try {
      auto format = with_name(change(codec->format), codec->format->name);
      changed |= definition(*format) != definition(*codec->format);
      codec->format = std::move(format);
      applied = true;
    } catch (const std::invalid_argument& error) {
      reason = error.what();
    }
  }
  if (!applied) reject(std::string(option) + ": " + reason);
  return changed;
}

std::string spell(const StatePrecision& precision, const StateOptions& defaults) {
  std::string name = codec_name(precision.recurrence);
  if (precision.read) name += "/" + codec_name(*precision.read);
  char separator = '@';
  for (const OptionRule& rule : kOptions) {
    const std::string value = rule.spell(precision, defaults);
    if (value.empty()) continue;
    name += separator + std::string(rule.name) + "=" + value;
    separator = ';';
  }
  return name;
}

StatePrecision parse(std::string_view text, const StateOptions& defaults,
                     const NamedFormats& formats) {
  StatePrecision precision;
  precision.options = defaults;
  const size_t at = text.find('@');
  const std::vector<std::string_view> roles = split(text.substr(0, at), '/');
  if (roles.size() > 2) {
    reject("expected one format, or recurrence/read, got " + std::to_string(roles.size()) +
           " formats");
  }
  precision.recurrence = parse_codec(roles[0], formats);
  if (roles.size() == 2) precision.read = parse_codec(roles[1], formats);

  if (at != std::string_view::npos) {
    std::vector<std::string_view> seen;
    for (const std::string_view item : split(text.substr(at + 1), ';')) {
      const size_t equals = item.find('=');
      const std::string_view key = item.substr(0, equals);
      if (equals == std::string_view::npos || key.empty()) {
        reject("expected option=value after '@' (options joined by ';'), got " + quoted(item));
      }
      const auto rule = std::ranges::find(kOptions, key, &OptionRule::name);
      if (rule == std::end(kOptions)) {
        reject("unknown option " + quoted(key) + "; known: " + option_names());
      }
      if (std::ranges::find(seen, key) != seen.end())
        reject("option " + quoted(key) + " is given twice");
      seen.push_back(key);
      try {
        rule->set(precision, item.substr(equals + 1));
      } catch (const std::invalid_argument& error) {
        reject(std::string(key) + ": " + error.what());
      }
    }
  }
  if (precision.span && !change_formats(&precision, "span", [&](const auto& format) {
        return format_with_span(format, *precision.span);
      })) {
    precision.span.reset();
  }
  if (precision.scale_rounding &&
      !change_formats(&precision, "scale_rounding", [&](const auto& format) {
        return format_with_scale_rounding(format, *precision.scale_rounding);
      })) {
    precision.scale_rounding.reset();
  }
  if (precision.overflow_to_infinity &&
      !change_formats(&precision, "overflow", [](const auto& format) {
        return format_with_overflow_to_infinity(format);
      })) {
    precision.overflow_to_infinity = false;
  }
  if (precision.outside) {
    if (precision.whole_model()) {
      reject("else: needs a selection; expected layers= or heads= beside it");
    }
    if (precision.outside->name.find('@') != std::string::npos) {
      reject("else: expected formats alone (its options are those of the whole state), got '" +
             precision.outside->name + "'");
    }
    auto outside = std::make_shared<StatePrecision>(
        parse(precision.outside->name, precision.options, formats));
    precision.outside = std::move(outside);
  }
  if (precision.seed_in_name && !precision.stochastic()) {
    reject("seed: nothing is rounded stochastically here; expected a format with '+sr'");
  }
  precision.name = spell(precision, defaults);
  return precision;
}

}  // namespace

bool IndexSelection::contains(int index) const {
  if (all()) return true;
  return std::ranges::any_of(
      ranges, [index](const auto& range) { return range.first <= index && index <= range.second; });
}

std::string IndexSelection::text() const {
  if (all()) return "all";
  std::string text;
  for (const auto& [first, last] : ranges) {
    if (!text.empty()) text += ",";
    text += std::to_string(first);
    if (last != first) text += "-" + std::to_string(last);
  }
  return text;
}

IndexSelection parse_index_selection(std::string_view text) {
  IndexSelection selection;
  if (text == "all") return selection;
  for (const std::string_view part : split(text, ',')) {
    const size_t dash = part.find('-');
    const auto first = parse_integer<int>(part.substr(0, dash));
    const auto last =
        dash == std::string_view::npos ? first : parse_integer<int>(part.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first) {
      reject("expected indices and ranges like 0-5,7 or all, got " + quoted(text));
    }
    selection.ranges.emplace_back(*first, *last);
  }
  std::ranges::sort(selection.ranges);
  std::vector<std::pair<int, int>> merged;
  for (const auto& range : selection.ranges) {
    if (!merged.empty() && range.first <= merged.back().second + 1) {
      merged.back().second = std::max(merged.back().second, range.second);
    } else {
      merged.push_back(range);
    }
  }
  selection.ranges = std::move(merged);
  return selection;
}

bool StatePrecision::stochastic() const {
  return recurrence.rounding == Rounding::stochastic ||
         (read && read->rounding == Rounding::stochastic) || (outside && outside->stochastic());
}

StatePrecision parse_state_precision(std::string_view text, const StateOptions& defaults,
                                     const NamedFormats& formats) {
  try {
    return parse(text, defaults, formats);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(text) + ": " + error.what());
  }
}

StatePrecision with_seed(const StatePrecision& precision, uint64_t seed,
                         const StateOptions& defaults) {
  StatePrecision result = precision;
  result.options.seed = seed;
  result.seed_in_name = true;
  if (result.outside) {
    auto outside = std::make_shared<StatePrecision>(*result.outside);
    outside->options.seed = seed;
    result.outside = std::move(outside);
  }
  result.name = spell(result, defaults);
  return result;
}

StatePrecision with_selection(const StatePrecision& precision, const IndexSelection& layers,
                              const IndexSelection& heads, const StateOptions& defaults) {
  StatePrecision result = precision;
  result.layers = layers;
  result.heads = heads;
  result.name = spell(result, defaults);
  return result;
}

std::string codec_name(const StateCodec& codec) {
  return codec.format->name + (codec.rounding == Rounding::stochastic ? "+sr" : "");
}

HeadPlan head_plan(const StatePrecision& precision) {
  HeadPlan plan;
  plan.recurrence = precision.recurrence;
  plan.read = precision.read;
  plan.window = precision.options.window;
  plan.flush_output = precision.options.flush_output;
  plan.gdn_fold = precision.options.gdn_fold;
  plan.ring_u = precision.options.ring_u;
  plan.beta = precision.options.beta;
  plan.dot = precision.options.dot;
  plan.seed = precision.options.seed;
  return plan;
}

std::string state_definition(const StatePrecision& precision, const StatePrecision& baseline) {
  std::string text;
  const auto line = [&text](std::string_view key, std::string_view value) {
    text += std::string(key) + ": " + std::string(value) + "\n";
  };
  const auto codec_lines = [&line](std::string_view role, const StateCodec& codec) {
    line(role, definition(*codec.format));
    line(std::string(role) + "_rounding", codec.rounding == Rounding::stochastic ? "sr" : "rtn");
  };
  codec_lines("recurrence", precision.recurrence);
  if (precision.read) {
    codec_lines("read", *precision.read);
  } else {
    line("read", "shared");
  }
  const StateOptions& options = precision.options;
  line("window", std::to_string(options.window));
  line("gdn_fold", name_of(options.gdn_fold));
  line("flush_output", name_of(options.flush_output));
  line("ring", name_of(options.ring));
  line("ring_u", name_of(options.ring_u));
  line("beta", name_of(options.beta));
  line("dot", name_of(options.dot));
  if (precision.stochastic()) line("seed", std::to_string(options.seed));
  line("layers", precision.layers.text());
  line("heads", precision.heads.text());
  if (!baseline.whole_model())
    throw std::logic_error("state precision: a baseline with a selection");
  if (!precision.whole_model()) {
    const StatePrecision& outside = precision.outside ? *precision.outside : baseline;
    text += "outside:\n" + state_definition(outside, outside);
  }
  return text;
}

std::string state_identity(const StatePrecision& precision, const StatePrecision& baseline) {
  return sha256_hex(state_definition(precision, baseline));
}

GdnFold parse_gdn_fold(std::string_view text) { return parse_name(kGdnFolds, text); }
FlushOutput parse_flush_output(std::string_view text) { return parse_name(kFlushOutputs, text); }
RingType parse_ring_type(std::string_view text) { return parse_name(kRingTypes, text); }
RecordType parse_record_type(std::string_view text) { return parse_name(kRecordTypes, text); }
DotType parse_dot_type(std::string_view text) { return parse_name(kDotTypes, text); }
std::string_view name_of(GdnFold value) { return find_name(kGdnFolds, value); }
std::string_view name_of(FlushOutput value) { return find_name(kFlushOutputs, value); }
std::string_view name_of(RingType value) { return find_name(kRingTypes, value); }
std::string_view name_of(RecordType value) { return find_name(kRecordTypes, value); }
std::string_view name_of(DotType value) { return find_name(kDotTypes, value); }

}  // namespace replayeval
