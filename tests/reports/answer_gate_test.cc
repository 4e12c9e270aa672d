// Gates on accuracy, from files: verdicts, exact tests for few differences, what is refused.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>

#include "reports/compare.h"
#include "reports/files.h"
#include "reports/schema.h"
#include "tests/reports/sample_answers.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

/// One state over `count` items of mmlu_pro with ten options; `right(i)` says which are right.
template <class Right>
Report answered(int count, Right right, int repeats = 1) {
  Report report;
  report.run.job = "score";
  report.run.baseline = "fp16+sr";
  report.run.model_sha256 = "model";
  report.run.repeats = repeats;
  report.run.tasks = {{"mmlu_pro", 4, "hash", "name: mmlu_pro", false, false}};
  StateReport state;
  state.info = sample_state("fp16+sr");
  for (int i = 0; i < count; ++i) {
    report.items.push_back({"q" + std::to_string(i), "mmlu_pro", "law", 0, "A", 10, {}, "p", "l"});
    for (int r = 0; r < repeats; ++r) {
      Answer answer;
      answer.item = i;
      answer.repeat = r;
      answer.tokens = 5;
      answer.finish_reason = "stop";
      answer.extracted = "A";
      answer.correct = right(i * repeats + r);
      state.answers.push_back(answer);
    }
  }
  report.states.push_back(std::move(state));
  return report;
}

LimitResult judged(const Report& base, const Report& candidate, const std::string& limit,
                   LimitKind kind = LimitKind::noninferior) {
  Gate gate;
  gate.limits = {parse_limit(limit, kind, "gate.yaml:1:1")};
  return evaluate_gate(gate, base, candidate, {}).at(0);
}

}  // namespace

TEST_CASE("few differences: the score test of Tango against its published figure") {
  // 44 pairs, one lost, none gained, margin 10 points: z = 1.709 (Tango 1998, lens disinfection).
  const Report base = answered(44, [](int) { return true; });
  const Report candidate = answered(44, [](int i) { return i != 7; });
  const LimitResult r = judged(base, candidate, "accuracy.mmlu_pro[fp16+sr] >= base - 10");
  CHECK(r.p_keeps == doctest::Approx(0.5 * std::erfc(1.709 / std::sqrt(2.0))).epsilon(2e-3));
  CHECK(r.p_keeps + r.p_exceeds == doctest::Approx(1));
  CHECK(r.verdict == Verdict::pass);
  CHECK(r.count == 44);
  // Turned round, for a quantity that must not grow: one gained.
  CHECK(judged(candidate, base, "accuracy.mmlu_pro[fp16+sr] <= base + 10").p_keeps ==
        doctest::Approx(r.p_keeps));
}

TEST_CASE("the share of lost answers under the bound maximises the likelihood") {
  // 300 pairs, 18 lost, 7 gained, bound -2 points: q by search over the likelihood, then z.
  const double n = 300, b = 18, c = 7, o = -0.02;
  double best = -1e300, q = 0;
  for (double p = 0.0200001; p < 0.5; p += 1e-7) {
    const double likelihood =
        b * std::log(p) + c * std::log(p + o) + (n - b - c) * std::log(1 - 2 * p - o);
    if (likelihood > best) {
      best = likelihood;
      q = p;
    }
  }
  const double z = ((c - b) / n - o) / std::sqrt((2 * q + o - o * o) / n);
  const Report base = answered(300, [](int i) { return i < 200; });
  const Report candidate =
      answered(300, [](int i) { return (i >= 18 && i < 200) || (i >= 200 && i < 207); });
  const LimitResult r = judged(base, candidate, "accuracy.mmlu_pro[fp16+sr] >= base - 2");
  CHECK(r.p_keeps == doctest::Approx(0.5 * std::erfc(z / std::sqrt(2.0))).epsilon(1e-5));
}

TEST_CASE("no difference at all shows only what so many items can show") {
  auto verdict = [](int items, const std::string& limit, LimitKind kind, int repeats = 1) {
    const Report base = answered(
        items, [](int i) { return i % 3 != 0; }, repeats);
    return judged(base, base, limit, kind);
  };
  const std::string limit = "accuracy.mmlu_pro[fp16+sr] >= base - 1.0";
  // z = sqrt(n m / (1 - m)): 0.78 for 60 items, 1.74 for 300.
  const LimitResult few = verdict(60, limit, LimitKind::noninferior);
  CHECK(few.verdict == Verdict::undecided);
  CHECK(few.blocks);
  CHECK(few.p_keeps == doctest::Approx(0.5 * std::erfc(std::sqrt(60 / 99.0) / std::sqrt(2.0))));
  CHECK(few.standard_error == doctest::Approx(100 * std::sqrt(0.01 * 0.99 / 60)));
  CHECK(few.count_to_decide > 300);
  CHECK(verdict(300, limit, LimitKind::noninferior).verdict == Verdict::pass);
  CHECK_FALSE(verdict(60, limit, LimitKind::regression).blocks);
  // Repeats that all agree are not more items.
  CHECK(verdict(60, limit, LimitKind::noninferior, 5).p_keeps == few.p_keeps);
  // No margin: neither shown to lose nor shown to keep.
  const LimitResult none = verdict(60, "accuracy.mmlu_pro[fp16+sr] >= base", LimitKind::regression);
  CHECK(none.verdict == Verdict::undecided);
  CHECK_FALSE(none.blocks);
}

