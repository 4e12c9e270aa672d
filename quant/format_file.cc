#include "quant/format_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "quant/codec_library.h"

namespace replayeval {
namespace {

/// A node of the file with what is needed for messages.
struct Item {
  YAML::Node node;
  std::string file;
  int line = 1;

  std::string place() const { return file + ":" + std::to_string(line); }
  [[noreturn]] void refuse(const std::string& message) const {
    throw std::invalid_argument(place() + ": " + message);
  }
  Item child(const YAML::Node& inner) const {
    int at = inner.Mark().line >= 0 ? inner.Mark().line + 1 : line;
    return {inner, file, at};
  }
};

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : " ") + w;
  return text;
}

/// The mapping's entries after checking that each key is known and written once.
std::vector<std::pair<std::string, Item>> entries(const Item& map, const std::string& what,
                                                  const std::vector<std::string>& known) {
  if (!map.node.IsMap()) map.refuse(what + " must be a mapping with keys among: " + join(known));
  std::vector<std::pair<std::string, Item>> list;
  std::set<std::string> seen;
  for (const auto& pair : map.node) {
    Item key = map.child(pair.first);
    if (!pair.first.IsScalar()) key.refuse("a key of " + what + " is not a word");
    std::string name = pair.first.Scalar();
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      key.refuse("unknown key '" + name + "' in " + what + "; known: " + join(known));
    }
    if (!seen.insert(name).second) key.refuse("key '" + name + "' in " + what + " appears twice");
    Item value = map.child(pair.second);
    if (pair.second.IsNull()) value = Item{pair.second, map.file, key.line};
    list.emplace_back(name, value);
  }
  return list;
}

std::string word(const Item& item, const std::string& what) {
  if (!item.node.IsScalar()) item.refuse(what + " must be one word");
  return item.node.Scalar();
}

template <class T>
T choice(const Item& item, const std::string& what,
         const std::vector<std::pair<std::string, T>>& known) {
  std::string text = word(item, what);
  std::vector<std::string> names;
  for (const auto& [name, value] : known) {
    if (text == name) return value;
    names.push_back(name);
  }
  item.refuse(what + " is '" + text + "'; known: " + join(names));
}

int whole_number(const Item& item, const std::string& what, int lowest, int highest) {
  std::string text = word(item, what);
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < lowest ||
      value > highest) {
    item.refuse(what + " is '" + text + "', expected a whole number from " +
                std::to_string(lowest) + " to " + std::to_string(highest));
  }
  return value;
}

/// A number rounded once to FP32. NaN and infinity are recognised (and left to the rule that
/// forbids them).
float number(const Item& item, const std::string& what) {
  std::string text = word(item, what);
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == ".nan" || lower == "nan") return std::nanf("");
  if (lower == ".inf" || lower == "+.inf" || lower == "inf") return HUGE_VALF;
  if (lower == "-.inf" || lower == "-inf") return -HUGE_VALF;
  char* end = nullptr;
  float value = text.empty() ? 0.0f : std::strtof(text.c_str(), &end);
  bool digits = text.find_first_of("0123456789") != std::string::npos;
  if (text.empty() || *end != '\0' || !digits)
    item.refuse(what + " is '" + text + "', expected a number");
  return value;
}

bool truth(const Item& item, const std::string& what) {
  return choice<bool>(item, what, {{"true", true}, {"false", false}});
}

std::vector<std::string> float_names() {
  std::vector<std::string> names;
  for (const NamedFloatFormat& f : kFloatFormats) names.push_back(f.name);
  return names;
}

bool named_float(const std::string& name, FloatFormat* format) {
  for (const NamedFloatFormat& f : kFloatFormats) {
    if (name == f.name) {
      *format = f.format;
      return true;
    }
  }
  return false;
}

const std::vector<std::string> kFloatKeys = {"exponent", "mantissa", "bias",     "inf",
                                             "nan",      "signed",   "overflow", "random_bits"};

