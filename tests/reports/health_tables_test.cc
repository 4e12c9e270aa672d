#include "reports/health_tables.h"

#include <doctest/doctest.h>

namespace replayeval {

TEST_CASE("health by layer: shares, the first non-finite state, healthy states left out") {
  Report report;
  report.layers = {{0, "mamba2", 4, {}}, {3, "mamba2", 4, {}}};
  StateReport healthy;
  healthy.info.name = "fp16";
  healthy.documents.emplace_back();
  healthy.documents[0].health = {{1000, 0, 0, 0, 0, -1, -1}, {1000, 0, 0, 0, 0, -1, -1}};
  StateReport ill;
  ill.info.name = "fp8_e4m3";
  ill.documents.emplace_back();
  ill.documents[0].health = {{1000, 0, 250, 0, 5, -1, -1}, {2000, 3, 0, 20, 0, 77, 2}};
  report.states = {healthy, ill};
  const std::vector<Table> tables = health_tables(report);
  REQUIRE(tables.size() == 1);
  CHECK(tables[0].title.find("fp8_e4m3") != std::string::npos);
  REQUIRE(tables[0].rows.size() == 2);
  CHECK(tables[0].rows[0] ==
        std::vector<std::string>{"0", "1000", "0", number(25.0), "0", number(0.5), "-"});
  CHECK(tables[0].rows[1] ==
        std::vector<std::string>{"3", "2000", "3", "0", number(1.0), "0", "position 77, head 2"});
}

}  // namespace replayeval