TEST_CASE("against a constant the binomial distribution decides") {
  const Report report = answered(10, [](int i) { return i < 9; });
  const LimitResult r = judged(report, report, "accuracy.mmlu_pro[fp16+sr] >= 80");
  CHECK(r.p_keeps == doctest::Approx(10 * std::pow(0.8, 9) * 0.2 + std::pow(0.8, 10)));
  CHECK(r.p_exceeds == doctest::Approx(1 - std::pow(0.8, 10)));
  const Report all = answered(10, [](int) { return true; });
  CHECK(judged(all, all, "accuracy.mmlu_pro[fp16+sr] >= 80").p_keeps ==
        doctest::Approx(std::pow(0.8, 10)));
  CHECK(judged(all, all, "accuracy.mmlu_pro[fp16+sr] >= 80").verdict == Verdict::undecided);
  CHECK(judged(all, all, "accuracy.mmlu_pro[fp16+sr] >= 70").verdict == Verdict::pass);
  const Report no = answered(10, [](int) { return false; });
  CHECK(judged(no, no, "accuracy.mmlu_pro[fp16+sr] >= 30").verdict == Verdict::fail);
}

TEST_CASE("from files: pass, regression and undecided with their exit codes, JUnit and Markdown") {
  TemporaryFolder place;
  const int n = 600;
  write_report(answered(n, [](int i) { return i < 480; }), place / "base.h5");
  write_report(answered(n, [](int i) { return i < 480 && i % 20 != 0; }), place / "worse.h5");
  write_report(answered(n, [](int i) { return i < 476; }), place / "close.h5");
  write_report(answered(n, [](int i) { return i < 482; }), place / "better.h5");
  auto gated = [&](const std::string& candidate, const std::string& gate) {
    std::ofstream(place / "gate.yaml") << gate;
    const Gate read = read_gate(place / "gate.yaml");
    return compare(read_report(place / "base.h5"), read_report(place / candidate), {}, &read);
  };
  const std::string regression = "limits: [\"accuracy.mmlu_pro[fp16+sr] >= base - 1.0\"]\n";
  const std::string noninferior =
      "limits: [{limit: \"accuracy.mmlu_pro[fp16+sr] >= base - 1.0\", kind: noninferior}]\n";
  CHECK(gated("worse.h5", regression).exit_code() == 3);
  CHECK(gated("worse.h5", noninferior).exit_code() == 3);
  CHECK(gated("better.h5", regression).exit_code() == 0);
  CHECK(gated("better.h5", noninferior).exit_code() == 0);
  CHECK(gated("close.h5", regression).exit_code() == 0);
  CHECK(gated("close.h5", noninferior).exit_code() == 4);
  CHECK(gated("close.h5", noninferior + "undecided: pass\n").exit_code() == 0);

  const Comparison worse = gated("worse.h5", regression);
  CHECK(worse.limits[0].candidate == doctest::Approx(76));
  CHECK(worse.limits[0].reference == doctest::Approx(80));
  CHECK(contains(worse.limits[0].warnings.at(0),
                 "lost 24, gained 0 answers, exact McNemar p = 1.19e-07"));
  CHECK(contains(comparison_text(worse), "mmlu_pro    600  80.00      76.00  -4.00 ["));
  CHECK(contains(comparison_junit(worse),
                 "<testcase classname=\"replayeval.gate\" name=\"accuracy.mmlu_pro[fp16+sr] &gt;= "
                 "base - 1.0\">\n      <failure message=\"FAIL: candidate 76.0, bound 79.0"));
  CHECK(contains(comparison_markdown(worse),
                 "| FAIL | accuracy.mmlu_pro[fp16+sr] >= base - 1.0 | regression | 76.0 | 80.0 |"));
  const Comparison close = gated("close.h5", noninferior);
  CHECK(contains(comparison_text(close), "items like these would decide"));
  CHECK(contains(comparison_junit(close), "<failure message=\"UNDECIDED: "));
  CHECK(
      contains(comparison_junit(gated("close.h5", regression)), "<skipped message=\"undecided: "));
}

