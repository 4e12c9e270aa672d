// Accuracy, paired changes, groups and flips: hand-computed cases, and the tables of `show`.
#include "reports/answer_statistics.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "reports/answer_tables.h"
#include "reports/files.h"
#include "reports/flips.h"
#include "reports/hdf5_image.h"
#include "reports/schema.h"
#include "tests/reports/sample_answers.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

/// Two states, `verdicts[state]` spells one answer an item: + right, - wrong, 0 no answer, x cut
/// off. Item i of the baseline has 10 + i tokens. Levels alternate 1, 2; category a, then b.
Report spelled(const std::vector<std::string>& verdicts, int repeats = 1) {
  Report report;
  report.run.job = "score";
  report.run.repeats = repeats;
  report.run.tasks = {{"math", 1, "hash", "name: math", false, false}};
  const size_t count = verdicts[0].size() / static_cast<size_t>(repeats);
  for (size_t i = 0; i < count; ++i) {
    ItemInfo item;
    item.id = "m" + std::to_string(i);
    item.task = "math";
    item.category = i < count / 2 ? "a" : "b";
    item.level = 1 + static_cast<int>(i % 2);
    item.gold = std::to_string(i);
    item.options = 4;
    report.items.push_back(item);
  }
  for (size_t s = 0; s < verdicts.size(); ++s) {
    StateReport state;
    state.info = sample_state(s == 0 ? "fp32" : "state" + std::to_string(s));
    for (size_t i = 0; i < verdicts[s].size(); ++i) {
      const char c = verdicts[s][i];
      Answer answer;
      answer.item = static_cast<int32_t>(i / static_cast<size_t>(repeats));
      answer.repeat = static_cast<int32_t>(i % static_cast<size_t>(repeats));
      answer.tokens = 10 + static_cast<int64_t>(i);
      answer.finish_reason = c == 'x' ? "length" : "stop";
      answer.correct = c == '+';
      answer.extracted = c == '0' || c == 'x' ? "" : "7";
      state.answers.push_back(answer);
    }
    report.states.push_back(std::move(state));
  }
  return report;
}

}  // namespace

TEST_CASE("accuracy, finished only, truncated, no answer, and the paired change by hand") {
  const Report report = spelled({"++++++--0x", "+++---+0xx"});
  const AnswerStatistics statistics = answer_statistics(report);
  CHECK(statistics.tasks == std::vector<std::string>{"math"});
  const AnswerRow* base = statistics.find("math", 0, AnswerGroup::all, "");
  REQUIRE(base != nullptr);
  CHECK(base->figures.items == 10);
  CHECK(base->figures.answers == 10);
  CHECK(base->figures.correct == 6);
  CHECK(base->figures.truncated == 1);
  CHECK(base->figures.finished() == 9);
  CHECK(base->figures.finished_correct == 6);
  CHECK(base->figures.missing == 2);
  CHECK(base->figures.chance == 2 * 0.25);
  CHECK(base->figures.tokens == 145);
  CHECK(base->figures.accuracy.low == wilson(6, 10).low);
  CHECK(base->figures.accuracy.high == wilson(6, 10).high);
  CHECK(base->figures.finished_accuracy.low == wilson(6, 9).low);
  CHECK_FALSE(base->against_baseline.has_value());

  const AnswerRow* state = statistics.find("math", 1, AnswerGroup::all, "");
  REQUIRE(state != nullptr);
  CHECK(state->figures.correct == 4);
  CHECK(state->figures.truncated == 2);
  CHECK(state->figures.missing == 3);
  REQUIRE(state->against_baseline.has_value());
  const PairedFigures& p = *state->against_baseline;
  CHECK(p.items == 10);
  CHECK(p.lost == 3);
  CHECK(p.gained == 1);
  CHECK(p.change == doctest::Approx(-0.2));
  CHECK(p.p == mcnemar_exact(3, 1));
  CHECK(p.p == doctest::Approx(0.625));  // 2 (1 + 4) / 16
  CHECK(p.interval.low < -0.2);
  CHECK(p.interval.high > -0.2);

  // Levels: items 0, 2, ... are level 1. Categories: the first five are a.
  CHECK(statistics.find("math", 0, AnswerGroup::level, "1")->figures.correct == 3);
  CHECK(statistics.find("math", 1, AnswerGroup::level, "1")->figures.correct == 3);
  CHECK(statistics.find("math", 1, AnswerGroup::level, "2")->figures.correct == 1);
  CHECK(statistics.find("math", 0, AnswerGroup::category, "a")->figures.correct == 5);
  CHECK(statistics.find("math", 1, AnswerGroup::category, "b")->figures.correct == 1);
  CHECK(statistics.find("math", 1, AnswerGroup::category, "b")->against_baseline->lost == 1);
  // Quartiles of ten answers: 4 i / 10 gives 3, 2, 3, 2 of them.
  REQUIRE(statistics.quartiles.size() == 1);
  const auto& tokens = statistics.quartiles[0].tokens;
  CHECK(tokens[0] == std::pair<int64_t, int64_t>{10, 12});
  CHECK(tokens[1] == std::pair<int64_t, int64_t>{13, 14});
  CHECK(tokens[2] == std::pair<int64_t, int64_t>{15, 17});
  CHECK(tokens[3] == std::pair<int64_t, int64_t>{18, 19});
  CHECK(statistics.find("math", 0, AnswerGroup::length, "Q1")->figures.answers == 3);
  CHECK(statistics.find("math", 1, AnswerGroup::length, "Q2")->figures.correct == 0);
  CHECK(statistics.find("math", 1, AnswerGroup::length, "Q2")->against_baseline->lost == 2);
  CHECK(statistics.find("math", 1, AnswerGroup::length, "Q4")->figures.truncated == 2);
}

