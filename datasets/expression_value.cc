// Values of expressions: rationals by GMP, balls by MPFR with error bounds in powers of two.
#include "datasets/expression_value.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace replayeval {
namespace {

constexpr size_t kMaxBits = size_t{1} << 18;
constexpr double kExact = -std::numeric_limits<double>::infinity();

size_t bits_of(mpq_srcptr value) {
  return mpz_sizeinbase(mpq_numref(value), 2) + mpz_sizeinbase(mpq_denref(value), 2);
}

bool is_integer(mpq_srcptr value) { return mpz_cmp_ui(mpq_denref(value), 1) == 0; }

// An integer that fits into `limit` in magnitude.
std::optional<long> small_integer(mpq_srcptr value, long limit) {
  if (!is_integer(value) || !mpz_fits_slong_p(mpq_numref(value))) return std::nullopt;
  const long result = mpz_get_si(mpq_numref(value));
  return std::abs(result) <= limit ? std::optional<long>(result) : std::nullopt;
}

struct Exact {
  const MathTree& tree;
  WorkBudget* budget;

  std::optional<Rational> done(Rational value) {
    const size_t bits = bits_of(value.get());
    // The greatest common divisor inside grows faster than linearly.
    if (bits > kMaxBits || !budget->spend(1 + static_cast<int64_t>(bits / 64))) return std::nullopt;
    return value;
  }

  std::optional<Rational> power(const Rational& base, long exponent) {
    if (mpq_sgn(base.get()) == 0 && exponent <= 0) return std::nullopt;
    const size_t bits = bits_of(base.get());
    const auto magnitude = static_cast<unsigned long>(std::labs(exponent));
    const bool unit = mpz_cmpabs_ui(mpq_numref(base.get()), 1) <= 0 && is_integer(base.get());
    if (!unit && (magnitude > kMaxBits || bits * magnitude > kMaxBits * 2)) return std::nullopt;
    Rational result;
    mpz_pow_ui(mpq_numref(result.get()), mpq_numref(base.get()),
               unit ? magnitude % 2 + 2 * (magnitude > 0) : magnitude);
    mpz_pow_ui(mpq_denref(result.get()), mpq_denref(base.get()), unit ? 1 : magnitude);
    if (exponent < 0) mpq_inv(result.get(), result.get());
    return done(std::move(result));
  }

  std::optional<Rational> function(const MathNode& node) {
    std::vector<Rational> x;
    if (node.text == "base") return based(node);
    if (node.text != "factorial" && node.text != "binomial" && node.text != "abs" &&
        node.text != "floor" && node.text != "ceil")
      return std::nullopt;
    for (const int child : node.children) {
      auto value = of(child);
      if (!value) return std::nullopt;
      x.push_back(std::move(*value));
    }
    Rational result;
    if (node.text == "abs" && x.size() == 1) {
      mpq_abs(result.get(), x[0].get());
    } else if (node.text == "floor" && x.size() == 1) {
      mpz_fdiv_q(mpq_numref(result.get()), mpq_numref(x[0].get()), mpq_denref(x[0].get()));
    } else if (node.text == "ceil" && x.size() == 1) {
      mpz_cdiv_q(mpq_numref(result.get()), mpq_numref(x[0].get()), mpq_denref(x[0].get()));
    } else if (node.text == "factorial" && x.size() == 1) {
      const auto n = small_integer(x[0].get(), 20000);  // 20000! has 256,909 bits
      if (!n || *n < 0 || !budget->spend(*n)) return std::nullopt;
      mpz_fac_ui(mpq_numref(result.get()), static_cast<unsigned long>(*n));
    } else if (node.text == "binomial" && x.size() == 2) {
      const auto n = small_integer(x[0].get(), 1000000000), k = small_integer(x[1].get(), 20000);
      if (!n || !k || *n < 0 || *k < 0 || !budget->spend(*k)) return std::nullopt;
      if (*k * std::log2(static_cast<double>(*n) + 2) > static_cast<double>(kMaxBits))
        return std::nullopt;
      mpz_bin_uiui(mpq_numref(result.get()), static_cast<unsigned long>(*n),
                   static_cast<unsigned long>(*k));
    } else {
      return std::nullopt;
    }
    return done(std::move(result));
  }

