#include "reports/tables.h"

#include <doctest/doctest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "reports/files.h"
#include "reports/hdf5_image.h"
#include "tests/reports/sample_run.h"
#include "tests/support/text.h"

using namespace replayeval;
using namespace replayeval::test;

namespace {

Report sample_report(std::vector<int64_t> tokens) {
  TemporaryFolder place;
  RunPlan plan = sample_plan({"fp32", "fp32@L=1", "nvfp4+sr@seed=1", "nvfp4+sr@seed=2"},
                             std::move(tokens), 1024);
  plan.states[2].bytes_per_sequence = 3 << 20;
  RunFolder folder = RunFolder::open(place / "run", plan, OpenMode::fresh);
  put_all(folder);
  return folder.report();
}

}  // namespace

TEST_CASE("numbers have three significant digits") {
  CHECK(number(0) == "0");
  CHECK(number(std::nan("")) == "-");
  CHECK(number(1.23456) == "1.23");
  CHECK(number(12.3456) == "12.3");
  CHECK(number(12345.6) == "12346");
  CHECK(number(-0.0123456) == "-0.0123");
  CHECK(number(0.00123456) == "0.00123");
  CHECK(number(1.23456e-4) == "1.23e-04");
  CHECK(number(1.23456e7) == "1.23e+07");
  Estimate e;
  e.value = 2;
  CHECK(number(e) == "2.00");
  e.interval = {1, 4};
  CHECK(number(e) == "2.00 [1.00, 4.00]");
}

TEST_CASE("tables are aligned, in text and in Markdown") {
  const Table table{"T",
                    {"name", "x", "text"},
                    {{"a|b", "1.5", "zz"}, {"\xC3\xA9", "10.25", "y"}},
                    {"note"},
                    {2}};
  CHECK(as_text(table) ==
        "T\n"
        "name      x  text\n"
        "-----------------\n"
        "a|b     1.5  zz\n"
        "\xC3\xA9     10.25  y\n"
        "note\n");
  CHECK(as_markdown(table) ==
        "**T**\n\n"
        "| name | x | text |\n"
        "| --- | ---: | --- |\n"
        "| a\\|b | 1.5 | zz |\n"
        "| \xC3\xA9 | 10.25 | y |\n"
        "\nnote\n");
}

TEST_CASE("a state whose KL is not finite says how many positions its means leave out") {
  Report report = sample_report({3000});
  StateDocument& document = report.states[2].documents[0];
  for (size_t t = 100; t < 384; ++t) {
    document.kl[t] = document.nll[t] = std::numeric_limits<float>::quiet_NaN();
    document.top1[t] = kNoTop1;
  }
  const std::string text = kl_text(report, kl_statistics(report));
  CHECK(contains(text, "NON-FINITE: 284 positions left out"));
}

TEST_CASE("text, CSV and JSON of a run say the same") {
  const Report report = sample_report({3000, 2500});
  const KlStatistics statistics = kl_statistics(report);
  const std::string text = kl_text(report, statistics);
  CHECK(contains(text, "models/mini-mamba2 (nemotron_h, sha256 "));
  CHECK(contains(text, "2 documents, 5500 tokens\n"));
  CHECK(contains(text, "block bootstrap over 2 documents"));
  CHECK(contains(text, "Floor: fp32@L=1 differs from fp32"));
  CHECK(contains(text, "Seeds: nvfp4+sr, 2 seeds: mean KL " + number(statistics.seeds.at(0).mean)));
  CHECK(contains(text, "3.00 MiB      341  " + number(statistics.states[2].all.kl)));
  CHECK(contains(text, "position 40, layer 0, head 0"));
  CHECK(contains(text, "NON-FINITE"));

  const auto json = nlohmann::json::parse(kl_json(report, statistics));
  CHECK(json["schema"] == "replayeval/1");
  CHECK(json["states"][2]["all"]["kl_mean"]["value"].get<double>() ==
        statistics.states[2].all.kl.value);
  CHECK(json["states"][2]["bins"][1]["kl_percentiles"]["50"]["high"].get<double>() ==
        statistics.states[2].bins[1].kl_quantiles[kMedian].interval.high);
  CHECK(json["states"][2]["health"][1]["layer"] == 2);
  CHECK(json["states"][2]["all"]["kl_max_document"] ==
        report.documents[statistics.states[2].all.kl_max_document].id);

  std::istringstream lines(kl_csv(report, statistics));
  std::string line;
  std::vector<std::vector<std::string>> rows;
  while (std::getline(lines, line)) {
    rows.emplace_back();
    std::istringstream fields(line + ",");
    std::string field;
    while (std::getline(fields, field, ',')) rows.back().push_back(field);
  }
  REQUIRE(rows.size() == 1 + 4 * (1 + 3));
  auto column = [&](const std::string& name) {
    return static_cast<size_t>(std::find(rows[0].begin(), rows[0].end(), name) - rows[0].begin());
  };
  for (const auto& row : rows) CHECK(row.size() == rows[0].size());
  const auto& second_bin = rows[1 + 2 * 4 + 2];
  CHECK(second_bin[column("state")] == "nvfp4+sr@seed=1");
  CHECK(second_bin[column("bin")] == "2K");
  CHECK(second_bin[column("first")] == "1024");
  CHECK(std::stod(second_bin[column("kl_mean")]) == statistics.states[2].bins[1].kl.value);
  CHECK(std::stod(second_bin[column("kl_p99")]) ==
        statistics.states[2].bins[1].kl_quantiles[kQuantile99].value);
  CHECK(std::stod(second_bin[column("nll_mean_high")]) ==
        statistics.states[2].bins[1].nll.interval.high);
}