/// {exponent, mantissa, bias, inf, nan, signed}: bias defaults to 2^(exponent - 1) - 1. An infinity
/// takes the highest exponent, as in IEEE 754; a NaN without one takes the highest code.
FloatFormat float_description(const Item& map, bool* saturate, int* random_bits) {
  FloatFormat f;
  bool has_exponent = false, has_mantissa = false, has_bias = false, has_inf = false,
       has_nan = false;
  for (const auto& [key, value] : entries(map, "a float format", kFloatKeys)) {
    if (key == "exponent") {
      f.exponent_bits = whole_number(value, "exponent", 1, 8);
      has_exponent = true;
    } else if (key == "mantissa") {
      f.mantissa_bits = whole_number(value, "mantissa", 0, 14);
      has_mantissa = true;
    } else if (key == "bias") {
      f.bias = whole_number(value, "bias", -127, 300);
      has_bias = true;
    } else if (key == "inf") {
      has_inf = truth(value, "inf");
    } else if (key == "nan") {
      has_nan = truth(value, "nan");
    } else if (key == "signed") {
      f.has_sign = truth(value, "signed");
    } else if (key == "overflow") {
      *saturate = choice<bool>(value, "overflow", {{"saturate", true}, {"inf", false}});
    } else {
      *random_bits = whole_number(value, "random_bits", 1, 24);
    }
  }
  if (!has_exponent || !has_mantissa) map.refuse("a float format needs exponent and mantissa");
  if (f.bits() > 16)
    map.refuse("a float format of " + std::to_string(f.bits()) + " bits, at most 16 are possible");
  if (!has_bias) f.bias = (1 << (f.exponent_bits - 1)) - 1;
  uint32_t all = (1u << f.magnitude_bits()) - 1u;
  f.max_code = all;
  if (has_inf) {
    if (f.mantissa_bits == 0 && has_nan) map.refuse("inf and nan together need a mantissa");
    f.inf_code = ((1u << f.exponent_bits) - 1u) << f.mantissa_bits;
    f.max_code = f.inf_code - 1u;
    if (has_nan) f.nan_code = all;
    if (!has_nan && f.mantissa_bits > 0)
      map.refuse("inf: true needs nan: true, as the codes above infinity are NaN");
  } else if (has_nan) {
    f.nan_code = all;
    f.max_code = all - 1u;
  }
  int top = static_cast<int>(f.max_code >> f.mantissa_bits);
  int largest = (top > 0 ? top : 1) - f.bias;
  int smallest = 1 - f.bias - f.mantissa_bits;
  if (largest > 127 || smallest < -149) {
    map.refuse("values from 2^" + std::to_string(smallest) + " to 2^" + std::to_string(largest) +
               " and more do not fit FP32; change bias or exponent");
  }
  f.random_bits = 16;
  for (const NamedFloatFormat& known : kFloatFormats) {
    FloatFormat same = f;
    same.random_bits = known.format.random_bits;
    if (same == known.format) f.random_bits = same.random_bits;
  }
  return f;
}

/// A float format by name or description.
FloatFormat float_format(const Item& item, const std::string& what) {
  if (item.node.IsMap()) {
    bool saturate = true;
    int random_bits = 0;
    FloatFormat f = float_description(item, &saturate, &random_bits);
    if (!saturate || random_bits != 0) item.refuse(what + " takes no overflow and no random_bits");
    return f;
  }
  FloatFormat f;
  std::string name = word(item, what);
  if (!named_float(name, &f)) {
    item.refuse(what + " is '" + name + "'; known: fp32 e8m0 " + join(float_names()) +
                ", or {exponent: E, mantissa: M, bias: B}");
  }
  return f;
}

void read_values(const Item& list, FormatDescriptor* d) {
  if (!list.node.IsSequence()) list.refuse("values must be a list of numbers");
  std::vector<float> values;
  std::vector<Item> items;
  for (const auto& v : list.node) {
    items.push_back(list.child(v));
    values.push_back(number(items.back(), "value " + std::to_string(values.size() + 1)));
  }
  d->element = ElementKind::values;
  d->list = make_value_list(
      values, [&](size_t i) { return i < items.size() ? items[i].place() : list.place(); });
}

