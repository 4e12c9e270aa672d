#include "reports/compare.h"

#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <random>

#include "reports/schema.h"
#include "tests/reports/sample_run.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

double standard_normal(std::mt19937_64& random) {
  const double u = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53;
  const double v = static_cast<double>(random() >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
}

/// A run with one low-precision state whose KL is `factor` times a noise that depends on `seed`
/// alone in part (shared by all runs of equal `text`) and on `own`.
Report made_run(uint64_t text, uint64_t own, double factor, int documents, int64_t tokens,
                double between = 0.2) {
  Report report;
  report.path = "run" + std::to_string(own);
  report.run.model_sha256 = sha256_hex("model");
  report.run.tokenizer_sha256 = sha256_hex("tokenizer");
  report.layers = {{0, "gdn", 1, {}}};
  for (const char* name : {"fp32", "fp16+sr", "nvfp4+sr"})
    report.states.push_back({sample_state(name), {}});
  std::mt19937_64 shared(text), mine(own);
  for (int d = 0; d < documents; ++d) {
    const std::string id = "book " + std::to_string(d);
    report.documents.push_back({id, "", tokens, sha256_hex(id), 0});
    report.token_ids.emplace_back(static_cast<size_t>(tokens), 7);
    const double level = between * standard_normal(mine);
    std::vector<StateDocument> state(3);
    for (StateDocument& s : state) {
      s.length = tokens;
      s.health.resize(1);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const double noise = standard_normal(shared), own_noise = standard_normal(mine);
      const double nll = 3 + 0.5 * noise;
      const double kl = 1e-3 * factor * std::exp(0.5 * noise + 0.1 * own_noise + level);
      for (int s = 0; s < 3; ++s) {
        state[static_cast<size_t>(s)].kl.push_back(
            s == 0 ? 0.0f : static_cast<float>(s == 1 ? 1e-4 * std::exp(noise) : kl));
        state[static_cast<size_t>(s)].nll.push_back(
            t + 1 == tokens ? std::numeric_limits<float>::quiet_NaN()
                            : static_cast<float>(nll + (s == 2 ? kl : 0)));
        state[static_cast<size_t>(s)].top1.push_back(s == 2 && own_noise > 2 ? 0 : 1);
      }
    }
    for (size_t s = 0; s < 3; ++s) report.states[s].documents.push_back(state[s]);
  }
  return report;
}

/// Adds a task of `items` four-way questions; `right(s, i)` says whether state s answers item i.
template <class Right>
void add_answers(Report& report, const std::string& task, int items, Right right) {
  const auto first = static_cast<int32_t>(report.items.size());
  for (int i = 0; i < items; ++i) {
    report.items.push_back({"q" + std::to_string(i),
                            task,
                            "c",
                            0,
                            "A",
                            4,
                            {2, 0, 1, 3},
                            sha256_hex(task + std::to_string(i)),
                            "letter"});
  }
  for (size_t s = 0; s < report.states.size(); ++s) {
    for (int i = 0; i < items; ++i) {
      report.states[s].answers.push_back(
          {first + i, 0, "answer (A)", 5, "stop", "A", "letter", 1, right(s, i), 0.5});
    }
  }
}

Gate gate_of(const std::vector<std::string>& limits, LimitKind kind = LimitKind::regression) {
  Gate gate;
  for (const std::string& limit : limits)
    gate.limits.push_back(parse_limit(limit, kind, "gate.yaml:1:1"));
  return gate;
}

LimitResult judged(const Report& base, const Report& candidate, const std::string& limit,
                   LimitKind kind = LimitKind::regression) {
  const Gate gate = gate_of({limit}, kind);
  return compare(base, candidate, {}, &gate).limits.at(0);
}

}  // namespace

