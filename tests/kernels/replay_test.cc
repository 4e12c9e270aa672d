// Spans, codec bookkeeping, rounding of operands and the exponential shared by the mixers.
#include "kernels/replay.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/replay_simd.h"

namespace replayeval {
namespace {

std::string text(const std::vector<ReplaySpan>& spans) {
  std::string s;
  for (const ReplaySpan& span : spans) {
    s += "[" + std::to_string(span.first) + " " + std::to_string(span.end()) + " q" +
         std::to_string(span.first_query) + (span.flush ? " flush" : "") +
         (span.from_unencoded ? " unencoded" : "") + "]";
  }
  return s;
}

struct Planned {
  std::string spans;
  int pending;
};

Planned plan(int pending, int window, int tokens, AdvanceMode mode,
             FlushOutput output = FlushOutput::recurrence) {
  int after = -1;
  const std::vector<ReplaySpan> spans = replay_spans(pending, window, tokens, mode, output, &after);
  return {text(spans), after};
}

}  // namespace

TEST_CASE("commit spans flush on full windows and carry the rest") {
  Planned p = plan(0, 4, 10, AdvanceMode::commit);
  CHECK(p.spans == "[0 4 q0 flush][4 8 q4 flush][8 10 q8]");
  CHECK(p.pending == 2);
  p = plan(3, 4, 1, AdvanceMode::commit);
  CHECK(p.spans == "[-3 1 q0 flush]");
  CHECK(p.pending == 0);
  p = plan(2, 4, 1, AdvanceMode::commit);
  CHECK(p.spans == "[-2 1 q0]");
  CHECK(p.pending == 3);
  p = plan(0, 1, 2, AdvanceMode::commit);
  CHECK(p.spans == "[0 1 q0 flush][1 2 q1 flush]");
  CHECK(p.pending == 0);
  p = plan(3, 4, 0, AdvanceMode::commit);
  CHECK(p.spans == "");
  CHECK(p.pending == 3);
  // A verify step may leave the ring full: it is folded before the next token is appended.
  p = plan(4, 4, 2, AdvanceMode::commit);
  CHECK(p.spans == "[-4 0 q0 flush][0 2 q0]");
  CHECK(p.pending == 2);
  p = plan(6, 4, 2, AdvanceMode::commit);
  CHECK(p.spans == "[-6 0 q0 flush][0 2 q0]");
}

TEST_CASE("verify spans fold first exactly when pending + tokens exceeds the window") {
  Planned p = plan(12, 16, 4, AdvanceMode::verify);
  CHECK(p.spans == "[-12 4 q0]");
  CHECK(p.pending == 12);
  p = plan(13, 16, 4, AdvanceMode::verify);
  CHECK(p.spans == "[-13 0 q0 flush][0 4 q0 unencoded]");
  CHECK(p.pending == 0);
  p = plan(13, 16, 4, AdvanceMode::verify, FlushOutput::read);
  CHECK(p.spans == "[-13 0 q0 flush][0 4 q0]");
  // Nothing to fold: the drafts are read from the checkpoint even if they exceed the window.
  p = plan(0, 2, 4, AdvanceMode::verify);
  CHECK(p.spans == "[0 4 q0]");
  CHECK(p.pending == 0);
  CHECK_THROWS_AS(plan(0, 64, 65, AdvanceMode::verify), std::invalid_argument);
  CHECK(text(flush_spans(5)) == "[-5 0 q0 flush]");
  CHECK(flush_spans(0).empty());
}

namespace {

/// Largest relative error of 2^x over every 997th float of [-126, 128) and all of a stretch around
/// 0 and 1/2; NaN, infinity and integers are checked exactly.
void check_exp2(void (*exp2_array_of_level)(const float*, int, float*)) {
  std::vector<float> x;
  for (int i = -149; i <= 127; ++i) x.push_back(static_cast<float>(i));
  std::vector<float> y(x.size());
  exp2_array_of_level(x.data(), static_cast<int>(x.size()), y.data());
  for (size_t i = 0; i < x.size(); ++i) CHECK(y[i] == std::ldexp(1.0f, static_cast<int>(x[i])));

  const float infinity = std::numeric_limits<float>::infinity();
  x = {infinity, 128.0f, 1e30f, -infinity, -151.0f, -1e30f, NAN, 0.0f, -0.0f};
  y.assign(x.size(), -1.0f);
  exp2_array_of_level(x.data(), static_cast<int>(x.size()), y.data());
  for (int i = 0; i < 3; ++i) CHECK(y[i] == infinity);
  for (int i = 3; i < 6; ++i) CHECK(y[i] == 0.0f);
  CHECK(std::isnan(y[6]));
  CHECK(y[7] == 1.0f);
  CHECK(y[8] == 1.0f);

  x.clear();
  for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(128.0f); bits += 997) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  for (int i = -3000; i < 3000; ++i) {
    x.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(0.5f) + static_cast<uint32_t>(i)));
    x.push_back(-x.back());
  }
  y.resize(x.size());
  exp2_array_of_level(x.data(), static_cast<int>(x.size()), y.data());
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp2(static_cast<double>(x[i]));
    // Subnormal results have an absolute error of half their spacing more.
    const double error =
        std::max(0.0, std::fabs(y[i] - exact) - (exact < 0x1p-126 ? 0x1p-150 : 0.0));
    if (error / exact > worst) worst = error / exact, at = i;
  }
  INFO("worst relative error ", worst, " at x = ", x[at], ": got ", y[at], ", exact ",
       std::exp2(static_cast<double>(x[at])));
  CHECK(worst < 1.0e-7);
  MESSAGE("2^x: worst relative error ", worst);
}

}  // namespace