void read_integer(const Item& item, FormatDescriptor* d) {
  d->element = ElementKind::integer;
  if (item.node.IsMap()) {
    bool has_from = false, has_to = false;
    for (const auto& [key, value] : entries(item, "integer", {"from", "to"})) {
      (key == "from" ? d->lowest : d->highest) = whole_number(value, key, -32768, 65535);
      (key == "from" ? has_from : has_to) = true;
    }
    if (!has_from || !has_to) item.refuse("integer needs from and to");
    return;
  }
  int bits = whole_number(item, "integer", 2, 16);
  d->highest = (1 << (bits - 1)) - 1;
  d->lowest = -d->highest;
}

void read_element(const Item& item, FormatDescriptor* d) {
  if (item.node.IsScalar()) {
    std::string name = item.node.Scalar();
    if (name == "fp32") {
      d->element = ElementKind::fp32;
    } else if (named_float(name, &d->number)) {
      d->element = ElementKind::floating;
    } else if (name.rfind("int", 0) == 0) {
      Item bits{YAML::Node(name.substr(3)), item.file, item.line};
      read_integer(bits, d);
    } else {
      item.refuse("element is '" + name + "'; known: fp32 int2 to int16 " + join(float_names()) +
                  ", or {exponent: ...}, {integer: {from: a, to: b}}, {values: [...]}");
    }
    return;
  }
  if (!item.node.IsMap()) item.refuse("element must be a name or a mapping");
  if (item.node["values"]) {
    for (const auto& [key, value] : entries(item, "element", {"values"})) read_values(value, d);
  } else if (item.node["integer"]) {
    for (const auto& [key, value] : entries(item, "element", {"integer"})) read_integer(value, d);
  } else if (item.node["format"]) {
    for (const auto& [key, value] :
         entries(item, "element", {"format", "overflow", "random_bits"})) {
      if (key == "format") {
        d->element = ElementKind::floating;
        d->number = float_format(value, "element format");
      } else if (key == "overflow") {
        d->saturate = choice<bool>(value, "overflow", {{"saturate", true}, {"inf", false}});
      } else {
        d->random_bits = whole_number(value, "random_bits", 1, 24);
      }
    }
  } else {
    d->element = ElementKind::floating;
    d->number = float_description(item, &d->saturate, &d->random_bits);
  }
}

int side(const Item& item, const std::string& what) {
  if (item.node.IsScalar() && item.node.Scalar() == "all") return 0;
  int size =
      whole_number(item, what, std::numeric_limits<int>::min(), std::numeric_limits<int>::max());
  if (size < 1)
    item.refuse(what + " is " + std::to_string(size) +
                "; a block needs at least one element, or 'all' for the whole axis");
  return size;
}

/// 16, or {rows: R, columns: C}, or {axis: head_dim, size: 16}.
void read_block(const Item& item, FormatDescriptor* d) {
  d->block_rows = 1;
  if (item.node.IsScalar()) {
    d->block_columns = side(item, "block");
    return;
  }
  if (item.node.IsMap() && item.node["axis"]) {
    Axis axis = Axis::state_dim;
    int size = -1;
    for (const auto& [key, value] : entries(item, "block", {"axis", "size"})) {
      if (key == "axis") {
        axis = choice<Axis>(value, "axis",
                            {{"state_dim", Axis::state_dim}, {"head_dim", Axis::head_dim}});
      } else {
        size = side(value, "size");
      }
    }
    if (size < 0) item.refuse("block needs a size");
    d->block_rows = axis == Axis::head_dim ? size : 1;
    d->block_columns = axis == Axis::head_dim ? 1 : size;
    return;
  }
  bool rows = false, columns = false;
  for (const auto& [key, value] : entries(item, "block", {"rows", "columns", "axis", "size"})) {
    if (key == "rows") {
      d->block_rows = side(value, "rows");
      rows = true;
    } else if (key == "columns") {
      d->block_columns = side(value, "columns");
      columns = true;
    } else {
      value.refuse("block takes rows and columns, or axis and size");
    }
  }
  if (!rows || !columns) item.refuse("block needs rows and columns");
}