TEST_CASE("limits are parsed") {
  Limit limit =
      parse_limit("kl.mean[fp16+sr/nvfp4]@98304-131072 <= 1.3 * base", LimitKind::regression, "g");
  CHECK(limit.metric.name == "kl.mean");
  CHECK(limit.metric.state == "fp16+sr/nvfp4");
  CHECK(limit.metric.range == "98304-131072");
  CHECK(limit.at_most);
  CHECK(limit.factor == 1.3);
  CHECK(limit.against_base);
  CHECK(limit.offset == 0);
  limit = parse_limit("accuracy.mmlu-pro[nvfp4+sr@L=1;layers=0-5] >= base - 1.0",
                      LimitKind::noninferior, "g");
  CHECK(limit.metric.name == "accuracy");
  CHECK(limit.metric.task == "mmlu-pro");
  CHECK(limit.metric.state == "nvfp4+sr@L=1;layers=0-5");
  CHECK_FALSE(limit.at_most);
  CHECK(limit.factor == 1);
  CHECK(limit.offset == -1);
  limit = parse_limit("top1[a]>=base-0.5", LimitKind::regression, "g");
  CHECK(limit.offset == -0.5);
  limit = parse_limit("kl.mean[a]@last <= 3*kl.mean[b]@last + 1e-5", LimitKind::regression, "g");
  CHECK(limit.against->state == "b");
  CHECK(limit.factor == 3);
  CHECK(limit.offset == 1e-5);
  limit = parse_limit("growth[a] <= 0.8", LimitKind::regression, "g");
  CHECK(limit.factor == 0);
  CHECK(limit.offset == 0.8);
  auto refused = [](const std::string& text) {
    return message_of([&] { parse_limit(text, LimitKind::regression, "gate.yaml:3:5"); });
  };
  CHECK(contains(
      refused("kl.median[a] <= 1"),
      "gate.yaml:3:5: limit 'kl.median[a] <= 1': unknown metric 'kl.median'; known: kl.mean"));
  CHECK(contains(refused("kl.mean <= 1"), "expected [state]"));
  CHECK(contains(refused("kl.mean[a] < 1"), "expected <= or >="));
  CHECK(contains(refused("kl.mean[a] <= 2 base"), "expected '*'"));
  CHECK(contains(refused("kl.mean[a] <= base ^ 2"), "expected + or -"));
  CHECK(contains(refused("kl.mean[a] <= base + x"), "expected a number at the end"));
  CHECK(contains(refused("kl.mean[a] <= nll.mean[a]"), "compares kl.mean with nll.mean"));
  CHECK(contains(refused("kl.mean[a]@ <= 1"), "expected a range"));
  for (const char* range : {"100-50", "100-100"}) {
    CHECK(contains(refused(std::string("kl.mean[a]@") + range + " <= 1"),
                   std::string("range '") + range + "' is empty: expected FIRST-LAST"));
  }
  CHECK(contains(refused("accuracy[a]@last >= 1"), "accuracy has no range"));
}

TEST_CASE("gate files are read, and wrong ones refused with line and column") {
  TemporaryFolder place;
  auto read = [&](const std::string& text) {
    std::ofstream(place / "gate.yaml") << text;
    return read_gate(place / "gate.yaml");
  };
  const Gate gate = read(
      "alpha: 0.01\nundecided: fail\nnon_finite: allow\nlimits:\n  - kl.mean[nvfp4+sr]@last <= 1.3 "
      "* base\n"
      "  - {limit: \"accuracy.gpqa[nvfp4+sr] >= base - 1.0\", kind: noninferior}\n");
  CHECK(gate.alpha == 0.01);
  CHECK(gate.power == 0.8);
  CHECK(gate.undecided_fails == true);
  CHECK(gate.allow_non_finite);
  REQUIRE(gate.limits.size() == 2);
  CHECK(gate.limits[0].kind == LimitKind::regression);
  CHECK(gate.limits[1].kind == LimitKind::noninferior);
  CHECK(contains(message_of([&] { read("limit: []\n"); }), "gate.yaml:1:1: unknown key 'limit'"));
  CHECK(contains(message_of([&] { read("alpha: 2\n"); }),
                 "gate.yaml:1:8: alpha: expected a number between 0 and 1"));
  CHECK(contains(message_of([&] { read("undecided: maybe\n"); }),
                 "expected pass or fail, got 'maybe'"));
  CHECK(contains(message_of([&] { read("limits:\n  - {limit: \"top1[a] >= 1\", typ: x}\n"); }),
                 ":2:29: unknown key 'typ'"));
  CHECK(contains(message_of([&] { read("limits:\n  - kl[a] <= 1\n"); }),
                 ":2:5: limit 'kl[a] <= 1': unknown metric"));
  const std::string limits = "limits: [\"top1[a] >= 1\"]\n";
  for (const char* key : {"alpha: 0.05", "power: 0.8", "undecided: pass", "non_finite: fail"}) {
    const std::string line = std::string(key) + "\n";
    const std::string name = line.substr(0, line.find(':'));
    CHECK(
        contains(message_of([&] { read(line + limits + line); }),
                 "gate.yaml:3:1: key '" + name + "' is given twice, first on line 1; remove one"));
  }
  CHECK(contains(message_of([&] { read(limits + limits); }),
                 "gate.yaml:2:1: key 'limits' is given twice, first on line 1"));
  CHECK(contains(message_of([&] {
                   read("limits:\n  - {limit: \"top1[a] >= 1\", limit: \"top1[a] >= 2\"}\n");
                 }),
                 "gate.yaml:2:29: key 'limit' is given twice, first on line 2"));
  CHECK(contains(message_of([&] { read("limits: [\n"); }), "gate.yaml:"));
  CHECK(contains(message_of([&] { read("alpha: 0.1\n"); }), "limits: expected at least one"));
  CHECK(contains(message_of([&] { read_gate(place / "none.yaml"); }), "no such file"));
}

