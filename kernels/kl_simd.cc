// Inner loops of kernels/kl.h: lane i takes elements i, i + 16, ...; sums in FP64, folded as a tree
// at the end.
#include "kernels/kl_simd.h"

#include "kernels/math16.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE {
namespace {

using namespace wide;

/// e^-d - 1 + d for |d| <= 1, as d^2 h(d), h of degree 7: relative error of h 5e-9, never negative.
REPLAYEVAL_INLINE F16 divergence_near(const F16& d) {
  F16 h = splat(-2.77228341e-6F);
  h = fma(h, d, splat(2.53548293e-5F));
  h = fma(h, d, splat(-1.98440236e-4F));
  h = fma(h, d, splat(1.38854520e-3F));
  h = fma(h, d, splat(-8.33331028e-3F));
  h = fma(h, d, splat(4.16667345e-2F));
  h = fma(h, d, splat(-1.66666670e-1F));
  h = fma(h, d, splat(4.99999998e-1F));
  return d * d * h;
}

}  // namespace

void summarize_row(const float* logits, int64_t vocab, LogitSummary* summary) {
  const float kNone = -__builtin_inff();
  F16 largest = splat(kNone);
  I16 place = splat_int(-1);
  I16 nans = splat_int(0);
  I16 infinities = splat_int(0);
  const I16 lanes = lane_index();
  for (int64_t c = 0; c < vocab; c += kLanes) {
    const F16 x = load_partial(logits + c, vocab - c, kNone);
    const I16 better = x > largest;
    largest = select(better, x, largest);
    place = select(better, lanes + splat_int(static_cast<int32_t>(c)), place);
    nans = nans - (x != x);
    infinities =
        infinities - (as_float(as_int(x) & splat_int(0x7fffffff)) == splat(__builtin_inff()));
  }
  float values[kLanes];
  int32_t places[kLanes], nan_lanes[kLanes], inf_lanes[kLanes];
  store(values, largest);
  store_int(places, place);
  store_int(nan_lanes, nans);
  store_int(inf_lanes, infinities);
  LogitSummary result;
  result.max = kNone;
  result.inf_count =
      static_cast<int32_t>(vocab - (vocab + kLanes - 1) / kLanes * kLanes);  // less the padding
  for (int i = 0; i < kLanes; ++i) {
    result.nan_count += nan_lanes[i];
    result.inf_count += inf_lanes[i];
    const bool earlier = values[i] == result.max && places[i] >= 0 && places[i] < result.argmax;
    if (values[i] > result.max || earlier) {
      result.max = values[i];
      result.argmax = places[i];
    }
  }
  if (result.nan_count > 0) result.max = __builtin_nanf("");
  if (!(result.max > kNone && result.max < -kNone)) {
    result.argmax = -1;
    result.log_sum_exp = __builtin_nan("");
    *summary = result;
    return;
  }
  const D16 maximum = splat_double(static_cast<double>(result.max));
  D16 total = splat_double(0);
  for (int64_t c = 0; c < vocab; c += kLanes) {
    total = total + exp16(to_double(load_partial(logits + c, vocab - c, kNone)) - maximum);
  }
  result.log_sum_exp = sum(total);
  *summary = result;
}

double kl_row(const float* reference, double reference_lse, const float* candidate,
              double candidate_lse, int64_t vocab) {
  const F16 none = splat(-__builtin_inff());
  const D16 reference_shift = splat_double(reference_lse);
  const D16 candidate_shift = splat_double(candidate_lse);
  const D16 shift = splat_double(reference_lse - candidate_lse);
  D16 total = splat_double(0);
  for (int64_t c = 0; c < vocab; c += kLanes) {
    const F16 r = load_partial(reference + c, vocab - c, -__builtin_inff());
    const F16 s = load_partial(candidate + c, vocab - c, -__builtin_inff());
    const D16 r64 = to_double(r), s64 = to_double(s);
    const F16 d = to_float((r64 - s64) - shift);
    const F16 p = exp16(to_float(r64 - reference_shift));
    const I16 far =
        splat_int(-1) - (as_float(as_int(d) & splat_int(0x7fffffff)) < splat(1.0F));  // or NaN
    F16 term = p * divergence_near(d);
    if (any(far)) {
      const F16 q = exp16(to_float(s64 - candidate_shift));
      term = select(far, fma(p, d, q - p), term);
      term = select(s == none, splat(__builtin_inff()), term);
      term = select(r == none, q, term);
    }
    total = total + to_double(term);
  }
  return sum(total);
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE
