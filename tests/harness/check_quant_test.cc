// `check quant` on the stored vectors of published implementations, and on a file with planted
// errors.
#include "harness/check_quant.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "reports/files.h"
#include "reports/hdf5_image.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

/// Rows whose name contains `what`.
std::vector<QuantCheckRow> rows_of(const std::vector<QuantCheckRow>& rows,
                                   const std::string& what) {
  std::vector<QuantCheckRow> found;
  for (const QuantCheckRow& row : rows) {
    if (row.what.find(what) != std::string::npos) found.push_back(row);
  }
  return found;
}

TEST_CASE("stored vectors of published implementations") {
  for (const std::string name : {"formats", "stochastic", "philox", "nvfp4", "perchannel"}) {
    const std::string path = test::case_path("cases/quant/" + name + ".h5");
    if (path.empty()) continue;
    for (const QuantCheckRow& row : check_quant_results(path)) {
      CAPTURE(row.what);
      CAPTURE(row.worst);
      CHECK(row.equal == row.compared);
      CHECK((row.compared > 0 || row.note == "the file holds no answers"));
    }
  }
}

TEST_CASE("differences are counted and the worst is named") {
  const test::TemporaryFolder folder;
  const fs::path path = folder / "vectors.h5";
  Hdf5Writer writer(path.string());
  const std::vector<int64_t> four = {4};
  // FP16: 1 = 0x3C00, 2 = 0x4000, 65504 = 0x7BFF. Two wrong answers, the second further off.
  writer.dataset<float>("/fp16/input", four, std::vector<float>{1.0f, 2.0f, 1e9f, -1.0f});
  writer.dataset<uint32_t>("/fp16/encode_satfinite", four,
                           std::vector<uint32_t>{0x3C01, 0x4400, 0x7BFF, 0xBC00});
  // INT8 with one scale: amax 254 gives encode 127/254 = 0.5, stored scale 2.
  writer.dataset<float>("/case/x", {1, 4}, std::vector<float>{254.0f, -254.0f, 2.0f, 0.0f});
  writer.dataset<int32_t>("/case/int8/codes", {1, 4}, std::vector<int32_t>{127, -127, 1, 0});
  writer.dataset<float>("/case/int8/decode_scale", {1}, std::vector<float>{1.0f});
  replace_file(path, writer.finish());
  const std::vector<QuantCheckRow> rows = check_quant_results(path);
  const int code = check_quant(path);

  const auto floats = rows_of(rows, "fp16 encode_satfinite");
  REQUIRE(floats.size() == 1);
  CHECK(floats[0].compared == 4);
  CHECK(floats[0].equal == 2);
  CHECK(floats[0].worst.find("[1] input 2 (bits 0x40000000): expected code 0x4400") == 0);
  CHECK(floats[0].worst.find("got 0x4000 = 2") != std::string::npos);
  const auto codes = rows_of(rows, "case int8 codes");
  REQUIRE(codes.size() == 1);
  CHECK(codes[0].equal == 4);
  const auto scales = rows_of(rows, "case int8 scales");
  REQUIRE(scales.size() == 1);
  CHECK(scales[0].equal == 0);
  CHECK(scales[0].worst.find("row 0: expected 1 ") == 0);
  CHECK(code == 1);
}

TEST_CASE("a file without known vectors is a wrong request, a missing one a failure") {
  const test::TemporaryFolder folder;
  const fs::path path = folder / "vectors.h5";
  Hdf5Writer writer(path.string());
  writer.dataset<float>("/something", {2}, std::vector<float>{1.0f, 2.0f});
  replace_file(path, writer.finish());
  CHECK_THROWS_AS(check_quant_results(path), std::invalid_argument);
  fs::remove(path);
  CHECK_THROWS_AS(check_quant_results(path), std::runtime_error);
}

}  // namespace
}  // namespace replayeval
