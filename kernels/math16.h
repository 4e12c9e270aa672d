// Exponential and its relatives on sixteen lanes. Polynomials are minimax in relative error on the
// stated interval.
#pragma once

#include "kernels/vector16.h"

namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE::wide {

/// e^x, at most 2 ulp off where the result is normal; 0 below -87.33654 (2^-126), inf
/// above 88.72284, NaN stays. x = n ln 2 + r with n the nearest integer, ln 2 in two parts (the
/// first has 9 bits: n times it is exact); e^r = 1 + r + r^2 p(r), p of degree 5 to 1.2e-8 of e^r
/// for |r| <= 0.3468; 2^n in two factors, since n reaches 128.
REPLAYEVAL_INLINE F16 exp16(const F16& argument) {
  constexpr float kShift =
      0x1.8p23F;  // adding it leaves no bits for a fraction: the sum is rounded to an integer
  F16 x = min(splat(90.0F), argument);  // NaN stays: min gives its second argument
  x = max(splat(-90.0F), x);
  const F16 shifted = fma(x, splat(1.44269504F), splat(kShift));
  const F16 n = shifted - splat(kShift);
  F16 r = fma(n, splat(-0.693359375F), x);
  r = fma(n, splat(2.12194440e-4F), r);
  F16 p = splat(2.05498233e-4F);
  p = fma(p, r, splat(1.38958291e-3F));
  p = fma(p, r, splat(8.33331805e-3F));
  p = fma(p, r, splat(4.16666660e-2F));
  p = fma(p, r, splat(1.66666667e-1F));
  p = fma(p, r, splat(0.5F));
  const F16 value = fma(r * r, p, r) + splat(1.0F);
  const I16 vanishes = argument < splat(-87.33654F);
#if defined(__AVX512F__)
  return select(vanishes, splat(0), F16{{_mm512_scalef_ps(value.v[0], n.v[0])}});
#else
  const I16 power = as_int(shifted) - as_int(splat(kShift));
  const I16 half = shift_right(power, 1);
  const F16 first = as_float(shift_left(half + splat_int(127), 23));
  const F16 second = as_float(shift_left(power - half + splat_int(127), 23));
  return select(vanishes, splat(0), value * first * second);
#endif
}

/// log(1 + e) for 0 <= e <= 1, at most 2 ulp off. 1 + e = 1 + f or 2 (1 + f), f in [-0.293,
/// 0.4143]; log(1 + f) = f - f^2 / 2 + f^3 q(f), q of degree 7 to 6e-9 of the result.
REPLAYEVAL_INLINE F16 log1p16(const F16& e) {
  const I16 upper = e > splat(0.41421356F);
  const F16 f = select(upper, (e - splat(1.0F)) * splat(0.5F), e);
  F16 q = splat(-7.63439374e-2F);
  q = fma(q, f, splat(1.27654279e-1F));
  q = fma(q, f, splat(-1.31620023e-1F));
  q = fma(q, f, splat(1.42013687e-1F));
  q = fma(q, f, splat(-1.66231447e-1F));
  q = fma(q, f, splat(2.00012359e-1F));
  q = fma(q, f, splat(-2.50008268e-1F));
  q = fma(q, f, splat(3.33333317e-1F));
  const F16 square = f * f;
  F16 rest = fma(square, splat(-0.5F), q * (square * f));
  rest =
      select(upper, rest + splat(-1.90465421e-9F), rest);  // ln 2 less its FP32 value 0x1.62e43p-1
  return select(upper, splat(0x1.62e43p-1F) + (f + rest), f + rest);
}

/// 1 / (1 + e^-x)
REPLAYEVAL_INLINE F16 sigmoid16(const F16& x) {
  return splat(1.0F) / (splat(1.0F) + exp16(splat(0) - x));
}
/// x / (1 + e^-x)
REPLAYEVAL_INLINE F16 silu16(const F16& x) { return x / (splat(1.0F) + exp16(splat(0) - x)); }
/// x > 20 ? x : log(1 + e^x), as max(x, 0) + log(1 + e^-|x|): no tail loses digits.
REPLAYEVAL_INLINE F16 softplus16(const F16& x) {
  const F16 positive = max(x, splat(0));
  const F16 magnitude = as_float(as_int(x) & splat_int(0x7fffffff));
  return select(x > splat(20.0F), x, positive + log1p16(exp16(splat(0) - magnitude)));
}
/// max(x, 0)^2; NaN stays.
REPLAYEVAL_INLINE F16 relu2_16(const F16& x) {
  const F16 positive = select(x < splat(0), splat(0), x);
  return positive * positive;
}

/// e^x in FP64 for x <= 0, relative error below 1e-15; 0 below -708. As exp16, p of degree 10
/// to 1.4e-16 of e^r.
REPLAYEVAL_INLINE D16 exp16(const D16& argument) {
  constexpr double kShift = 0x1.8p52;
  constexpr double kCoefficients[] = {2.0373197241085146362e-9,
                                      2.5061189802882551131e-8,
                                      2.7557574929330914413e-7,
                                      2.7557317904968052091e-6,
                                      2.4801587270192319258e-5,
                                      1.9841269841320833431e-4,
                                      1.3888888888889789927e-3,
                                      8.3333333333333329723e-3,
                                      4.1666666666666666633e-2,
                                      1.6666666666666666667e-1,
                                      0.5};
  D16 result;
  REPLAYEVAL_UNROLL for (int i = 0; i < 2 * kParts; ++i) {
    const NativeDouble zero = {};
    const NativeDouble x = argument.v[i] < -708.0 ? zero - 708.0 : argument.v[i];
    const NativeDouble shifted = native_fma(x, zero + 0x1.71547652b82fep0, zero + kShift);
    const NativeDouble n = shifted - kShift;
    NativeDouble r = native_fma(n, zero - 0x1.62e42feep-1, x);  // ln 2 to 32 bits: exact product
    r = native_fma(n, zero - 0x1.a39ef35793c76p-33, r);
    NativeDouble p = zero + kCoefficients[0];
    REPLAYEVAL_UNROLL for (int c = 1; c < 11; ++c) p = native_fma(p, r, zero + kCoefficients[c]);
    const NativeDouble value = native_fma(r * r, p, r) + 1.0;
    NativeLong power, base;
    const NativeDouble shift = zero + kShift;
    memcpy(&power, &shifted, sizeof power);
    memcpy(&base, &shift, sizeof base);
    const NativeLong bits = (power - base + 1023) << 52;
    NativeDouble factor;
    memcpy(&factor, &bits, sizeof factor);
    result.v[i] = argument.v[i] < -708.0 ? zero : value * factor;
  }
  return result;
}

}  // namespace replayeval::REPLAYEVAL_SIMD_NAMESPACE::wide