TEST_CASE("exp2 is exact for integers and within its stated error elsewhere, at every level") {
  check_exp2(simd_generic::exp2_array);
#if defined(__x86_64__)
  if (simd_level() != SimdLevel::generic) check_exp2(simd_v3::exp2_array);
  if (simd_level() == SimdLevel::v4) check_exp2(simd_v4::exp2_array);
#endif
}

TEST_CASE("operands round to nearest even") {
  CHECK(round_operand(DotType::bf16, 1.0f + 0x1p-8f) == 1.0f);            // tie to even
  CHECK(round_operand(DotType::bf16, 1.0f + 0x3p-8f) == 1.0f + 0x1p-6f);  // tie to even
  CHECK(round_operand(DotType::bf16, 1.0f + 0x1.1p-8f) == 1.0f + 0x1p-7f);
  CHECK(round_operand(DotType::tf32, -1.0f - 0x1p-11f) == -1.0f);
  CHECK(round_operand(DotType::tf32, -1.0f - 0x1.1p-11f) == -1.0f - 0x1p-10f);
  CHECK(round_operand(DotType::fp32, 1.0f + 0x1p-23f) == 1.0f + 0x1p-23f);
  CHECK(std::isnan(round_operand(DotType::bf16, NAN)));
  CHECK(std::isinf(round_operand(DotType::bf16, -INFINITY)));
}

namespace {

/// Two heads of [4, 32] with their own packed memory.
struct Row {
  static constexpr StateShape kShape{4, 32};
  static constexpr int kHeads = 2;
  std::vector<HeadPlan> plans;
  std::vector<int> pending{0, 0, 0};
  size_t stride = 4 * 32 * 4;
  std::vector<std::byte> recurrence = std::vector<std::byte>(kHeads * stride);
  std::vector<std::byte> read = std::vector<std::byte>(kHeads * stride);
  std::vector<HeadHealth> health{kHeads};

  explicit Row(HeadPlan plan) : plans{plan} {}
  StateRow view() {
    StateRow row;
    row.plans = plans;
    row.pending = pending.data();
    row.recurrence = recurrence.data();
    row.read = read.data();
    row.recurrence_stride = row.read_stride = stride;
    row.health = health.data();
    return row;
  }
};

HeadPlan plan_of(const char* recurrence, const char* read = nullptr) {
  HeadPlan plan;
  plan.recurrence = {find_format(recurrence), Rounding::nearest_even};
  if (read) plan.read = StateCodec{find_format(read), Rounding::nearest_even};
  return plan;
}

std::vector<float> ramp() {
  std::vector<float> s(static_cast<size_t>(Row::kShape.elements()));
  for (size_t i = 0; i < s.size(); ++i) s[i] = 0.01f * static_cast<float>(i) - 0.3f;
  return s;
}

}  // namespace