  std::optional<Rational> based(const MathNode& node) {
    const std::string& digits = tree.at(node.children[0]).text;
    const int base = std::stoi(tree.at(node.children[1]).text);
    if (base < 2 || base > 36 || digits.size() > 1000) return std::nullopt;
    Rational result;
    if (mpz_set_str(mpq_numref(result.get()), digits.c_str(), base) != 0) return std::nullopt;
    return done(std::move(result));
  }

  std::optional<Rational> of(int index) {
    const MathNode& node = tree.at(index);
    switch (node.kind) {
      case MathKind::kNumber:
        return done(literal_value(node.text));
      case MathKind::kFunction:
        return function(node);
      case MathKind::kSum:
      case MathKind::kProduct:
      case MathKind::kQuotient: {
        auto result = of(node.children[0]);
        for (size_t i = 1; result && i < node.children.size(); ++i) {
          const auto next = of(node.children[i]);
          if (!next) return std::nullopt;
          if (node.kind == MathKind::kSum) {
            mpq_add(result->get(), result->get(), next->get());
          } else if (node.kind == MathKind::kProduct) {
            mpq_mul(result->get(), result->get(), next->get());
          } else {
            if (mpq_sgn(next->get()) == 0) return std::nullopt;
            mpq_div(result->get(), result->get(), next->get());
          }
          result = done(std::move(*result));
        }
        return result;
      }
      case MathKind::kNegate: {
        auto result = of(node.children[0]);
        if (result) mpq_neg(result->get(), result->get());
        return result;
      }
      case MathKind::kPercent: {
        auto result = of(node.children[0]);
        Rational hundred;
        mpq_set_ui(hundred.get(), 100, 1);
        if (result) mpq_div(result->get(), result->get(), hundred.get());
        return result;
      }
      case MathKind::kPower: {
        const auto base = of(node.children[0]);
        if (!base) return std::nullopt;
        const auto exponent = of(node.children[1]);
        if (!exponent) return std::nullopt;
        const auto integer = small_integer(exponent->get(), 1000000000);
        return integer ? power(*base, *integer) : std::nullopt;
      }
      default:
        return std::nullopt;
    }
  }
};

// 2^result >= 2^a + 2^b.
double add_errors(double a, double b) {
  const double larger = std::max(a, b);
  return larger == kExact ? kExact : larger + 1;
}

double magnitude_of(mpfr_srcptr x) {
  if (mpfr_zero_p(x)) return kExact;
  return mpfr_regular_p(x) ? static_cast<double>(mpfr_get_exp(x))
                           : std::numeric_limits<double>::infinity();
}

struct Unsupported {};
struct Undefined {};

uint64_t mix(uint64_t x) {  // SplitMix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class Evaluator {
 public:
  Evaluator(const MathTree& tree, const EvaluationPoint& point, WorkBudget* budget)
      : tree_(tree),
        point_(point),
        budget_(budget),
        weight_(std::max<int64_t>(1, point.precision / 256)) {}

  bool complex_branch = false;
  double lost_bits = 0;

  ComplexBall of(int index) {
    const MathNode& node = tree_.at(index);
    spend(2);
    switch (node.kind) {
      case MathKind::kNumber:
        return from(literal_value(node.text));
      case MathKind::kSymbol:
        return symbol(node.text);
      case MathKind::kSum:
        return sum(node);
      case MathKind::kProduct: {
        ComplexBall result = of(node.children[0]);
        for (size_t i = 1; i < node.children.size(); ++i)
          result = multiply(result, of(node.children[i]));
        return result;
      }
      case MathKind::kQuotient:
        return divide(of(node.children[0]), of(node.children[1]));
      case MathKind::kNegate:
        return negate(of(node.children[0]));
      case MathKind::kPlusMinus: {
        const bool negative = (point_.sign < 0) != (node.text == "-");
        ComplexBall result = of(node.children[0]);
        return negative ? negate(std::move(result)) : result;
      }
      case MathKind::kPercent:
        return divide(of(node.children[0]), integer(100));
      case MathKind::kDegree: {
        ComplexBall pi = constant_pi();
        return multiply(of(node.children[0]), divide(pi, integer(180)));
      }
      case MathKind::kPower:
        return power(node);
      case MathKind::kFunction:
        return function(node);
      default:
        throw Unsupported();
    }
  }

 private:
  void spend(int64_t units) {
    if (!budget_->spend(units * weight_)) throw Unsupported();
  }
  ComplexBall zero() const { return ComplexBall(point_.precision); }
  ComplexBall integer(long value) const {
    ComplexBall result = zero();
    mpfr_set_si(result.re, value, MPFR_RNDN);
    return result;
  }
  ComplexBall from(const Rational& value) {
    ComplexBall result = zero();
    if (mpfr_set_q(result.re, value.get(), MPFR_RNDN) != 0) rounded(&result);
    return result;
  }
  // Adds the rounding of an operation whose result this is: each part is within one unit in the
  // last place.
  void rounded(ComplexBall* z) const {
    const double magnitude = z->magnitude();
    if (std::isinf(magnitude) && magnitude > 0) throw Unsupported();
    if (mpfr_nan_p(z->re) || mpfr_nan_p(z->im)) throw Undefined();
    if (magnitude != kExact)
      z->error = add_errors(z->error, magnitude - static_cast<double>(point_.precision) + 2);
  }

  ComplexBall constant_pi() const {
    ComplexBall result = zero();
    mpfr_const_pi(result.re, MPFR_RNDN);
    rounded(&result);
    return result;
  }

  ComplexBall symbol(std::string_view name) {
    if (name == "pi") return constant_pi();
    if (name == "e") {
      ComplexBall result = integer(1);
      mpfr_exp(result.re, result.re, MPFR_RNDN);
      rounded(&result);
      return result;
    }
    if (name == "i") {
      ComplexBall result = zero();
      mpfr_set_ui(result.im, 1, MPFR_RNDN);
      return result;
    }
    if (name == "infinity" || name == "emptyset" || name.starts_with("set ")) throw Unsupported();
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
    hash = mix(hash ^ mix(point_.seed));
    // (1/2 + 2 u) or u with u of 128 random bits.
    ComplexBall result = zero();
    mpfr_set_ui(result.re, 0, MPFR_RNDN);
    for (int word = 0; word < 4; ++word) {
      const uint64_t bits = mix(hash + static_cast<uint64_t>(word)) >> 32;
      mpfr_mul_2ui(result.re, result.re, 32, MPFR_RNDN);
      mpfr_add_ui(result.re, result.re, static_cast<unsigned long>(bits), MPFR_RNDN);
    }
    mpfr_mul_2si(result.re, result.re, -128, MPFR_RNDN);
    if (!point_.small) {
      mpfr_mul_2ui(result.re, result.re, 1, MPFR_RNDN);
      mpfr_add_d(result.re, result.re, 0.5, MPFR_RNDN);
    }
    if (std::binary_search(point_.negative.begin(), point_.negative.end(), name))
      mpfr_neg(result.re, result.re, MPFR_RNDN);
    return result;
  }

  ComplexBall negate(ComplexBall z) const {
    mpfr_neg(z.re, z.re, MPFR_RNDN);
    if (!z.is_real()) mpfr_neg(z.im, z.im, MPFR_RNDN);
    return z;
  }

  ComplexBall add(const ComplexBall& a, const ComplexBall& b) {
    ComplexBall result = zero();
    mpfr_add(result.re, a.re, b.re, MPFR_RNDN);
    mpfr_add(result.im, a.im, b.im, MPFR_RNDN);
    result.error = add_errors(a.error, b.error);
    rounded(&result);
    const double x = a.magnitude(), y = b.magnitude();
    if (x != kExact && y != kExact)
      lost_bits =
          std::max(lost_bits, std::fabs(x - y) + 128 - static_cast<double>(point_.precision));
    return result;
  }

  ComplexBall sum(const MathNode& node) {
    ComplexBall result = of(node.children[0]);
    for (size_t i = 1; i < node.children.size(); ++i) result = add(result, of(node.children[i]));
    return result;
  }

  ComplexBall multiply(const ComplexBall& a, const ComplexBall& b) {
    ComplexBall result = zero();
    if (a.is_real() && b.is_real()) {
      mpfr_mul(result.re, a.re, b.re, MPFR_RNDN);
    } else {
      mpfr_fmms(result.re, a.re, b.re, a.im, b.im, MPFR_RNDN);
      mpfr_fmma(result.im, a.re, b.im, a.im, b.re, MPFR_RNDN);
    }
    // |ab - a'b'| <= |a| eb + |b| ea + ea eb
    result.error =
        add_errors(add_errors(a.magnitude() + b.error, b.magnitude() + a.error), a.error + b.error);
    if (std::isnan(result.error)) result.error = kExact;
    rounded(&result);
    return result;
  }

  ComplexBall divide(const ComplexBall& a, const ComplexBall& b) {
    const double size = b.magnitude();
    if (size == kExact) throw Undefined();
    if (b.error > size - 4) throw Undefined();
    ComplexBall inverse = zero();
    if (b.is_real()) {
      mpfr_ui_div(inverse.re, 1, b.re, MPFR_RNDN);
    } else {
      mpfr_t norm;
      mpfr_init2(norm, point_.precision);
      mpfr_fmma(norm, b.re, b.re, b.im, b.im, MPFR_RNDN);
      mpfr_div(inverse.re, b.re, norm, MPFR_RNDN);
      mpfr_div(inverse.im, b.im, norm, MPFR_RNDN);
      mpfr_neg(inverse.im, inverse.im, MPFR_RNDN);
      mpfr_clear(norm);
    }
    // |1/b - 1/b'| <= e / (|b| (|b| - e)), |b| >= 2^(size - 2) for both parts together
    inverse.error = b.error - 2 * (size - 2) + 1;
    rounded(&inverse);
    rounded(&inverse);
    return multiply(a, inverse);
  }

  // Real part function; derivative_bound is log2 of a bound on |f'| near x.
  template <class Function>
  ComplexBall real(const ComplexBall& x, double derivative_bound, Function f) {
    spend(40);
    ComplexBall result = zero();
    f(result.re, x.re, MPFR_RNDN);
    result.error = x.error == kExact ? kExact : x.error + derivative_bound + 1;
    rounded(&result);
    return result;
  }

  ComplexBall exp(const ComplexBall& z) {
    spend(60);
    if (z.error > 0) throw Unsupported();
    if (z.magnitude() != kExact)
      lost_bits = std::max(lost_bits, -z.magnitude() + 128 - static_cast<double>(point_.precision));
    ComplexBall result = zero();
    mpfr_exp(result.re, z.re, MPFR_RNDN);
    if (!z.is_real()) {
      mpfr_t sine, cosine;
      mpfr_inits2(point_.precision, sine, cosine, static_cast<mpfr_ptr>(nullptr));
      mpfr_sin_cos(sine, cosine, z.im, MPFR_RNDN);
      mpfr_mul(result.im, result.re, sine, MPFR_RNDN);
      mpfr_mul(result.re, result.re, cosine, MPFR_RNDN);
      mpfr_clears(sine, cosine, static_cast<mpfr_ptr>(nullptr));
    }
    result.error = z.error == kExact ? kExact : z.error + result.magnitude() + 2;
    rounded(&result);
    rounded(&result);
    return result;
  }

  ComplexBall log(const ComplexBall& z) {
    spend(60);
    const double size = z.magnitude();
    if (size == kExact || z.error > size - 4) throw Undefined();
    ComplexBall result = zero();
    if (z.is_real() && mpfr_sgn(z.re) > 0) {
      mpfr_log(result.re, z.re, MPFR_RNDN);
    } else {
      if (z.is_real()) complex_branch = true;
      mpfr_hypot(result.re, z.re, z.im, MPFR_RNDN);
      mpfr_log(result.re, result.re, MPFR_RNDN);
      mpfr_atan2(result.im, z.im, z.re, MPFR_RNDN);
      result.error = -static_cast<double>(point_.precision) + 3;
    }
    if (z.error != kExact) result.error = add_errors(result.error, z.error - (size - 2) + 1);
    rounded(&result);
    return result;
  }

  ComplexBall root(const ComplexBall& z, unsigned long degree) {
    spend(20);
    if (degree == 0) throw Undefined();
    ComplexBall result = zero();
    if (z.is_real() && (mpfr_sgn(z.re) >= 0 || degree % 2 == 1)) {
      mpfr_rootn_ui(result.re, z.re, degree, MPFR_RNDN);
      const double size = z.magnitude();
      if (z.error != kExact) {
        if (size == kExact || z.error > size - 4)
          result.error =
              z.error / static_cast<double>(degree) + 2;  // |a^(1/n) - b^(1/n)| <= |a - b|^(1/n)
        else
          result.error = z.error + result.magnitude() - size + 3;
      }
      rounded(&result);
      return result;
    }
    if (z.is_real() && degree == 2) {
      complex_branch = true;
      ComplexBall positive = z;
      mpfr_neg(positive.re, positive.re, MPFR_RNDN);
      result = root(positive, 2);
      mpfr_swap(result.re, result.im);
      return result;
    }
    return exp(divide(log(z), integer(static_cast<long>(degree))));
  }

  ComplexBall integer_power(ComplexBall base, unsigned long exponent) {
    ComplexBall result = integer(1);
    for (; exponent != 0; exponent >>= 1) {
      spend(1);
      if ((exponent & 1) != 0) result = multiply(result, base);
      if (exponent > 1) base = multiply(base, base);
    }
    return result;
  }

  ComplexBall power(const MathNode& node) {
    ComplexBall base = of(node.children[0]);
    // The exponent itself, exactly, where it is an integer or has a small denominator.
    Exact exact{tree_, budget_};
    if (const auto exponent = exact.of(node.children[1])) {
      if (const auto n = small_integer(exponent->get(), 1000000)) {
        if (*n == 0 && base.magnitude() == kExact) throw Undefined();
        ComplexBall result = integer_power(base, static_cast<unsigned long>(std::labs(*n)));
        return *n < 0 ? divide(integer(1), result) : result;
      }
      if (base.is_real() && mpfr_sgn(base.re) >= 0 &&
          mpz_cmp_ui(mpq_denref(exponent->get()), 64) <= 0 &&
          mpz_cmpabs_ui(mpq_numref(exponent->get()), 4096) <= 0) {
        ComplexBall result = integer_power(
            root(base, mpz_get_ui(mpq_denref(exponent->get()))),
            static_cast<unsigned long>(std::labs(mpz_get_si(mpq_numref(exponent->get())))));
        return mpq_sgn(exponent->get()) < 0 ? divide(integer(1), result) : result;
      }
    }
    const ComplexBall exponent = of(node.children[1]);
    if (base.magnitude() == kExact && base.error == kExact) {
      if (exponent.is_real() && mpfr_sgn(exponent.re) > 0) return zero();
      throw Undefined();
    }
    return exp(multiply(exponent, log(base)));
  }

  ComplexBall sine_or_cosine(const ComplexBall& z, bool sine) {
    spend(60);
    // Reducing a larger argument needs as many digits of pi as it has bits.
    if (z.error > 0 || z.magnitude() > 4096) throw Unsupported();
    if (!sine && z.magnitude() != kExact)
      lost_bits =
          std::max(lost_bits, -2 * z.magnitude() + 128 - static_cast<double>(point_.precision));
    if (z.is_real())
      return real(z, 0, [&](mpfr_ptr out, mpfr_srcptr x, mpfr_rnd_t round) {
        return sine ? mpfr_sin(out, x, round) : mpfr_cos(out, x, round);
      });
    ComplexBall result = zero();
    mpfr_t s, c, sh, ch;
    mpfr_inits2(point_.precision, s, c, sh, ch, static_cast<mpfr_ptr>(nullptr));
    mpfr_sin_cos(s, c, z.re, MPFR_RNDN);
    mpfr_sinh_cosh(sh, ch, z.im, MPFR_RNDN);
    const double growth = magnitude_of(ch);
    mpfr_mul(result.re, sine ? s : c, ch, MPFR_RNDN);
    mpfr_mul(result.im, sine ? c : s, sh, MPFR_RNDN);
    if (!sine) mpfr_neg(result.im, result.im, MPFR_RNDN);
    mpfr_clears(s, c, sh, ch, static_cast<mpfr_ptr>(nullptr));
    result.error =
        add_errors(z.error + growth + 3, growth - static_cast<double>(point_.precision) + 3);
    rounded(&result);
    return result;
  }

  ComplexBall factorial(const ComplexBall& x) {
    // |digamma| <= 22 for arguments in (0.05, 10^6]; closer to the pole the bound would not hold.
    if (!x.is_real()) throw Unsupported();
    if (mpfr_cmp_d(x.re, -0.95) < 0) throw Undefined();
    if (mpfr_cmp_ui(x.re, 1000000) > 0) throw Unsupported();
    spend(500);
    ComplexBall result = zero();
    mpfr_add_ui(result.re, x.re, 1, MPFR_RNDN);
    mpfr_gamma(result.re, result.re, MPFR_RNDN);
    // Rounding x + 1 moves the value like an error of x.
    const double error = add_errors(x.error, 22 - static_cast<double>(point_.precision));
    result.error = error + result.magnitude() + 6;
    rounded(&result);
    return result;
  }

  ComplexBall real_argument(const MathNode& node, size_t which) {
    ComplexBall x = of(node.children[which]);
    if (!x.is_real()) throw Unsupported();
    return x;
  }

  ComplexBall function(const MathNode& node) {
    const std::string& name = node.text;
    const size_t count = node.children.size();
    Exact exact{tree_, budget_};
    if (name == "factorial" || name == "binomial" || name == "base" || name == "floor" ||
        name == "ceil") {
      if (const auto value = exact.function(node)) return from(*value);
    }
    if (count == 2) {
      if (name == "log") return divide(log(of(node.children[0])), log(of(node.children[1])));
      if (name == "binomial") {  // n! / (k! (n - k)!)
        const ComplexBall n = of(node.children[0]), k = of(node.children[1]);
        return divide(factorial(n), multiply(factorial(k), factorial(add(n, negate(k)))));
      }
      if (name == "root") {
        const auto degree = exact.of(node.children[1]);
        const auto n = degree ? small_integer(degree->get(), 1000000) : std::nullopt;
        if (n && *n > 0) return root(of(node.children[0]), static_cast<unsigned long>(*n));
        return exp(divide(log(of(node.children[0])), of(node.children[1])));
      }
    }
    if (name == "max" || name == "min") {
      ComplexBall best = real_argument(node, 0);
      for (size_t i = 1; i < count; ++i) {
        const ComplexBall next = real_argument(node, i);
        best.error = std::max(best.error, next.error);
        if ((mpfr_cmp(next.re, best.re) > 0) == (name == "max"))
          mpfr_set(best.re, next.re, MPFR_RNDN);
      }
      return best;
    }
    if (count != 1) throw Unsupported();
    if (name == "sqrt") return root(of(node.children[0]), 2);
    if (name == "exp") return exp(of(node.children[0]));
    if (name == "ln") return log(of(node.children[0]));
    if (name == "lg") return divide(log(of(node.children[0])), log(integer(10)));
    if (name == "log") {
      ComplexBall value = log(of(node.children[0]));
      return point_.decimal_log ? divide(value, log(integer(10))) : value;
    }
    if (name == "sin" || name == "cos") return sine_or_cosine(of(node.children[0]), name == "sin");
    if (name == "tan" || name == "cot" || name == "sec" || name == "csc") {
      const ComplexBall z = of(node.children[0]);
      const ComplexBall above = name == "tan"   ? sine_or_cosine(z, true)
                                : name == "cot" ? sine_or_cosine(z, false)
                                                : integer(1);
      return divide(above, sine_or_cosine(z, name == "cot" || name == "csc"));
    }
    if (name == "sinh" || name == "cosh" || name == "tanh") {
      const ComplexBall plus = exp(of(node.children[0]));
      const ComplexBall minus = divide(integer(1), plus);
      const ComplexBall difference = add(plus, negate(minus)), total = add(plus, minus);
      if (name == "tanh") return divide(difference, total);
      return divide(name == "sinh" ? difference : total, integer(2));
    }
    if (name == "abs") {
      const ComplexBall z = of(node.children[0]);
      ComplexBall result = zero();
      mpfr_hypot(result.re, z.re, z.im, MPFR_RNDN);
      result.error = z.error;
      if (!z.is_real()) rounded(&result);
      return result;
    }
    const ComplexBall x = real_argument(node, 0);
    if (name == "arctan" || name == "arccot") {
      ComplexBall result = real(x, 0, mpfr_atan);
      if (name == "arctan") return result;
      return add(divide(constant_pi(), integer(2)), negate(result));
    }
    if (name == "arcsin" || name == "arccos") {
      if (mpfr_cmpabs_ui(x.re, 1) > 0) throw Undefined();
      ComplexBall rest = add(integer(1), negate(multiply(x, x)));
      if (x.error != kExact && rest.magnitude() < x.error + 8) throw Undefined();
      const double slope = x.error == kExact ? 0 : -rest.magnitude() / 2 + 2;
      return real(x, slope, [&](mpfr_ptr out, mpfr_srcptr in, mpfr_rnd_t round) {
        return name == "arcsin" ? mpfr_asin(out, in, round) : mpfr_acos(out, in, round);
      });
    }
    if (name == "floor" || name == "ceil") {
      ComplexBall result = zero();
      if (name == "floor")
        mpfr_floor(result.re, x.re);
      else
        mpfr_ceil(result.re, x.re);
      if (x.error != kExact) {  // the ball must not reach an integer
        ComplexBall nearest = zero();
        mpfr_round(nearest.re, x.re);
        mpfr_sub(nearest.re, nearest.re, x.re, MPFR_RNDN);
        if (nearest.magnitude() < x.error + 4) throw Unsupported();
      }
      return result;
    }
    if (name == "factorial") return factorial(x);
    throw Unsupported();
  }

  const MathTree& tree_;
  const EvaluationPoint& point_;
  WorkBudget* budget_;
  int64_t weight_;
};

void collect(const MathTree& tree, int node, std::vector<std::string>* out) {
  const MathNode& current = tree.at(node);
  if (current.kind == MathKind::kSymbol && current.text != "pi" && current.text != "e" &&
      current.text != "i" && current.text != "infinity" && current.text != "emptyset")
    out->push_back(current.text);
  for (const int child : current.children) collect(tree, child, out);
}

}  // namespace