TEST_CASE("quartiles are of the baseline's answers, whatever the length of the state's") {
  Report report = spelled({"++++++++", "+-+-+-+-"});
  for (Answer& answer : report.states[1].answers) answer.tokens = 1000 - answer.tokens;
  const AnswerStatistics statistics = answer_statistics(report);
  CHECK(statistics.find("math", 1, AnswerGroup::length, "Q1")->figures.tokens == 990 + 989);
}

TEST_CASE("repeats of an item widen the interval as far as they agree") {
  // Four answers to each of four items. Fully alike: as good as four answers. Split evenly within
  // every item: the spread between items is 0, which is as little as they can know.
  const AnswerStatistics alike = answer_statistics(spelled({"++++++++--------"}, 4));
  const AnswerFigures& f = alike.find("math", 0, AnswerGroup::all, "")->figures;
  CHECK(f.items == 4);
  CHECK(f.answers == 16);
  // Between items: 4 (2)^2 = 16; variance 16 (4/3) / 256 = 1/12; 0.25 / (1/12) = 3 < 4 items.
  CHECK(f.accuracy.low == doctest::Approx(wilson(2, 4).low));
  // Items 4, 3, 1, 0 right of four: d = 2, 1, -1, -2; 10 (4/3) / 256; 0.25 / 0.0520833 = 4.8.
  const AnswerStatistics mixed = answer_statistics(spelled({"+++++++-+-------"}, 4));
  CHECK(mixed.find("math", 0, AnswerGroup::all, "")->figures.accuracy.high ==
        doctest::Approx(wilson_of_share(0.5, 4.8).high));
  // More spread inside than between: never better than independent answers.
  const AnswerStatistics even = answer_statistics(spelled({"+-+-+-+--+-+-++-"}, 4));
  CHECK(even.find("math", 0, AnswerGroup::all, "")->figures.accuracy.high <=
        wilson(2, 4).high + 1e-12);
  // The paired change draws items, not answers: with items alike inside, its error is that of four
  // differences of -1, -1, 0, 0.
  const AnswerStatistics lost =
      answer_statistics(spelled({"++++++++++++++++", "++++++++--------"}, 4));
  const PairedFigures& p = *lost.find("math", 1, AnswerGroup::all, "")->against_baseline;
  CHECK(p.items == 4);
  CHECK(p.answers == 16);
  CHECK(p.lost == 8);
  CHECK(p.change == -0.5);
  CHECK(p.interval.high - p.interval.low > 0.9);
}

TEST_CASE("only answers to the same item and repeat are paired; an unfinished state says so") {
  Report report = spelled({"++++++++++", "-+-+-+-+-+"});
  report.states[1].answers.resize(6);
  const AnswerStatistics statistics = answer_statistics(report);
  const PairedFigures& p = *statistics.find("math", 1, AnswerGroup::all, "")->against_baseline;
  CHECK(p.answers == 6);
  CHECK(p.lost == 3);
  CHECK(contains(
      answer_text(report, statistics),
      "math version 1 (sha256 hash), 10 items; answers so far (not finished): state1 6 of 10"));
  report.run.baseline = "absent";
  const AnswerStatistics without = answer_statistics(report);
  CHECK(without.quartiles.empty());
  CHECK_FALSE(without.find("math", 1, AnswerGroup::all, "")->against_baseline.has_value());
}