TEST_CASE("each role is encoded from the state itself, with its own health counted once") {
  Row shared(plan_of("fp16")), separate(plan_of("fp16", "nvfp4")), only_read(plan_of("nvfp4"));
  const std::vector<float> s = ramp();
  for (Row* row : {&shared, &separate, &only_read}) {
    encode_checkpoints(row->view(), Row::kShape, 1, {3, 0, 7}, 0.0f, s.data());
  }
  CHECK(separate.recurrence == shared.recurrence);
  CHECK(std::memcmp(separate.read.data() + separate.stride,
                    only_read.recurrence.data() + only_read.stride,
                    packed_bytes(*find_format("nvfp4"), Row::kShape)) == 0);
  CHECK(separate.health[1].encode.elements == 2 * s.size());
  CHECK(separate.health[0].encode.elements == 0);
  CHECK(separate.health[1].first_non_finite_position == -1);
}

TEST_CASE("non-finite states are counted before encoding and the first position stays") {
  for (const char* format : {"nvfp4", "fp32"}) {
    Row row(plan_of(format));
    std::vector<float> s = ramp();
    encode_checkpoints(row.view(), Row::kShape, 0, {0, 0, 5}, 0.0f, s.data());
    s[17] = NAN;
    s[18] = -INFINITY;
    encode_checkpoints(row.view(), Row::kShape, 0, {0, 0, 9}, 0.0f, s.data());
    encode_checkpoints(row.view(), Row::kShape, 0, {0, 0, 12}, 0.0f, s.data());
    CHECK(row.health[0].encode.non_finite == 4);
    CHECK(row.health[0].first_non_finite_position == 9);
  }
}

TEST_CASE("a head state used in place equals one that is decoded and encoded") {
  // The same flushes once with a plain FP32 checkpoint (in place) and once through encode and
  // decode.
  Row in_place(plan_of("fp32", "fp16")), copied(plan_of("fp32", "fp16"));
  const std::vector<float> s = ramp();
  for (int flush = 0; flush < 2; ++flush) {
    for (bool finite : {true, false}) {
      const StateRow view = in_place.view();
      HeadState head;
      head.bind(view, Row::kShape, 1);
      float* state = head.state();
      CHECK(static_cast<void*>(state) == in_place.recurrence.data() + in_place.stride);
      for (size_t i = 0; i < s.size(); ++i) state[i] += s[i];
      head.flush({0, 0, flush}, 0.0f, finite);
      std::vector<float> decoded(s.size());
      decode_checkpoint(in_place.view(), Row::kShape, 1, StateRole::read, decoded.data());
      CHECK(std::memcmp(decoded.data(), head.read(), decoded.size() * sizeof(float)) == 0);

      std::vector<float> other(s.size());
      decode_checkpoint(copied.view(), Row::kShape, 1, StateRole::recurrence, other.data());
      for (size_t i = 0; i < s.size(); ++i) other[i] += s[i];
      encode_checkpoints(copied.view(), Row::kShape, 1, {0, 0, flush}, 0.0f, other.data());
    }
  }
  CHECK(in_place.recurrence == copied.recurrence);
  CHECK(in_place.read == copied.read);
  CHECK(in_place.health[1].encode.elements == copied.health[1].encode.elements);
}

TEST_CASE("rows that do not fit are refused with their place") {
  const auto message = [](auto&& change) {
    Row row(plan_of("fp16", "nvfp4"));
    StateRow view = row.view();
    change(row, view);
    std::string text = "accepted";
    try {
      check_rows("mixer", {&view, 1}, 1, Row::kHeads, Row::kShape);
    } catch (const std::invalid_argument& error) {
      text = error.what();
    }
    return text;
  };
  CHECK(message([](Row&, StateRow&) {}) == "accepted");
  CHECK(message([](Row& row, StateRow&) { row.plans[0].window = 65; }) ==
        "mixer: row 0: plan 0: window 65, expected 1 to 64");
  CHECK(message([](Row& row, StateRow&) { row.pending[0] = -1; }) ==
        "mixer: row 0: plan 0: -1 pending records, expected 0 to 64");
  CHECK(message([](Row&, StateRow& view) { view.read = nullptr; }) ==
        "mixer: row 0: plan 0: read is null, expected the packed read checkpoints");
  CHECK(message([](Row&, StateRow& view) { view.recurrence_stride = 255; }) ==
        "mixer: row 0: plan 0: recurrence_stride 255, expected at least 256 bytes");
  CHECK(message([](Row&, StateRow& view) {
          static const uint8_t wrong[] = {0, 1};
          view.plan_of_head = wrong;
        }) == "mixer: row 0: head 1 has plan 1, expected below 1");
  CHECK(message([](Row& row, StateRow&) { row.plans[0].recurrence.format.reset(); }) ==
        "mixer: row 0: plan 0: a codec without a format");
}

}  // namespace replayeval