Rational literal_value(std::string_view literal) {
  std::string digits, repeat;
  size_t decimals = 0;
  bool fraction = false, repeating = false;
  for (const char c : literal) {
    if (c == '.') {
      fraction = true;
    } else if (c == '(') {
      repeating = true;
    } else if (c >= '0' && c <= '9') {
      (repeating ? repeat : digits) += c;
      if (fraction && !repeating) ++decimals;
    }
  }
  if (digits.empty()) digits = "0";
  Rational result;
  mpz_ptr above = mpq_numref(result.get());
  mpz_ptr below = mpq_denref(result.get());
  mpz_set_str(above, digits.c_str(), 10);
  mpz_ui_pow_ui(below, 10, decimals);
  mpq_canonicalize(result.get());
  if (!repeat.empty()) {
    // d.ddd(rrr) = d.ddd + rrr / ((10^|r| - 1) 10^decimals)
    Rational tail;
    mpz_set_str(mpq_numref(tail.get()), repeat.c_str(), 10);
    mpz_ui_pow_ui(mpq_denref(tail.get()), 10, repeat.size());
    mpz_sub_ui(mpq_denref(tail.get()), mpq_denref(tail.get()), 1);
    mpz_t scale;
    mpz_init(scale);
    mpz_ui_pow_ui(scale, 10, decimals);
    mpz_mul(mpq_denref(tail.get()), mpq_denref(tail.get()), scale);
    mpz_clear(scale);
    mpq_canonicalize(tail.get());
    mpq_add(result.get(), result.get(), tail.get());
  }
  return result;
}