TEST_CASE("runs that differ in model, data, prompts, rules or definitions are refused by field") {
  const Report base = made_run(1, 2, 1, 2, 600);
  auto refused = [&](auto change, const std::vector<std::string>& allow = {}) {
    Report other = base;
    other.path = "other";
    change(other);
    CompareOptions options;
    options.allow = allow;
    return message_of([&] { compare(base, other, options, nullptr); });
  };
  CHECK(refused([](Report&) {}).empty());
  CHECK(contains(refused([](Report& r) { r.run.model_sha256 = "x"; }),
                 "model differs: run2 has '9372c470"));
  CHECK(contains(refused([](Report& r) { r.run.tokenizer_sha256 = "x"; }),
                 "other has 'x'; accept it with --allow tokenizer"));
  CHECK(refused([](Report& r) { r.run.tokenizer_sha256 = "x"; }, {"tokenizer"}).empty());
  CHECK(contains(refused([](Report& r) { r.documents[1].sha256 = "x"; }), "data differs"));
  CHECK(contains(refused([](Report& r) { r.states[2].info.sha256 = "x"; }),
                 "states differs: run2 has 'nvfp4+sr: sha256 "));
  CHECK(contains(refused([](Report& r) {
                   r.states[2].info.sha256 = "x";
                   r.states[2].info.definition += "\nwindow 8\nring fp32";
                 }),
                 "other has 'nvfp4+sr: window 8; ring fp32'; accept it with --allow states"));
  CHECK(contains(refused([](Report& r) { r.run.prompt_tokens = 16; }), "prompt_tokens differs"));
  CHECK(contains(refused([](Report& r) { r.token_ids[1][5] = 8; }),
                 "document book 1: token at position 5 is 7 in the base run, 8"));
  CHECK(refused([](Report& r) { r.run.device = "cuda"; }).empty());
  CHECK(contains(refused([](Report& r) { r.states.resize(1), r.states[0].info.name = "x"; }),
                 "no state of the same name"));

  Report quiz = base;
  add_answers(quiz, "gpqa", 10, [](size_t, int) { return true; });
  Report changed = quiz;
  changed.items[3].prompt_sha256 = "x";
  CHECK(contains(message_of([&] { compare(quiz, changed, {}, nullptr); }),
                 "prompts differs: run2 has 'gpqa/q3: "));
  changed = quiz;
  for (ItemInfo& item : changed.items) item.grading = "other rule";
  CHECK(contains(message_of([&] { compare(quiz, changed, {}, nullptr); }),
                 "grading differs: run2 has 'gpqa/q0: letter (and 9 more)'"));
}

TEST_CASE("a gate passes, fails, or stays undecided, with its exit code") {
  const Report base = made_run(1, 2, 1, 6, 512);
  const Report same = made_run(1, 3, 1, 6, 512);
  const Report worse = made_run(1, 4, 2, 6, 512);
  LimitResult r = judged(base, same, "kl.mean[nvfp4+sr] <= 1.6 * base");
  CHECK(r.verdict == Verdict::pass);
  CHECK(r.count == 6 * 512);
  CHECK(r.documents == 6);
  r = judged(base, worse, "kl.mean[nvfp4+sr] <= 1.3 * base");
  CHECK(r.verdict == Verdict::fail);
  CHECK(r.candidate / r.reference == doctest::Approx(std::exp(r.loss) * 1.3));
  // A bound one percent above what was seen, with documents that spread by 20 % on either side,
  // stays open.
  const std::string close =
      "kl.mean[nvfp4+sr] <= " + std::to_string(1.01 * r.candidate / r.reference) + " * base";
  r = judged(base, worse, close);
  CHECK(r.verdict == Verdict::undecided);
  CHECK_FALSE(r.blocks);
  CHECK(r.count_to_decide > static_cast<double>(r.count));
  CHECK(judged(base, worse, close, LimitKind::noninferior).blocks);

  Gate gate = gate_of({close});
  CHECK(compare(base, worse, {}, &gate).exit_code() == 0);
  gate.undecided_fails = true;
  CHECK(compare(base, worse, {}, &gate).exit_code() == 4);
  gate = gate_of({"kl.mean[nvfp4+sr] <= 1.3 * base", close});
  gate.undecided_fails = true;
  CHECK(compare(base, worse, {}, &gate).exit_code() == 3);
  gate = gate_of({"kl.mean[nvfp4+sr] <= 1.3 * base"});
  CHECK(compare(base, base, {}, &gate).exit_code() == 0);

  // Against another state of the candidate run, a constant, a bin, a range, and the other metrics.
  CHECK(judged(base, same, "kl.mean[nvfp4+sr]@last <= 3 * kl.mean[fp16+sr]@last").verdict ==
        Verdict::fail);
  CHECK(judged(base, same, "kl.mean[nvfp4+sr] <= 0.01").verdict == Verdict::pass);
  CHECK(judged(base, same, "kl.mean[nvfp4+sr]@1K <= 1e-4").verdict == Verdict::fail);
  CHECK(judged(base, same, "kl.mean[nvfp4+sr]@256-512 <= 2 * base").count == 6 * 256);
  CHECK(judged(base, same, "top1[nvfp4+sr] >= base - 2").verdict == Verdict::pass);
  CHECK(judged(base, same, "top1[nvfp4+sr] >= base + 2").verdict == Verdict::fail);
  CHECK(judged(base, worse, "perplexity[nvfp4+sr] <= 1.1 * base").verdict == Verdict::pass);
  CHECK(judged(base, worse, "nll.mean[nvfp4+sr] <= base + 0.0001").verdict == Verdict::fail);

  CompareOptions options;
  options.pairs = {{"fp16+sr", "nvfp4+sr"}};
  gate = gate_of({"kl.mean[nvfp4+sr] <= 3 * base"});
  const Comparison paired = compare(base, same, options, &gate);
  CHECK(paired.exit_code() == 3);
  CHECK(contains(comparison_text(paired), "fp16+sr = nvfp4+sr"));
  options.pairs = {{"int8", "nvfp4+sr"}};
  CHECK(contains(message_of([&] { compare(base, same, options, &gate); }),
                 "the base run has no state 'int8'; it has fp32 fp16+sr nvfp4+sr"));
}