void read_scale(const Item& item, StateFormat* format) {
  FormatDescriptor* d = &format->descriptor;
  bool has_format = false, has_block = false, has_rounding = false;
  for (const auto& [key, value] :
       entries(item, "scale", {"format", "block", "rounding", "order", "maximum"})) {
    if (key == "format") {
      has_format = true;
      std::string name = value.node.IsScalar() ? value.node.Scalar() : "";
      d->block_scale = name == "fp32"   ? BlockScale::fp32
                       : name == "e8m0" ? BlockScale::e8m0
                                        : BlockScale::floating;
      if (d->block_scale == BlockScale::floating)
        d->scale_number = float_format(value, "scale format");
    } else if (key == "block") {
      has_block = true;
      read_block(value, d);
      format->place = value.place();
    } else if (key == "rounding") {
      has_rounding = true;
      d->scale_rounding = choice<ScaleRounding>(value, "rounding",
                                                {{"nearest", ScaleRounding::nearest},
                                                 {"up", ScaleRounding::up},
                                                 {"down", ScaleRounding::down}});
    } else if (key == "order") {
      d->order = choice<ScaleOrder>(value, "order",
                                    {{"vllm", ScaleOrder::vllm},
                                     {"te", ScaleOrder::te},
                                     {"4over6", ScaleOrder::four_six},
                                     {"modelopt", ScaleOrder::modelopt}});
    } else {
      d->scale_max = number(value, "maximum");
      if (!(d->scale_max > 0)) value.refuse("maximum is not a number above 0");
    }
  }
  if (!has_format || !has_block) item.refuse("scale needs format and block");
  if (d->block_scale == BlockScale::e8m0 && !has_rounding) d->scale_rounding = ScaleRounding::down;
  if (d->block_scale == BlockScale::fp32 && has_rounding)
    item.refuse("an FP32 scale takes no rounding");
  if (d->block_scale != BlockScale::floating && (item.node["order"] || item.node["maximum"])) {
    item.refuse("order and maximum go with a block scale in a float format of at most 16 bits");
  }
}

/// layer,head,scale lines; '#' begins a comment, a first line of names is allowed.
std::vector<FixedScale> read_fixed_scales(const Item& item, const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in)
    item.refuse("file of scales '" + path.string() +
                "' cannot be read; expected lines layer,head,scale");
  std::vector<FixedScale> scales;
  std::string line;
  for (int count = 1; std::getline(in, line); ++count) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (size_t comment = line.find('#'); comment != std::string::npos) line.resize(comment);
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    if (count == 1 && line == "layer,head,scale") continue;
    auto refuse = [&](const std::string& message) {
      throw std::invalid_argument(path.string() + ":" + std::to_string(count) + ": " + message +
                                  "; expected layer,head,scale");
    };
    FixedScale s;
    char end = '\0';
    std::istringstream fields(line);
    char comma1 = 0, comma2 = 0;
    if (!(fields >> s.layer >> comma1 >> s.head >> comma2 >> s.scale) || comma1 != ',' ||
        comma2 != ',' || fields >> end) {
      refuse("'" + line + "' is not a line of three numbers");
    }
    if (s.layer < 0 || s.head < 0) refuse("layer and head must not be negative");
    if (!(s.scale >= 0x1p-126f) || !(s.scale <= 0x1p126f))
      refuse("the scale must be positive, from 2^-126 to 2^126");
    scales.push_back(s);
  }
  auto before = [](const FixedScale& a, const FixedScale& b) {
    return std::pair(a.layer, a.head) < std::pair(b.layer, b.head);
  };
  std::sort(scales.begin(), scales.end(), before);
  for (size_t i = 1; i < scales.size(); ++i) {
    if (!before(scales[i - 1], scales[i])) {
      item.refuse("file of scales '" + path.string() + "' has layer " +
                  std::to_string(scales[i].layer) + ", head " + std::to_string(scales[i].head) +
                  " twice");
    }
  }
  if (scales.empty()) item.refuse("file of scales '" + path.string() + "' is empty");
  return scales;
}