TEST_CASE("tables, CSV and JSON of answers agree") {
  const std::string right(40, '+');
  std::string worse = right;
  for (size_t i = 0; i < 10; ++i) worse[4 * i] = '-';
  worse[1] = 'x';
  Report report = spelled({right, worse});
  report.run.tasks[0].chance_for_none = true;
  const AnswerStatistics statistics = answer_statistics(report);
  const std::string text = answer_text(report, statistics);
  CHECK(contains(text, "72.50 [57.17, 83.89]"));  // Wilson of 29 of 40
  CHECK(contains(text, "none by chance"));
  CHECK(contains(text, "73.12"));  // (29 + 1/4) / 40, the cut one has no answer
  CHECK(contains(text, "-27.50 ["));
  CHECK(contains(text, "] *"));
  CHECK(contains(text, "0.000977"));  // 2^-10: 11 lost, none gained
  CHECK(contains(text, "* p < 0.01; the other changes are not shown."));
  CHECK(contains(text, "Accuracy of math in percent, by length of the answer of fp32"));
  CHECK(contains(text, "Q1: 10-19 tokens"));
  CHECK(contains(text, "cut 10"));
  CHECK(contains(text, "Accuracy of math in percent, by level"));
  CHECK(contains(text, "Accuracy of math in percent, by category"));

  const std::string csv = answer_csv(report, statistics);
  std::istringstream lines(csv);
  std::string line, head;
  std::getline(lines, head);
  size_t count = 0;
  while (std::getline(lines, line)) {
    ++count;
    CHECK(std::count(line.begin(), line.end(), ',') == std::count(head.begin(), head.end(), ','));
  }
  CHECK(count == statistics.rows.size());
  CHECK(contains(csv, "math,state1,4.5,1234567890123,all,,40,40,29,0.725,"));
  const nlohmann::json json = nlohmann::json::parse(answer_json(report, statistics, "[]"));
  REQUIRE(json["rows"].size() == statistics.rows.size());
  CHECK(json["flips"].empty());
  CHECK(json["rows"][1]["correct"] == 29);
  CHECK(json["rows"][1]["against_baseline"]["lost"] == 11);
  CHECK(json["rows"][1]["accuracy"]["low"].get<double>() == wilson(29, 40).low);
  CHECK(json["length_quartiles"][0]["tokens"][0] == nlohmann::json::array({10, 19}));
  CHECK(json["rows"][0]["against_baseline"].is_null());

  // The report's summary holds the same.
  TemporaryFolder place;
  write_report(report, place / "r.h5");
  const std::vector<std::byte> bytes = *read_file(place / "r.h5");
  const Hdf5Reader file("r.h5", bytes);
  CHECK(file.dataset<int64_t>("/summary/answers/correct").at(1) == 29);
  CHECK(file.dataset<double>("/summary/answers/change").at(1) == doctest::Approx(-0.275));
  CHECK(std::isnan(file.dataset<double>("/summary/answers/change").at(0)));
  CHECK(contains(file.attribute<std::string>("/summary/answers", "text"), "72.50 [57.17, 83.89]"));
}

TEST_CASE("where no answer differs the interval is what so many items can show") {
  const std::string verdicts = "+++-+++-++++";
  const AnswerStatistics same = answer_statistics(spelled({verdicts, verdicts}));
  const PairedFigures& p = *same.find("math", 1, AnswerGroup::all, "")->against_baseline;
  CHECK(p.change == 0);
  CHECK(p.p == 1);
  // At the limit d the score z = sqrt(n d / (1 - d)) is 1.96: d = 3.8415 / 15.8415.
  CHECK(p.interval.high == doctest::Approx(0.24249).epsilon(1e-4));
  CHECK(p.interval.low == -p.interval.high);
  CHECK(std::sqrt(12 * p.interval.high / (1 - p.interval.high)) == doctest::Approx(1.959964));
  // Repeats that agree count once.
  const AnswerStatistics repeated = answer_statistics(spelled({verdicts, verdicts}, 3));
  CHECK(repeated.find("math", 1, AnswerGroup::all, "")->against_baseline->interval.high ==
        doctest::Approx(3.8414588 / 7.8414588));
}

TEST_CASE("no interval of a change goes beyond all answers") {
  const AnswerStatistics one = answer_statistics(spelled({"++++", "+-++"}));
  const Interval interval = one.find("math", 1, AnswerGroup::all, "")->against_baseline->interval;
  CHECK(interval.low == -1);  // -1.1875 without that bound
  CHECK(interval.high == doctest::Approx(0.2187).epsilon(1e-3));
}

TEST_CASE("a change that is not shown is called so") {
  const AnswerStatistics statistics = answer_statistics(spelled({"++++++++", "++++++--"}));
  CHECK(contains(answer_text(spelled({"++++++++", "++++++--"}), statistics),
                 "No change is shown at p < 0.01."));
}