TEST_CASE("what is missing on one side is an error, never a pass") {
  const Report base = made_run(1, 2, 1, 2, 600);
  auto refused = [&](const Report& candidate, const std::string& limit) {
    return message_of([&] { judged(base, candidate, limit); });
  };
  CHECK(contains(refused(base, "kl.mean[int8] <= 1"), "the candidate run has no state 'int8'"));
  CHECK(contains(refused(base, "kl.mean[nvfp4+sr]@512-1024 <= 1"),
                 "range '512-1024' is not measured; both runs have 600 positions"));
  CHECK(contains(refused(base, "kl.mean[nvfp4+sr]@128K <= 1"), "range '128K' is neither"));
  CHECK(contains(refused(base, "growth[nvfp4+sr] <= 1"), "growth needs two octaves"));
  CHECK(contains(refused(base, "accuracy.gpqa[nvfp4+sr] >= base"),
                 "the base run has no answers of task 'gpqa'"));
  Report without = base;
  without.states.erase(without.states.begin() + 2);
  CHECK(contains(message_of([&] { judged(without, base, "kl.mean[nvfp4+sr] <= base"); }),
                 "the base run has no state 'nvfp4+sr'"));
  Report a = base, b = base;
  add_answers(a, "gpqa", 10, [](size_t, int) { return true; });
  add_answers(b, "gpqa", 9, [](size_t, int) { return true; });
  CHECK(contains(message_of([&] { judged(a, b, "accuracy.gpqa[nvfp4+sr] >= base"); }),
                 "the candidate run has no answer to gpqa/q9, repeat 0"));
  CHECK(contains(message_of([&] { judged(b, a, "accuracy.gpqa[nvfp4+sr] >= base"); }),
                 "the candidate run has 10 answers, the base run 9"));
}

/// Keeps the first `length` positions of a document in every state, as a killed run has them.
void cut(Report& report, size_t document, int64_t length) {
  for (StateReport& state : report.states) {
    StateDocument& d = state.documents[document];
    d.length = length;
    d.kl.resize(static_cast<size_t>(length));
    d.nll.resize(static_cast<size_t>(length));
    d.top1.resize(static_cast<size_t>(length));
  }
  report.token_ids[document].resize(static_cast<size_t>(length));
}

