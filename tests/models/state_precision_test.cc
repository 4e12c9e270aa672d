// State precisions: spellings read, canonical names, errors, identities.
#include "models/state_precision.h"

#include <doctest/doctest.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace replayeval {
namespace {

StateOptions defaults() {
  StateOptions options;
  options.seed = 1;
  return options;
}

StatePrecision parse(std::string_view text) { return parse_state_precision(text, defaults()); }

std::string error_of(std::string_view text, const NamedFormats& formats = {}) {
  try {
    parse_state_precision(text, defaults(), formats);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(no error)";
}

std::string identity(std::string_view text) {
  const StatePrecision baseline = parse("fp32");
  return state_identity(parse(text), baseline);
}

TEST_CASE("a spelling says format and rounding of each role") {
  const StatePrecision shared = parse("nvfp4+sr");
  CHECK(shared.recurrence.format->name == "nvfp4");
  CHECK(shared.recurrence.rounding == Rounding::stochastic);
  CHECK_FALSE(shared.read.has_value());
  CHECK(shared.stochastic());

  const StatePrecision separate = parse("fp16+sr/nvfp4@L=8;layers=0-5");
  CHECK(separate.recurrence.format->name == "fp16");
  CHECK(separate.recurrence.rounding == Rounding::stochastic);
  REQUIRE(separate.read.has_value());
  CHECK(separate.read->format->name == "nvfp4");
  CHECK(separate.read->rounding == Rounding::nearest_even);
  CHECK(separate.options.window == 8);
  CHECK(separate.layers.contains(0));
  CHECK(separate.layers.contains(5));
  CHECK_FALSE(separate.layers.contains(6));
  CHECK(separate.heads.all());
  CHECK_FALSE(separate.whole_model());

  CHECK_FALSE(parse("fp32/nvfp4").stochastic());
  CHECK(parse("fp32/nvfp4+sr").stochastic());
}

TEST_CASE("options reach the plan of the kernels") {
  const HeadPlan plan =
      head_plan(parse("fp16/"
                      "fp8+sr@L=64;gdn_fold=cached;flush_output=read;ring_u=bf16;beta=bf16;dot="
                      "tf32;seed=18446744073709551615"));
  CHECK(plan.recurrence.format->name == "fp16");
  REQUIRE(plan.read.has_value());
  CHECK(plan.read->rounding == Rounding::stochastic);
  CHECK(plan.window == 64);
  CHECK(plan.gdn_fold == GdnFold::cached);
  CHECK(plan.flush_output == FlushOutput::read);
  CHECK(plan.ring_u == RecordType::bf16);
  CHECK(plan.beta == RecordType::bf16);
  CHECK(plan.dot == DotType::tf32);
  CHECK(plan.seed == 18446744073709551615u);
  // What the spelling leaves open is the experiment's.
  StateOptions options = defaults();
  options.window = 4;
  options.dot = DotType::bf16;
  options.seed = 7;
  const HeadPlan inherited = head_plan(parse_state_precision("nvfp4+sr", options));
  CHECK(inherited.window == 4);
  CHECK(inherited.dot == DotType::bf16);
  CHECK(inherited.seed == 7u);
  CHECK(parse_state_precision("nvfp4@ring=fp32", options).options.ring == RingType::fp32);
}

TEST_CASE("the canonical name orders options, leaves out defaults, and reads back as itself") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"fp32", "fp32"},
      {"fp32@L=16", "fp32"},
      {"fp32@L=1", "fp32@L=1"},
      {"nvfp4@layers=3,1-2;L=8", "nvfp4@L=8;layers=1-3"},
      {"nvfp4+sr@seed=1", "nvfp4+sr@seed=1"},
      {"fp16+sr/nvfp4@heads=7;layers=0-5,9;gdn_fold=cached",
       "fp16+sr/nvfp4@gdn_fold=cached;layers=0-5,9;heads=7"},
      {"nvfp4@span=layer", "nvfp4@span=layer"},
      {"nvfp4@span=head", "nvfp4"},
      {"fp16/nvfp4@scale_rounding=up;span=row", "fp16/nvfp4@span=row;scale_rounding=up"},
      {"nvfp4@scale_rounding=nearest", "nvfp4"},
      {"fp16@overflow=inf", "fp16@overflow=inf"},
      {"fp16@overflow=saturate", "fp16"},
      {"nvfp4@layers=all;heads=all", "nvfp4"},
      {"fp8/fp8@ring=fp32;ring_u=bf16;beta=bf16;dot=bf16;flush_output=read",
       "fp8/fp8@flush_output=read;ring=fp32;ring_u=bf16;beta=bf16;dot=bf16"},
  };
  for (const auto& [spelling, canonical] : cases) {
    CAPTURE(spelling);
    const StatePrecision precision = parse(spelling);
    CHECK(precision.name == canonical);
    CHECK(parse(precision.name).name == canonical);
    CHECK(identity(precision.name) == identity(spelling));
  }
}