TEST_CASE("flips name the first differing token, its margin, the texts, and the KL there") {
  Report report = spelled({"++-+", "-+-+", "--+-"});
  auto set = [&](size_t s, size_t i, std::vector<int32_t> ids, const std::string& text) {
    Answer& answer = report.states[s].answers[i];
    answer.token_ids = std::move(ids);
    answer.tokens = static_cast<int64_t>(answer.token_ids.size());
    for (size_t t = 0; t < answer.token_ids.size(); ++t)
      answer.margins.push_back(0.5f + static_cast<float>(t));
    answer.text = text;
  };
  set(0, 0, {5, 6, 7, 8},
      "the sum is\n\xC3\xA9"
      "8");
  set(1, 0, {5, 6, 9, 8},
      "the sum is\n\xC3\xA8"
      "9");
  set(2, 0, {5, 6, 7}, "the sum is");
  set(0, 1, {1, 2}, "ab");
  set(2, 1, {3, 2}, "cb");
  std::vector<Flip> flips = find_flips(report, nullptr);
  REQUIRE(flips.size() == 4);  // state1: item 0; state2: items 0, 1, 3
  CHECK(flips[0].state == 1);
  CHECK(flips[0].item == 0);
  CHECK(flips[0].token == 2);
  CHECK(flips[0].baseline_token == 7);
  CHECK(flips[0].state_token == 9);
  CHECK(flips[0].margin == 2.5);
  CHECK(std::isnan(flips[0].kl));
  CHECK(flips[0].before == "the sum is\n");  // not inside the two-byte character
  CHECK(flips[0].baseline_text ==
        "\xC3\xA9"
        "8");
  CHECK(flips[0].state_text ==
        "\xC3\xA8"
        "9");
  CHECK(flips[1].state == 2);
  CHECK(flips[1].token == 3);  // the state's answer ended there
  CHECK(flips[1].baseline_token == 8);
  CHECK(flips[1].state_token == -1);
  CHECK(flips[2].token == 0);
  CHECK(flips[3].token == -1);  // ids not known
  CHECK(std::isnan(flips[3].margin));

  // A kl run over the baseline's answers: prompt of 3 tokens, then the answer's.
  Report kl;
  kl.run.job = "kl";
  kl.documents = {{"math/m1/0", "", 5, "", 0, 3}, {"math/m0/0", "", 7, "", 0, 3}};
  kl.token_ids = {{1, 1, 1, 1, 2}, {1, 9, 9, 5, 6, 7, 8}};
  for (const std::string name : {"fp32", "state1", "state2"}) {
    StateReport state;
    state.info = sample_state(name);
    for (size_t d = 0; d < 2; ++d) {
      StateDocument document;
      document.first_position = 3;
      document.length = kl.documents[d].tokens;
      for (int64_t t = 0; t < document.length; ++t)
        document.kl.push_back(static_cast<float>(t) + (name == "state2" ? 0.5f : 0.25f));
      state.documents.push_back(document);
    }
    kl.states.push_back(std::move(state));
  }
  flips = find_flips(report, &kl);
  CHECK(flips[0].kl == 4.25);  // position 3 + 2 - 1 chose token 2
  CHECK(flips[1].kl == 5.5);
  CHECK(std::isnan(flips[2].kl));  // token 0: the prompt's last position, before the comparison
  kl.token_ids[1][4] = 66;         // another answer
  CHECK(std::isnan(find_flips(report, &kl)[0].kl));
  kl.token_ids[1][4] = 6;
  kl.states[1].info.sha256 = "another state of that name";
  CHECK(std::isnan(find_flips(report, &kl)[0].kl));
  CHECK(find_flips(report, &kl)[1].kl == 5.5);

  const std::string text = as_text(flips_table(report, flips, true));
  CHECK(contains(text, "the sum is\\n"));
  CHECK(contains(text, "math/m0"));
  const std::string csv = flips_csv(report, flips);
  CHECK(contains(csv, "state1,math,m0,0,0,7,stop,2,7,9,2.5,4.25,\"the sum is\n\","));
  const nlohmann::json json = nlohmann::json::parse(flips_json(report, flips));
  CHECK(json[0]["kl"] == 4.25);
  CHECK(json[3]["token"].is_null());
  report.run.tasks[0].private_data = true;
  const std::string hidden = as_text(flips_table(report, flips, false));
  CHECK_FALSE(contains(hidden, "the sum"));
  CHECK(contains(hidden, "private tasks are left out"));
  CHECK(contains(hidden, "4.25"));
}