std::optional<Rational> exact_value(const MathTree& tree, int node, WorkBudget* budget) {
  return Exact{tree, budget}.of(node);
}

ComplexBall::ComplexBall(mpfr_prec_t precision) : error(kExact) {
  mpfr_init2(re, precision);
  mpfr_init2(im, precision);
  mpfr_set_zero(re, 1);
  mpfr_set_zero(im, 1);
}

ComplexBall::ComplexBall(const ComplexBall& other) : error(other.error) {
  mpfr_init2(re, mpfr_get_prec(other.re));
  mpfr_init2(im, mpfr_get_prec(other.im));
  mpfr_set(re, other.re, MPFR_RNDN);
  mpfr_set(im, other.im, MPFR_RNDN);
}

ComplexBall& ComplexBall::operator=(const ComplexBall& other) {
  if (this == &other) return *this;
  mpfr_set_prec(re, mpfr_get_prec(other.re));
  mpfr_set_prec(im, mpfr_get_prec(other.im));
  mpfr_set(re, other.re, MPFR_RNDN);
  mpfr_set(im, other.im, MPFR_RNDN);
  error = other.error;
  return *this;
}

ComplexBall::~ComplexBall() {
  mpfr_clear(re);
  mpfr_clear(im);
}

double ComplexBall::magnitude() const {
  const double a = magnitude_of(re), b = magnitude_of(im);
  // |z| <= sqrt(2) max; one more bit only where both parts are there.
  return a == kExact || b == kExact ? std::max(a, b) : std::max(a, b) + 1;
}

Evaluation evaluate(const MathTree& tree, int node, const EvaluationPoint& point,
                    WorkBudget* budget) {
  Evaluation result;
  Evaluator evaluator(tree, point, budget);
  try {
    result.value = evaluator.of(node);
  } catch (const Unsupported&) {
    result.failure = EvaluationFailure::kUnsupported;
  } catch (const Undefined&) {
    result.failure = EvaluationFailure::kUndefined;
  }
  result.complex_branch = evaluator.complex_branch;
  result.lost_bits = evaluator.lost_bits;
  return result;
}

std::vector<std::string> free_symbols(const MathTree& tree, int node) {
  std::vector<std::string> names;
  collect(tree, node, &names);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

bool any_node(const MathTree& tree, int node,
              const std::function<bool(const MathNode&)>& predicate) {
  const MathNode& current = tree.at(node);
  if (predicate(current)) return true;
  return std::any_of(current.children.begin(), current.children.end(),
                     [&](int child) { return any_node(tree, child, predicate); });
}

}  // namespace replayeval
