#include "reports/html.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "reports/tables.h"
#include "tests/reports/sample_run.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

/// The figures that the page's script draws.
nlohmann::json data_of(const std::string& page) {
  const std::string start = "id=\"data\">";
  const size_t begin = page.find(start) + start.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

/// What is left of the page without style and scripts: the text and the figures.
std::string content_of(const std::string& page) {
  const size_t begin = page.find("<body>");
  return page.substr(begin, page.find("<script>", begin) - begin);
}

/// Documents of one unit each; `errors` keeps the samples of the state error.
Report sample_report(const std::vector<std::string>& states, const std::vector<int64_t>& tokens,
                     bool errors = true) {
  RunPlan plan = sample_plan(states, tokens, 1 << 20);
  plan.states[0].bits_per_element = 32;
  Report report;
  report.run = plan.run;
  report.documents = plan.documents;
  report.layers = plan.layers;
  for (const StateInfo& info : plan.states) report.states.push_back({info, {}});
  for (size_t d = 0; d < tokens.size(); ++d) {
    KlSpan span = sample_span(plan, static_cast<int>(d), 0);
    report.token_ids.push_back(span.tokens);
    for (StateSpan& from : span.states) {
      StateDocument document;
      document.length = span.count();
      document.kl = std::move(from.kl);
      document.nll = std::move(from.nll);
      document.top1 = std::move(from.top1);
      document.health = std::move(from.health);
      if (errors) {
        document.error_positions = std::move(from.error_positions);
        document.error = std::move(from.error);
        document.error_read = std::move(from.error_read);
      }
      report.states[static_cast<size_t>(from.state)].documents.push_back(std::move(document));
    }
  }
  return report;
}

const std::vector<std::string> kStates = {"fp32", "fp32@L=1", "nvfp4+sr", "mine+sr/mxfp4"};

/// Values are printed with five significant digits.
bool shown_as(double value, const nlohmann::json& shown) {
  return shown.is_number() && std::fabs(shown.get<double>() - value) <= 5.1e-5 * std::fabs(value);
}

}  // namespace

TEST_CASE("the page loads nothing and holds all tables and hashes") {
  const Report report = sample_report(kStates, {3000, 2500});
  const KlStatistics statistics = kl_statistics(report);
  const std::string page = report_html(report, statistics);
  CHECK(page.starts_with("<!doctype html>"));
  CHECK(page.ends_with("</html>\n"));
  CHECK(contains(page, "default-src 'none'"));
  CHECK(contains(page, "Plotly, Inc."));
  const std::string content = content_of(page);
  for (const char* loads : {" src=", " href=", "<link", "<img", "url(", "@import", "http:"})
    CHECK_MESSAGE(!contains(content, loads), loads);
  const std::string style =
      page.substr(page.find("<style>"), page.find("</style>") - page.find("<style>"));
  CHECK(!contains(style, "url("));
  CHECK(!contains(style, "@import"));
  CHECK(count(page, "<script") == count(page, "</script>"));
  for (const Table& table : kl_tables(report, statistics)) {
    for (const auto& row : table.rows) {
      for (const std::string& cell : row) CHECK_MESSAGE(contains(content, ">" + cell + "<"), cell);
    }
  }
  for (const std::string& hash :
       {report.run.model_sha256, report.run.tokenizer_sha256, report.run.data_sha256})
    CHECK(contains(content, hash));
  for (const DocumentInfo& document : report.documents) CHECK(contains(content, document.sha256));
  for (const StateReport& state : report.states) {
    CHECK(contains(content, state.info.sha256));
    CHECK(contains(content, state.info.definition));
  }
  CHECK(contains(content, "model: models/mini-mamba2"));
  CHECK(contains(content, "id=\"drift\""));
  CHECK(contains(content, "id=\"errors\""));
  CHECK(!contains(content, "id=\"accuracy\""));
}