TEST_CASE("documents and positions that one side lacks are an error of a gate") {
  const Report whole = made_run(1, 2, 1, 3, 600), other = made_run(1, 3, 1, 3, 600);
  Report without = other, shorter = other;
  cut(without, 2, 0);
  cut(shorter, 1, 500);
  auto refused = [](const Report& base, const Report& candidate, const std::string& limit) {
    return message_of([&] { judged(base, candidate, limit); });
  };
  for (const char* limit :
       {"kl.mean[nvfp4+sr] <= 100", "kl.mean[nvfp4+sr] <= 100 * base", "non_finite[nvfp4+sr] <= 0",
        "kl.mean[nvfp4+sr]@last <= 100 * kl.mean[fp16+sr]@last"}) {
    CAPTURE(limit);
    CHECK(refused(whole, other, limit) == "");
    CHECK(contains(refused(whole, without, limit),
                   "the candidate run is not finished: document book 2 lacks positions 0-600 by "
                   "state nvfp4+sr; go on with it"));
    CHECK(contains(refused(whole, shorter, limit), "document book 1 lacks positions 500-600"));
    CHECK(contains(refused(without, without, limit), "document book 2 lacks positions 0-600"));
  }
  CHECK(contains(refused(without, whole, "kl.mean[nvfp4+sr] <= 100 * base"),
                 "the base run is not finished: document book 2 lacks positions 0-600"));
  // Within the range nothing is missing.
  CHECK(refused(whole, shorter, "kl.mean[nvfp4+sr]@0-500 <= 100 * base") == "");

  // Experiments of other lengths and lists.
  Report brief = shorter;
  brief.documents[1].tokens = 500;
  CHECK(contains(refused(whole, brief, "kl.mean[nvfp4+sr] <= 100"),
                 "the experiment of the candidate run has no positions 500-600 of document book 1, "
                 "which the other has; name a range that both have (@0-500)"));
  CHECK(contains(refused(brief, whole, "kl.mean[nvfp4+sr] <= 100"),
                 "the experiment of the base run has no positions 500-600"));
  Report fewer = other;
  fewer.documents.pop_back();
  fewer.token_ids.pop_back();
  for (StateReport& state : fewer.states) state.documents.pop_back();
  const Gate gate = gate_of({"kl.mean[nvfp4+sr] <= 100 * base"});
  CHECK(contains(message_of([&] { compare(whole, fewer, {}, &gate); }), "data differs"));
  CompareOptions options;
  options.allow = {"data"};
  const Comparison common = compare(whole, fewer, options, &gate);
  CHECK(common.limits[0].documents == 2);
  CHECK(
      contains(comparison_text(common),
               "nvfp4+sr: left out: positions 0-600 of document book 2 (base has 600, candidate 0 "
               "positions of it)"));
  CHECK(message_of([&] { compare(whole, brief, options, &gate); }) == "");
  CHECK(contains(message_of([&] { compare(whole, without, options, &gate); }), "is not finished"));

  // Without a gate they are named.
  CHECK_FALSE(contains(comparison_text(compare(whole, other, {}, nullptr)), "left out"));
  CHECK(contains(comparison_text(compare(whole, without, {}, nullptr)),
                 "left out: positions 0-600 of document book 2"));
  cut(shorter, 2, 100);
  CHECK(contains(comparison_text(compare(whole, shorter, {}, nullptr)),
                 "left out: positions 500-600 of document book 1 (base has 600, candidate 500 "
                 "positions of it), and of 1 more documents"));
}

TEST_CASE("answers that the base has and the candidate lacks are an error of any limit") {
  Report a = made_run(1, 2, 1, 2, 60), b = a;
  add_answers(a, "gpqa", 10, [](size_t, int) { return true; });
  add_answers(b, "gpqa", 9, [](size_t, int) { return true; });
  for (const char* limit :
       {"accuracy.gpqa[nvfp4+sr] >= 50", "accuracy[nvfp4+sr] >= accuracy[fp16+sr] - 5"})
    CHECK(contains(message_of([&] { judged(a, b, limit); }), "has no answer to gpqa/q9"));
  CHECK(message_of([&] { judged(a, a, "accuracy.gpqa[nvfp4+sr] >= 50"); }) == "");
}

TEST_CASE("states that one run alone has are named") {
  const Report base = made_run(1, 2, 1, 2, 60);
  Report candidate = base;
  CHECK_FALSE(contains(comparison_text(compare(base, candidate, {}, nullptr)), "run has"));
  candidate.states.back().info.name = "mine";
  const std::string name = base.states.back().info.name;
  const std::string text = comparison_text(compare(base, candidate, {}, nullptr));
  CHECK(contains(text, "only the base run has " + name + " (--pair A=B)"));
  CHECK(contains(text, "only the candidate run has mine (--pair A=B)"));
}

TEST_CASE("runs with nothing in common and unknown fields to allow are refused") {
  const Report whole = made_run(1, 2, 1, 2, 60);
  Report first = whole, second = whole;
  cut(first, 0, 0);
  cut(second, 1, 0);
  CHECK(contains(message_of([&] { compare(first, second, {}, nullptr); }),
                 "compare: the runs have no measured position and no answer in common: fp32: left "
                 "out: positions 0-60 of document book 0 (base has 0, candidate 60"));
  CompareOptions options;
  options.allow = {"model", "documents"};
  CHECK(message_of([&] { compare(whole, whole, options, nullptr); }) ==
        "compare: --allow: unknown field 'documents'; known: job model tokenizer data baseline "
        "prompt_tokens tasks repeats gold prompts grading states");
  // Each field that a refusal names is a known one: all of them are accepted.
  options.allow = {"job",   "model",   "tokenizer", "data",    "baseline", "prompt_tokens",
                   "tasks", "repeats", "gold",      "prompts", "grading",  "states"};
  CHECK(message_of([&] { compare(whole, whole, options, nullptr); }) == "");
}