void read_outer(const Item& item, const std::filesystem::path& directory, StateFormat* format) {
  FormatDescriptor* d = &format->descriptor;
  for (const auto& [key, value] : entries(item, "outer", {"span", "file"})) {
    if (d->span != Span::none) item.refuse("outer takes span or file, not both");
    if (key == "span") {
      d->span = choice<Span>(value, "span",
                             {{"row", Span::row}, {"head", Span::head}, {"layer", Span::layer}});
    } else {
      d->span = Span::fixed;
      format->fixed_scales = read_fixed_scales(value, directory / word(value, "file"));
    }
  }
  if (d->span == Span::none) item.refuse("outer needs span (row, head, layer) or file");
}

void read_zero_point(const Item& item, FormatDescriptor* d) {
  const std::vector<std::pair<std::string, ZeroPoint>> places = {{"midpoint", ZeroPoint::midpoint},
                                                                 {"minimum", ZeroPoint::minimum}};
  if (item.node.IsScalar()) {
    d->zero_point = choice<ZeroPoint>(item, "zero_point", places);
    return;
  }
  for (const auto& [key, value] : entries(item, "zero_point", {"at", "format"})) {
    if (key == "at") {
      d->zero_point = choice<ZeroPoint>(value, "at", places);
    } else if (!(value.node.IsScalar() && value.node.Scalar() == "fp32")) {
      d->zero_point_fp32 = false;
      d->zero_point_number = float_format(value, "zero point format");
      if (!d->zero_point_number.has_sign) value.refuse("a zero point needs a signed format");
    }
  }
  if (d->zero_point == ZeroPoint::none) item.refuse("zero_point needs at: midpoint or minimum");
}

void read_transform(const Item& item, FormatDescriptor* d) {
  d->hadamard = Axis::state_dim;
  if (item.node.IsScalar()) {
    choice<bool>(item, "transform", {{"hadamard", true}});
    return;
  }
  bool has_kind = false;
  for (const auto& [key, value] : entries(item, "transform", {"kind", "axis", "size"})) {
    if (key == "kind") {
      has_kind = choice<bool>(value, "kind", {{"hadamard", true}});
    } else if (key == "axis") {
      d->hadamard = choice<Axis>(value, "axis",
                                 {{"state_dim", Axis::state_dim}, {"head_dim", Axis::head_dim}});
    } else {
      d->hadamard_size = side(value, "size");
    }
  }
  if (!has_kind) item.refuse("transform needs kind: hadamard");
}

void read_candidates(const Item& item, FormatDescriptor* d) {
  if (!item.node.IsSequence() || item.node.size() == 0 || item.node.size() > kMaxCandidates) {
    item.refuse("candidates must be a list of 1 to " + std::to_string(kMaxCandidates) + " factors");
  }
  d->candidate_count = 0;
  for (const auto& v : item.node)
    d->candidates[d->candidate_count++] = number(item.child(v), "a candidate");
}

const std::vector<std::string> kKeys = {
    "name",   "description", "element",      "scale",     "outer",    "divisor", "candidates",
    "choose", "zero_point",  "column_scale", "transform", "residual", "library"};