TEST_CASE("every option and format changes the identity") {
  const std::vector<std::string> spellings = {
      "nvfp4+sr",
      "nvfp4",
      "nvfp4+sr/nvfp4+sr",
      "nvfp4+sr/nvfp4",
      "fp8+sr",
      "nvfp4+sr@L=15",
      "nvfp4+sr@gdn_fold=cached",
      "nvfp4+sr@flush_output=read",
      "nvfp4+sr@ring=fp32",
      "nvfp4+sr@ring_u=bf16",
      "nvfp4+sr@beta=bf16",
      "nvfp4+sr@dot=tf32",
      "nvfp4+sr@dot=bf16",
      "nvfp4+sr@span=row",
      "nvfp4+sr@span=layer",
      "nvfp4+sr@scale_rounding=up",
      "nvfp4+sr@layers=0",
      "nvfp4+sr@layers=0-1",
      "nvfp4+sr@heads=0",
      "nvfp4+sr@seed=2",
      "fp16",
      "fp16@overflow=inf",
  };
  std::set<std::string> identities;
  for (const std::string& spelling : spellings) {
    CAPTURE(spelling);
    CHECK(identities.insert(identity(spelling)).second);
  }
  // The seed of the experiment counts as that of the spelling, and only where something is random.
  StateOptions other = defaults();
  other.seed = 2;
  const StatePrecision baseline = parse("fp32");
  CHECK(state_identity(parse_state_precision("nvfp4+sr", other), baseline) ==
        identity("nvfp4+sr@seed=2"));
  CHECK(state_identity(parse_state_precision("nvfp4", other), baseline) == identity("nvfp4"));
  // Outside a selection the baseline holds, so it is part of the definition there, and only there.
  const StatePrecision fp16 = parse("fp16");
  CHECK(state_identity(parse("nvfp4@layers=0"), fp16) != identity("nvfp4@layers=0"));
  CHECK(state_identity(parse("nvfp4"), fp16) == identity("nvfp4"));
}

TEST_CASE("a seed given later is in the name") {
  const StatePrecision precision = with_seed(parse("fp16+sr/nvfp4@L=8"), 3, defaults());
  CHECK(precision.name == "fp16+sr/nvfp4@L=8;seed=3");
  CHECK(head_plan(precision).seed == 3u);
  CHECK(state_identity(precision, parse("fp32")) == identity("fp16+sr/nvfp4@L=8;seed=3"));
}

TEST_CASE("formats of an experiment are used by their name there") {
  NamedFormats formats;
  formats["mine"] = find_format("mxfp4");
  const StatePrecision precision = parse_state_precision("fp16+sr/mine", defaults(), formats);
  CHECK(precision.name == "fp16+sr/mine");
  REQUIRE(precision.read.has_value());
  CHECK(definition(*precision.read->format) == definition(*find_format("mxfp4")));
  // The definition counts, not the name.
  CHECK(state_identity(precision, parse("fp32")) == identity("fp16+sr/mxfp4"));
}

TEST_CASE("selections") {
  CHECK(parse_index_selection("7").text() == "7");
  CHECK(parse_index_selection("5,0-2,3").text() == "0-3,5");
  CHECK(parse_index_selection("0-5,2-9").text() == "0-9");
  CHECK(parse_index_selection("all").text() == "all");
  CHECK(parse_index_selection("0-2,9").last() == 9);
  CHECK(IndexSelection{}.contains(123));
  for (const std::string text : {"", "-", "1-", "-1", "3-1", "0,,1", "a", "1.5", "0-5 ,7"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_index_selection(text), std::invalid_argument);
  }
}