TEST_CASE("non-finite positions fail a gate unless it allows them") {
  const Report base = made_run(1, 2, 1, 4, 600);
  Report broken = base;
  broken.states[2].documents[1].kl[100] = std::numeric_limits<float>::quiet_NaN();
  broken.states[2].documents[1].nll[100] = std::numeric_limits<float>::quiet_NaN();
  Gate gate = gate_of({"kl.mean[nvfp4+sr] <= 2 * base"});
  Comparison c = compare(base, broken, {}, &gate);
  CHECK(c.exit_code() == 3);
  CHECK(contains(c.limits[0].warnings.at(0), "1 positions of nvfp4+sr are not finite: fails"));
  gate.allow_non_finite = true;
  c = compare(base, broken, {}, &gate);
  CHECK(c.exit_code() == 0);
  CHECK(c.limits[0].count == 4 * 600 - 1);
  CHECK(judged(base, broken, "non_finite[nvfp4+sr] <= 0").verdict == Verdict::fail);
  CHECK(judged(base, broken, "non_finite[nvfp4+sr] <= 1").verdict == Verdict::pass);
  CHECK(judged(base, base, "non_finite[nvfp4+sr] <= 0").verdict == Verdict::pass);
}

TEST_CASE("several limits are corrected by Holm") {
  // Answers that lose k of 200 items and gain none: the one-sided p of a single limit is about
  // 0.012 for k = 5.
  Report base = made_run(1, 2, 1, 2, 300), candidate = base;
  add_answers(base, "gpqa", 200, [](size_t, int i) { return i < 150; });
  add_answers(candidate, "gpqa", 200,
              [](size_t s, int i) { return i < 150 && !(s == 2 && i < 5); });
  Gate one = gate_of({"accuracy.gpqa[nvfp4+sr] >= base"});
  const LimitResult single = compare(base, candidate, {}, &one).limits[0];
  CHECK(single.verdict == Verdict::fail);
  // Three limits: the least p is compared with alpha / 3.
  Gate three = gate_of({"accuracy.gpqa[nvfp4+sr] >= base", "accuracy.gpqa[fp16+sr] >= base",
                        "kl.mean[nvfp4+sr] <= 2 * base"});
  three.alpha = 3.1 * single.p_exceeds;
  CHECK(compare(base, candidate, {}, &three).limits[0].verdict == Verdict::fail);
  // Step down: where the least p does not pass, a later one (compared with a larger share) must not
  // either.
  Gate two = gate_of({"accuracy.gpqa[nvfp4+sr] >= base", "accuracy.gpqa[nvfp4+sr] >= base"});
  two.alpha = 1.5 * single.p_exceeds;
  for (const LimitResult& r : evaluate_gate(two, base, candidate, {}))
    CHECK(r.verdict == Verdict::undecided);
  two.alpha = 2.1 * single.p_exceeds;
  for (const LimitResult& r : evaluate_gate(two, base, candidate, {}))
    CHECK(r.verdict == Verdict::fail);
  three.alpha = 2.9 * single.p_exceeds;
  CHECK(compare(base, candidate, {}, &three).limits[0].verdict == Verdict::undecided);
  CHECK(contains(compare(base, candidate, {}, &three).limits[0].warnings.at(0),
                 "lost 5, gained 0 answers, exact McNemar p = 0.0625"));
}