std::shared_ptr<const StateFormat> build(const Item& root, const std::filesystem::path& directory,
                                         const std::string& name, bool is_residual) {
  auto format = std::make_shared<StateFormat>();
  FormatDescriptor* d = &format->descriptor;
  format->name = name;
  bool has_element = false, has_choose = false;
  for (const auto& [key, value] : entries(root, "the format", kKeys)) {
    if (key == "name") {
      if (name.empty()) format->name = word(value, "name");
    } else if (key == "description") {
      word(value, "description");
    } else if (key == "element") {
      has_element = true;
      read_element(value, d);
    } else if (key == "scale") {
      read_scale(value, format.get());
    } else if (key == "outer") {
      read_outer(value, directory, format.get());
    } else if (key == "divisor") {
      d->divisor = number(value, "divisor");
      format->default_divisor = false;
      if (!(d->divisor > 0) || !(d->divisor <= kFloatMax))
        value.refuse("divisor must be a positive number");
    } else if (key == "candidates") {
      read_candidates(value, d);
    } else if (key == "choose") {
      has_choose = true;
      d->choose = choice<Choose>(value, "choose", {{"mae", Choose::mae}, {"mse", Choose::mse}});
    } else if (key == "zero_point") {
      read_zero_point(value, d);
    } else if (key == "column_scale") {
      d->column_scale = truth(value, "column_scale");
    } else if (key == "transform") {
      read_transform(value, d);
    } else if (key == "residual") {
      if (is_residual) value.refuse("the format of a residual may not have a residual of its own");
      std::string inner = word(value, "residual");
      if (inner.find('/') != std::string::npos || inner.ends_with(".yaml") ||
          inner.ends_with(".yml")) {
        std::filesystem::path path = directory / inner;
        std::ifstream in(path);
        if (!in) value.refuse("residual format file '" + path.string() + "' cannot be read");
        std::stringstream text;
        text << in.rdbuf();
        YAML::Node node;
        try {
          node = YAML::Load(text.str());
        } catch (const YAML::Exception& e) {
          throw std::invalid_argument(path.string() + ":" + std::to_string(e.mark.line + 1) + ": " +
                                      e.msg);
        }
        format->residual =
            build({node, path.string(), 1}, path.parent_path(), path.stem().string(), true);
      } else {
        try {
          format->residual = find_format(inner);
        } catch (const std::invalid_argument& e) {
          value.refuse(e.what());
        }
      }
    } else {
      format->library =
          std::make_shared<CodecLibrary>(directory / word(value, "library"), value.place());
    }
  }
  if (format->library) {
    for (const auto& pair : root.node) {
      std::string key = pair.first.Scalar();
      if (key != "library" && key != "name" && key != "description") {
        root.child(pair.first)
            .refuse("key '" + key + "' beside library; the library defines the whole format");
      }
    }
    return format;
  }
  if (!has_element)
    root.refuse("the format has no element; expected element: NAME or a description");
  if (has_choose != (d->candidate_count > 1))
    root.refuse("candidates (two or more) and choose go together");
  finish_format(format.get(), [&](const char* key) {
    const YAML::Node& map = root.node;
    return map[key] ? root.child(map[key]).place() : root.place();
  });
  return format;
}

}  // namespace

std::shared_ptr<const StateFormat> parse_format(const std::string& text, const std::string& place,
                                                const std::filesystem::path& directory,
                                                const std::string& name) {
  YAML::Node node;
  try {
    node = YAML::Load(text);
  } catch (const YAML::Exception& e) {
    throw std::invalid_argument(place + ":" + std::to_string(e.mark.line + 1) + ": " + e.msg);
  }
  std::shared_ptr<const StateFormat> format = build({node, place, 1}, directory, name, false);
  if (!format->name.empty()) return format;
  auto named = std::make_shared<StateFormat>(*format);
  named->name = std::filesystem::path(place).stem().string();
  return named;
}

std::shared_ptr<const StateFormat> load_format_file(const std::filesystem::path& path,
                                                    const std::string& name) {
  std::ifstream in(path);
  if (!in || std::filesystem::is_directory(path)) {
    throw std::invalid_argument(
        path.string() +
        ": format file cannot be read; expected a YAML description as in formats/nf4.yaml");
  }
  std::stringstream text;
  text << in.rdbuf();
  return parse_format(text.str(), path.string(), path.parent_path(), name);
}

std::shared_ptr<const StateFormat> find_or_load_format(const std::string& name_or_path) {
  bool is_path = name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".yaml") ||
                 name_or_path.ends_with(".yml");
  return is_path ? load_format_file(name_or_path) : find_format(name_or_path);
}

}  // namespace replayeval