TEST_CASE("a page of an unfinished run says so first") {
  Report report = sample_report(kStates, {300, 200});
  CHECK(!contains(report_html(report, kl_statistics(report)), "Not finished"));
  for (StateReport& state : report.states) state.documents[1].length = 64;
  CHECK(contains(report_html(report, kl_statistics(report)),
                 "Not finished: 64 of 200 positions of document " + report.documents[1].id));
  report.items.resize(4);
  for (int i = 0; i < 4; ++i) report.items[static_cast<size_t>(i)].id = std::to_string(i);
  for (int i = 0; i < 3; ++i) {
    Answer answer;
    answer.item = i;
    report.states[0].answers.push_back(answer);
  }
  CHECK(contains(report_html(report, kl_statistics(report)), "Not finished: 3 of 4 answers"));
}

TEST_CASE("curves hold the means and the extremes of the positions") {
  const Report report = sample_report(kStates, {3000, 2500, 3000});
  const nlohmann::json data = data_of(report_html(report, kl_statistics(report)));
  // Growth is that of the documents that reach the end: 0 and 2.
  const std::vector<size_t> documents = {0, 2};
  for (const char* which : {"coarse", "fine"}) {
    const nlohmann::json& curve = data.at(which);
    CHECK(curve["first"].front() == 0);
    CHECK(curve["last"].back() == 3000);
    for (size_t c = 0; c + 1 < curve["first"].size(); ++c)
      CHECK(curve["last"][c] == curve["first"][c + 1]);
    for (size_t s = 1; s < kStates.size(); ++s) {
      const std::string key = std::string(which) == "coarse" ? "kl" : "mean";
      for (size_t c = 0; c < curve["first"].size(); ++c) {
        double sum = 0, n = 0, least = 1e9, most = -1;
        for (size_t d : documents) {
          for (auto t = curve["first"][c].get<size_t>(); t < curve["last"][c].get<size_t>(); ++t) {
            const auto kl = static_cast<double>(report.states[s].documents[d].kl[t]);
            sum += kl;
            n += 1;
            least = std::min(least, kl);
            most = std::max(most, kl);
          }
        }
        INFO(which << " state " << s << " cell " << c << ": mean " << sum / n);
        CHECK(shown_as(sum / n, curve["states"][s][key][c]));
        if (key == "kl") continue;
        CHECK(shown_as(least, curve["states"][s]["min"][c]));
        CHECK(shown_as(most, curve["states"][s]["max"][c]));
        const auto at = curve["states"][s]["at"][c].get<size_t>();
        const size_t d = documents[curve["states"][s]["of"][c].get<size_t>() == 0 ? 0 : 1];
        CHECK(shown_as(most, static_cast<double>(report.states[s].documents[d].kl[at])));
      }
    }
  }
  // A cell of the last octave has an interval about its mean.
  const nlohmann::json& state = data["coarse"]["states"][2];
  CHECK(state["kl_low"].back().get<double>() < state["kl"].back().get<double>());
  CHECK(state["kl"].back().get<double>() < state["kl_high"].back().get<double>());
  // The largest of all positions ends the exceedance curve.
  const nlohmann::json& tail = data["states"][2]["exceedance"];
  float most = 0;
  for (const StateDocument& d : report.states[2].documents)
    most = std::max(most, *std::max_element(d.kl.begin(), d.kl.end()));
  CHECK(shown_as(static_cast<double>(most), tail["kl"].front()));
  CHECK(shown_as(1.0 / 8500, tail["share"].front()));
  CHECK(tail["share"].back() == 1);
}

TEST_CASE("one document: no interval for cells of few positions") {
  const Report report = sample_report(kStates, {3000});
  const nlohmann::json data = data_of(report_html(report, kl_statistics(report)));
  const nlohmann::json& coarse = data["coarse"];
  for (size_t c = 0; c < coarse["first"].size(); ++c) {
    const bool enough = coarse["last"][c].get<int>() - coarse["first"][c].get<int>() >= 256;
    INFO("cell " << c);
    CHECK(coarse["states"][2]["kl_low"][c].is_null() == !enough);
    CHECK(coarse["states"][2]["top1_low"][c].is_null() == !enough);
  }
}