TEST_CASE("least detectable effect, chance, and limits that cannot fail") {
  Report base = made_run(1, 2, 1, 2, 300), candidate = base;
  // 27 % right, chance 25 %; 20 answers lost and 20 gained of 400.
  add_answers(base, "gpqa", 400, [](size_t, int i) { return i < 108; });
  add_answers(candidate, "gpqa", 400,
              [](size_t s, int i) { return s == 2 ? i >= 20 && i < 128 : i < 108; });
  const LimitResult r = judged(base, candidate, "accuracy.gpqa[nvfp4+sr] >= base - 1.0");
  CHECK(r.unit == "items");
  CHECK(r.count == 400);
  CHECK(r.candidate == doctest::Approx(27));
  CHECK(r.reference == doctest::Approx(27));
  CHECK(r.bound == doctest::Approx(26));
  CHECK(r.loss == doctest::Approx(-1));
  // Differences -100 (20), 100 (20), 0 (360): standard error sqrt(1000 / 399); (1.645 + 0.842) of
  // it is detectable. The bootstrap of 1,000 knows it to 1 / sqrt(2000) = 2.2 %; four of those.
  CHECK(r.standard_error == doctest::Approx(std::sqrt(1000.0 / 399)).epsilon(0.09));
  CHECK(r.least_detectable == doctest::Approx(r.standard_error * (1.6487 + 0.8426))
                                  .epsilon(1e-3));  // Student's t, 399 degrees
  CHECK(r.count_to_decide ==
        doctest::Approx(std::ceil(400 * std::pow(r.least_detectable / r.loss, 2))));
  CHECK(r.verdict == Verdict::undecided);
  bool near_chance = false;
  for (const std::string& w : r.warnings)
    near_chance = near_chance || contains(w, "of chance (25.0)");
  CHECK(near_chance);
  auto never = [&](const std::string& limit) {
    for (const std::string& w : judged(base, candidate, limit).warnings) {
      if (contains(w, "can never fail")) return true;
    }
    return false;
  };
  CHECK(never("accuracy.gpqa[nvfp4+sr] >= base - 30"));
  CHECK(never("top1[nvfp4+sr] >= base - 100"));
  CHECK(never("kl.mean[nvfp4+sr] >= 0"));
  CHECK(never("top1[nvfp4+sr] <= 100"));
  CHECK_FALSE(never("kl.mean[nvfp4+sr] <= 100 * base"));
  auto hopeless = [&](const std::string& limit) {
    for (const std::string& w : judged(base, candidate, limit).warnings) {
      if (contains(w, "can never be kept")) return true;
    }
    return false;
  };
  CHECK(hopeless("top1[nvfp4+sr] >= 101"));
  CHECK(hopeless("kl.mean[nvfp4+sr] <= -1"));
  CHECK_FALSE(hopeless("kl.mean[nvfp4+sr] <= 0"));

  // What no longer run can keep fails however short this one is.
  const Report brief = made_run(1, 2, 1, 1, 40);
  for (const char* limit : {"top1[nvfp4+sr] >= 101", "kl.mean[nvfp4+sr] <= -1",
                            "kl.mean[nvfp4+sr] <= 0", "kl.mean[nvfp4+sr] <= 0 * base"}) {
    INFO(limit);
    CHECK(judged(brief, brief, limit).verdict == Verdict::fail);
  }
  CHECK(judged(brief, brief, "top1[fp16+sr] >= 100").verdict != Verdict::fail);
  CHECK(judged(brief, brief, "kl.mean[nvfp4+sr] <= 2 * base").verdict != Verdict::fail);
}

TEST_CASE("growth is gated") {
  auto grown = [](double exponent) {
    Report report = made_run(1, 2, 1, 3, 8192, 0);
    for (StateDocument& d : report.states[2].documents) {
      for (const Bin& bin : position_bins(8192)) {
        const double middle = 0.5 * static_cast<double>(bin.first + bin.last);
        for (int64_t t = bin.first; t < bin.last; ++t)
          d.kl[static_cast<size_t>(t)] *= static_cast<float>(std::pow(middle, exponent));
      }
    }
    return report;
  };
  const Report flat = grown(0), steep = grown(0.5);
  CHECK(judged(flat, steep, "growth[nvfp4+sr] <= 0.7").verdict == Verdict::pass);
  CHECK(judged(flat, steep, "growth[nvfp4+sr] <= 0.3").verdict == Verdict::fail);
  CHECK(judged(flat, steep, "growth[nvfp4+sr] <= base + 0.2").verdict == Verdict::fail);
  CHECK(judged(flat, steep, "growth[nvfp4+sr] <= base + 0.2").loss ==
        doctest::Approx(0.3).epsilon(0.01));
}

TEST_CASE("JUnit and Markdown") {
  const Report base = made_run(1, 2, 1, 6, 512), worse = made_run(1, 4, 2, 6, 512);
  const LimitResult seen = judged(base, worse, "kl.mean[nvfp4+sr] <= 1.3 * base");
  Gate gate = gate_of(
      {"kl.mean[nvfp4+sr] <= 1.3 * base",
       "kl.mean[nvfp4+sr] <= " + std::to_string(1.01 * seen.candidate / seen.reference) + " * base",
       "top1[nvfp4+sr] >= base - 9"});
  const Comparison c = compare(base, worse, {}, &gate);
  const std::string junit = comparison_junit(c);
  CHECK(contains(junit, "tests=\"3\" failures=\"1\" errors=\"0\" skipped=\"1\""));
  CHECK(contains(junit,
                 "name=\"kl.mean[nvfp4+sr] &lt;= 1.3 * base\">\n      <failure message=\"FAIL: "));
  CHECK(contains(junit, "<skipped message=\"undecided: "));
  const std::string markdown = comparison_markdown(c);
  CHECK(contains(markdown, "| FAIL | kl.mean[nvfp4+sr] <= 1.3 * base | regression |"));
  CHECK(contains(markdown, "tokens like these would decide"));
  CHECK(contains(comparison_text(c), "alpha 0.05 over 3 limits (Holm)"));
}