TEST_CASE("a wrong spelling says what was expected") {
  CHECK(error_of("fp32/nvfp5+sr")
            .starts_with("fp32/nvfp5+sr: unknown format 'nvfp5'; known: fp32 bf16 fp16 "));
  NamedFormats formats;
  formats["mine"] = find_format("mxfp4");
  CHECK(error_of("their", formats).ends_with(" mine"));
  CHECK(error_of("7").find("needs quotes") != std::string::npos);
  CHECK(error_of("nvfp4+rn").starts_with("nvfp4+rn: expected '+sr'"));
  CHECK(error_of("fp32+sr").starts_with("fp32+sr: '+sr' has no meaning"));
  CHECK(error_of("fp32/fp16/fp8").find("got 3 formats") != std::string::npos);
  CHECK(error_of("").find("unknown format ''") != std::string::npos);
  CHECK(error_of("/nvfp4").find("unknown format ''") != std::string::npos);
  CHECK(error_of("nvfp4@").find("expected option=value") != std::string::npos);
  CHECK(error_of("nvfp4@L").find("expected option=value") != std::string::npos);
  CHECK(error_of("nvfp4@l=8").find("unknown option 'l'; known: L gdn_fold") != std::string::npos);
  CHECK(error_of("nvfp4@L=8;L=8").find("'L' is given twice") != std::string::npos);
  CHECK(error_of("nvfp4@L=0").find("L: expected a window length from 1 to 64, got '0'") !=
        std::string::npos);
  CHECK(error_of("nvfp4@L=65").find("from 1 to 64") != std::string::npos);
  CHECK(error_of("nvfp4@L=8x").find("got '8x'") != std::string::npos);
  CHECK(error_of("nvfp4@gdn_fold=open")
            .find("gdn_fold: expected one of rederive cached, got 'open'") != std::string::npos);
  CHECK(error_of("fp16@span=row").find("span: ") != std::string::npos);
  CHECK(error_of("fp16@scale_rounding=up").find("scale_rounding: ") != std::string::npos);
  CHECK(error_of("nvfp4@overflow=inf").find("overflow: ") != std::string::npos);
  CHECK(error_of("nvfp4@seed=2").find("seed: nothing is rounded stochastically") !=
        std::string::npos);
  CHECK(error_of("nvfp4+sr@seed=-1").find("from 0 to 2^64 - 1") != std::string::npos);
  CHECK(error_of("nvfp4@layers=9-3").find("layers: expected indices and ranges") !=
        std::string::npos);
}

}  // namespace
TEST_CASE("else: another precision outside of the selection") {
  const StatePrecision baseline = parse_state_precision("fp32", defaults());
  const StatePrecision mixed =
      parse_state_precision("nvfp4+sr@layers=2,5;else=fp16+sr", defaults());
  CHECK(mixed.name == "nvfp4+sr@layers=2,5;else=fp16+sr");
  CHECK(parse_state_precision(mixed.name, defaults()).name == mixed.name);
  REQUIRE(mixed.outside);
  CHECK(codec_name(mixed.outside->recurrence) == "fp16+sr");
  CHECK(mixed.outside->options == mixed.options);
  CHECK(state_identity(mixed, baseline) !=
        state_identity(parse_state_precision("nvfp4+sr@layers=2,5", defaults()), baseline));
  CHECK(
      state_identity(mixed, baseline) !=
      state_identity(parse_state_precision("nvfp4+sr@layers=2,5;else=fp16", defaults()), baseline));
  CHECK(parse_state_precision("nvfp4@layers=2;else=fp16+sr/nvfp4", defaults()).stochastic());
  const StatePrecision seeded = with_seed(mixed, 77, defaults());
  CHECK(seeded.outside->options.seed == 77);
  for (const char* wrong :
       {"nvfp4@else=fp16", "nvfp4@layers=1;else=fp99", "nvfp4@layers=1;else=fp16@L=2"}) {
    CHECK_THROWS_AS(parse_state_precision(wrong, defaults()), std::invalid_argument);
  }
}

}  // namespace replayeval