TEST_CASE("state errors are means over samples and documents") {
  const Report report = sample_report(kStates, {100, 70});
  const nlohmann::json errors = data_of(report_html(report, kl_statistics(report)))["errors"];
  REQUIRE(errors["maps"].size() == 4);  // fp32@L=1, nvfp4+sr, both copies of the last
  CHECK(errors["maps"][1]["role"] == "");
  CHECK(errors["maps"][3]["role"] == "read");
  CHECK(errors["maps"][3]["samples"] == 17);
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t head = 0; head < 3; ++head) {
      double sum = 0;
      for (const StateDocument& d : report.states[3].documents) {
        for (size_t i = 0; i < d.error_positions.size(); ++i)
          sum += static_cast<double>(d.error_read[(i * 2 + layer) * 3 + head]);
      }
      const nlohmann::json& shown = errors["maps"][3]["error"][layer][head];
      if (layer == 1 && head == 2) {
        CHECK(shown.is_null());  // the layer has two heads
      } else {
        CHECK(shown_as(sum / 17, shown));
      }
    }
  }
  // A state without any finite sample has no map.
  Report partly = report;
  for (StateDocument& d : partly.states[2].documents)
    std::fill(d.error.begin(), d.error.end(), std::numeric_limits<float>::quiet_NaN());
  CHECK(data_of(report_html(partly, kl_statistics(partly)))["errors"]["maps"].size() == 3);
  const Report without = sample_report(kStates, {100}, false);
  const std::string page = report_html(without, kl_statistics(without));
  CHECK(!contains(content_of(page), "id=\"errors\""));
  CHECK(!data_of(page).contains("errors"));
}