TEST_CASE(
    "runs of other tasks, prompts, golds or repeats are refused by field; a gap is an error") {
  const Report base = answered(20, [](int i) { return i < 15; });
  auto refused = [&](auto change, const std::vector<std::string>& allow = {}) {
    Report other = base;
    change(other);
    return message_of([&] { compare(base, other, {allow, {}, {}}, nullptr); });
  };
  CHECK(refused([](Report&) {}) == "");
  CHECK(contains(refused([](Report& r) { r.run.tasks[0].sha256 = "other"; }),
                 "tasks differs: base has 'mmlu_pro version 4 (sha256 hash)', candidate has "
                 "'mmlu_pro version 4 (sha256 other)'; accept it with --allow tasks"));
  CHECK(refused([](Report& r) { r.run.tasks[0].version = 5; }, {"tasks"}) == "");
  CHECK(contains(refused([](Report& r) { r.items[3].prompt_sha256 = "x"; }),
                 "prompts differs: base has 'mmlu_pro/q3: p', candidate has 'mmlu_pro/q3: x'"));
  CHECK(contains(refused([](Report& r) { r.items[3].grading = "x"; }), "grading differs"));
  CHECK(contains(refused([](Report& r) { r.items[3].gold = "B"; }), "gold differs"));
  CHECK(contains(refused([](Report& r) { r.run.model_sha256 = "x"; }), "model differs"));
  CHECK(contains(refused([](Report& r) { r.run.repeats = 2; }), "repeats differs"));
  CHECK(contains(refused([](Report& r) { r.states[0].info.sha256 = "x"; }), "states differs"));
  // Which state is the baseline plays no part where there are answers alone.
  CHECK(refused([](Report& r) { r.run.baseline = "x"; }) == "");

  // Answers that one side lacks: left out of the table and counted, an error for a limit.
  Report shorter = base;
  shorter.states[0].answers.pop_back();
  CHECK(contains(comparison_text(compare(base, shorter, {}, nullptr)),
                 "fp16+sr, mmlu_pro: 1 answers that one run alone has are left out"));
  CHECK(contains(comparison_text(compare(shorter, base, {}, nullptr)), "1 answers that one run"));
  const std::string limit = "accuracy.mmlu_pro[fp16+sr] >= base - 50";
  CHECK(contains(message_of([&] { judged(base, shorter, limit); }),
                 "the candidate run has no answer to mmlu_pro/q19, repeat 0"));
  CHECK(contains(message_of([&] { judged(shorter, base, limit); }),
                 "the candidate run has 20 answers, the base run 19"));
  CHECK(contains(message_of([&] { judged(base, base, "accuracy.gpqa[fp16+sr] >= base"); }),
                 "no answers of task 'gpqa'"));
  CHECK(contains(message_of([&] { judged(base, base, "accuracy.mmlu_pro[nvfp4] >= base"); }),
                 "the candidate run has no state 'nvfp4'; it has fp16+sr"));
}

TEST_CASE("score runs merge for one table when tasks, items and the baseline's answers agree") {
  TemporaryFolder place;
  auto run = [&](const std::vector<std::string>& states) {
    RunFolder folder =
        RunFolder::open(place / states.back(), sample_score_plan(states), OpenMode::fresh);
    put_answers(folder);
    return folder.report();
  };
  const Report a = run({"fp32", "nvfp4+sr"}), b = run({"fp32", "fp8+sr"});
  const Report both = merge_reports({a, b});
  REQUIRE(both.states.size() == 3);
  CHECK(both.states[2].info.name == "fp8+sr");
  CHECK(both.states[2].answers.size() == b.states[1].answers.size());
  auto refused = [&](auto change) {
    Report other = b;
    change(other);
    return message_of([&] { merge_reports({a, other}); });
  };
  CHECK(contains(refused([](Report& r) { r.states[0].answers[3].text = "x"; }),
                 "text of fp32's answer to quiz/q1, repeat 1 differs"));
  CHECK(contains(refused([](Report& r) { r.states[0].answers[3].correct ^= true; }),
                 "verdict of fp32's answer to quiz/q1, repeat 1 differs"));
  CHECK(contains(refused([](Report& r) { r.states[0].answers.pop_back(); }),
                 "number of answers of fp32 differs: '14' and '13'"));
  CHECK(contains(refused([](Report& r) { r.items.pop_back(); }), "number of items differs"));
  CHECK(contains(refused([](Report& r) { r.items[2].prompt_sha256 = "x"; }),
                 "prompt of item number 2 differs"));
  CHECK(contains(refused([](Report& r) { r.run.tasks[1].sha256 = "x"; }),
                 "definition of task math differs"));
  CHECK(contains(refused([](Report& r) { r.run.repeats = 1; }), "repeats differs"));
}