TEST_CASE("items and answers are stored and read back") {
  TemporaryFolder place;
  Report report = made_run(1, 2, 1, 1, 300);
  add_answers(report, "gpqa", 3,
              [](size_t s, int i) { return (static_cast<int>(s) + i) % 2 == 0; });
  report.items[1].option_order = {1, 0};
  report.states[2].answers[1].text = "line\nwith \xC3\xA9 and \"quotes\"";
  report.states[2].answers[1].finish_reason = "length";
  write_report(report, place / "r.h5");
  const Report loaded = read_report(place / "r.h5");
  REQUIRE(loaded.items.size() == 3);
  CHECK(loaded.items[1].option_order == std::vector<int32_t>{1, 0});
  CHECK(loaded.items[2].option_order == std::vector<int32_t>{2, 0, 1, 3});
  CHECK(loaded.items[2].prompt_sha256 == report.items[2].prompt_sha256);
  REQUIRE(loaded.states[2].answers.size() == 3);
  CHECK(loaded.states[2].answers[1].text == report.states[2].answers[1].text);
  CHECK(loaded.states[2].answers[1].finish_reason == "length");
  CHECK(loaded.states[2].answers[0].correct);
  CHECK_FALSE(loaded.states[2].answers[1].correct);
  CHECK(loaded.states[2].answers[2].seconds == 0.5);
  CHECK(figures_differ(report, loaded) == "");
}

TEST_CASE("reports of one text merge into one table, others are refused by what differs") {
  const Report a = made_run(1, 2, 1, 2, 300);
  Report b = made_run(1, 3, 1, 2, 300);
  b.states[2].info = sample_state("int8");
  const Report both = merge_reports({a, b});
  REQUIRE(both.states.size() == 4);
  CHECK(both.states[3].info.name == "int8");
  CHECK(kl_statistics(both).states[3].all.kl.value == kl_statistics(b).states[2].all.kl.value);
  auto refused = [&](auto change) {
    Report other = b;
    change(other);
    return message_of([&] { merge_reports({a, other}); });
  };
  CHECK(contains(refused([](Report& r) { r.run.model_sha256 = "x"; }), "model differs"));
  CHECK(contains(refused([](Report& r) { r.documents[0].sha256 = "x"; }), "documents differs"));
  CHECK(contains(refused([](Report& r) { r.states[0].documents[1].nll[7] = 2; }),
                 "the fp32 row at position 7 of document book 1 differs"));
  CHECK(contains(refused([](Report& r) { r.states[1].info.sha256 = "x"; }),
                 "definition of state fp16+sr differs"));
}

TEST_CASE(
    "false alarms at alpha 0.05 are 3 to 7 % of 2,000 gates whose candidate sits on the bound") {
  // KL: eight documents with their own levels on both sides, true ratio 1, bound 1.0 * base.
  // Answers: each of 200 items is right in the base at 0.5; of the right ones the candidate loses a
  // fifth, of the others it gains a tenth: the true loss is 5 points, the margin. 2,000 runs at 5 %
  // count 100 with a standard deviation of 10: the limits are four of them away.
  // The bootstrap's seed changes too: 300 replicates know a standard error to 4 %, alike in all
  // runs of one seed.
  CompareOptions options{{}, {}, {1, 300}};
  const Gate kl = gate_of({"kl.mean[nvfp4+sr] <= 1.0 * base"});
  const Gate accuracy = gate_of({"accuracy.gpqa[nvfp4+sr] >= base - 5"});
  auto alarm = [&](const Gate& gate, const Report& base, const Report& candidate) {
    return evaluate_gate(gate, base, candidate, options)[0].verdict == Verdict::fail ? 1 : 0;
  };
  int kl_alarms = 0, accuracy_alarms = 0;
  Report quiz = made_run(1, 1, 1, 1, 4);
  add_answers(quiz, "gpqa", 200, [](size_t, int) { return true; });
  Report other = quiz;
  for (uint64_t run = 0; run < 2000; ++run) {
    options.statistics.seed = run;
    kl_alarms += alarm(kl, made_run(run + 1, 2 * run + 5000, 1, 8, 16),
                       made_run(run + 1, 2 * run + 5001, 1, 8, 16));
    std::mt19937_64 random(run + 1);
    auto below = [&](uint64_t percent) { return (random() >> 32) % 100 < percent; };
    for (size_t i = 0; i < 200; ++i) {
      const bool right = below(50);
      quiz.states[2].answers[i].correct = right;
      other.states[2].answers[i].correct = right ? !below(20) : below(10);
    }
    accuracy_alarms += alarm(accuracy, quiz, other);
  }
  MESSAGE("false alarms of 2000: kl " << kl_alarms << ", accuracy " << accuracy_alarms);
  CHECK(kl_alarms >= 60);
  CHECK(kl_alarms <= 140);
  CHECK(accuracy_alarms >= 60);
  CHECK(accuracy_alarms <= 140);
}