TEST_CASE("131,072 positions of nine states stay under 12 MB") {
  const Report report =
      sample_report({"fp32", "fp32@L=1", "fp16+sr", "fp8+sr", "nvfp4+sr", "nvfp4+sr@L=1",
                     "fp32/nvfp4", "fp16+sr/nvfp4", "fp8+sr/nvfp4"},
                    {131072}, false);
  StatisticsOptions few;
  few.replicates = 50;
  const std::string page = report_html(report, kl_statistics(report, few));
  CHECK(page.size() < 12'000'000);
  // The content alone does not grow with the number of positions.
  CHECK(content_of(page).size() < 500'000);
  CHECK(data_of(page)["coarse"]["last"].back() == 131072);
}

TEST_CASE("texts cannot become markup") {
  Report report = sample_report(kStates, {300});
  report.documents[0].id = "</script><!--";
  report.documents[0].title = "<img src=x onerror=alert(1)> & \"more\" \xFF";
  report.run.model = "a<b>";
  report.states[2].info.name = "<i>x</i>";
  const std::string page = report_html(report, kl_statistics(report));
  CHECK(count(page, "<script") == count(page, "</script>"));
  const std::string content = content_of(page);
  for (const char* markup : {"<img", "<i>", "<b>", "</script><", "<!--"})
    CHECK_MESSAGE(!contains(content, markup), markup);
  CHECK(contains(content, "&lt;img src=x onerror=alert(1)&gt; &amp; &quot;more&quot;"));
  CHECK(data_of(page)["documents"][0] == "</script><!--");
}

TEST_CASE("redacted formats leave letters") {
  Report report =
      sample_report({"fp32", "fp32@L=1", "mine+sr", "mine+sr/mxfp4@L=1;seed=2"}, {2100});
  report.states[2].info.recurrence = report.states[3].info.recurrence = "mine";
  report.states[3].info.read = "mxfp4";
  report.path = "out/mine";
  report.run.experiment =
      "job: kl\nformats: {mine: formats/mine.yaml}\nstates: [mine+sr,\n  mxfp4]\nseed: 7\n"
      "out: out/mine\n";
  HtmlOptions options;
  options.redact_formats = true;
  const std::string content = content_of(report_html(report, kl_statistics(report), options));
  for (const char* hidden : {"mine", "mxfp4", "definition of"})
    CHECK_MESSAGE(!contains(content, hidden), hidden);
  for (const StateReport& state : report.states) CHECK(!contains(content, state.info.sha256));
  for (const char* kept : {"A+sr<", "A+sr/B@L=1;seed=2", "fp32@L=1", "seed: 7", "formats redacted"})
    CHECK_MESSAGE(contains(content, kept), kept);
  CHECK(contains(content, report.run.model_sha256));
}

TEST_CASE("answers: accuracy with Wilson intervals and by length of the baseline's answers") {
  Report report = sample_report(kStates, {300});
  for (int i = 0; i < 8; ++i) {
    ItemInfo item;
    item.id = std::to_string(i);
    item.task = "task";
    item.gold = "GOLD ANSWER";
    report.items.push_back(item);
    for (size_t s : {size_t{0}, size_t{2}}) {
      Answer answer;
      answer.item = i;
      answer.text = "the secret text";
      answer.tokens = 100 - 10 * i;  // item 7 is the shortest
      answer.extracted = i == 0 ? "" : "GIVEN ANSWER";
      answer.finish_reason = i < 2 ? "length" : "stop";
      answer.correct = s == 0 ? i > 0 : i > 3;
      report.states[s].answers.push_back(answer);
    }
  }
  report.run.tasks = {{"task", 2, "task's hash", "prompt: definition of the task", false, false}};
  const std::string page = report_html(report, kl_statistics(report));
  for (const char* id : {"accuracy", "truncation", "quartiles", "loss"})
    CHECK(contains(content_of(page), "id=\"" + std::string(id) + "\""));
  // Flips show the texts around the place, unless the task is private.
  CHECK(contains(page, "the secret text"));
  CHECK(contains(page, "definition of the task"));
  CHECK(contains(page, "GOLD ANSWER"));
  report.run.tasks[0].private_data = true;
  report.run.tasks.push_back({"open", 1, "", "prompt of the open task", false, false});
  const std::string hidden = report_html(report, kl_statistics(report));
  for (const char* text : {"the secret text", "definition of the task", "GOLD ANSWER", "GIVEN"})
    CHECK_MESSAGE(!contains(hidden, text), text);
  CHECK(contains(hidden, "prompt of the open task"));
  CHECK(contains(hidden, "Texts and tokens of private tasks are left out."));
  CHECK(contains(hidden, "task&#39;s hash") + contains(hidden, "task's hash") == 1);
  const nlohmann::json task = data_of(page)["answers"]["tasks"][0];
  REQUIRE(task["states"].size() == 2);
  const nlohmann::json& worse = task["states"][1];
  CHECK(worse["state"] == 2);
  CHECK(worse["all"]["correct"] == 50);
  CHECK(worse["all"]["truncated"] == 25);
  CHECK(worse["all"]["without"] == 12.5);
  // Wilson at 4 of 8: 1/2 +- z / (1 + z^2/8) sqrt(1/32 + z^2/256) with z = 1.95996
  CHECK(std::fabs(worse["all"]["low"].get<double>() - 21.52) < 0.01);
  CHECK(std::fabs(worse["all"]["high"].get<double>() - 78.48) < 0.01);
  CHECK(worse["quartiles"][0]["correct"] == 100);  // items 7, 6
  CHECK(worse["quartiles"][1]["correct"] == 100);  // 5, 4
  CHECK(worse["quartiles"][2]["correct"] == 0);
  CHECK(task["states"][0]["quartiles"][3]["correct"] == 50);  // 1, 0
  CHECK(task["lengths"][0] == "30\u201340");
  CHECK(worse["all"]["lost"] == 3);  // items 1, 2, 3
  CHECK(worse["all"]["change"] == -37.5);
  CHECK(worse["quartiles"][2]["change"] == -100);
  CHECK(task["states"][0]["all"].contains("change") == false);
}