TEST_CASE("a single document and a missing floor are said") {
  TemporaryFolder place;
  RunFolder folder =
      RunFolder::open(place / "run", sample_plan({"fp32", "nvfp4"}, {300}, 256), OpenMode::fresh);
  folder.put(sample_span(folder.plan(), 0, 0));
  const Report report = folder.report();
  const std::string text = kl_text(report, kl_statistics(report));
  CHECK(contains(text, "256 tokens of 300 (not finished)"));
  CHECK(contains(text, "inside the one document; they say nothing about other texts"));
  CHECK(contains(text, "No floor row: add fp32@L=1"));
}

TEST_CASE("a run without a figure yet has tables") {
  TemporaryFolder place;
  RunFolder folder = RunFolder::open(place / "run", sample_plan(), OpenMode::fresh);
  const Report report = folder.report();
  const KlStatistics statistics = kl_statistics(report);
  CHECK(contains(kl_text(report, statistics), "0 tokens of 170 (not finished)"));
  CHECK(contains(kl_csv(report, statistics), "nvfp4+sr,"));
  CHECK(figures_differ(load_report(folder.assemble()), report) == "");
}

TEST_CASE("the summary in the report is what show prints") {
  TemporaryFolder place;
  RunFolder folder =
      RunFolder::open(place / "run", sample_plan({"fp32", "fp32@L=1", "nvfp4"}, {3000, 2500}, 1024),
                      OpenMode::fresh);
  put_all(folder);
  const Report report = folder.report();
  const KlStatistics statistics = kl_statistics(report);
  const std::vector<std::byte> bytes = *read_file(folder.assemble());
  Hdf5Reader file("report", bytes);
  CHECK(file.dims("/summary/kl_quantile") == std::vector<int64_t>{3, 4, 11});
  CHECK(file.dataset<std::string>("/summary/range") ==
        std::vector<std::string>{"all", "1K", "2K", "4K"});
  CHECK(file.dataset<double>("/summary/kl_mean")[2 * 4 + 2] ==
        statistics.states[2].bins[1].kl.value);
  CHECK(file.dataset<double>("/summary/kl_mean_low")[2 * 4 + 2] ==
        statistics.states[2].bins[1].kl.interval.low);
  CHECK(file.dataset<double>("/summary/kl_quantile_high")[(2 * 4 + 0) * 11 + 5] ==
        statistics.states[2].all.kl_quantiles[kMedian].interval.high);
  CHECK(file.dataset<int64_t>("/summary/reaching")[2 * 4 + 3] == 1);
  CHECK(file.dataset<int64_t>("/summary/non_finite") == std::vector<int64_t>(12, 0));
  CHECK(file.dataset<double>("/summary/growth")[2] == statistics.states[2].growth.value);
  CHECK(file.attribute<int64_t>("/summary", "floor_state") == 1);
  const std::string text = file.attribute<std::string>("/summary", "text");
  CHECK(contains(kl_text(report, statistics), text));
  CHECK(contains(text, "Mean KL in nats by position"));
}
