// Values of parsed expressions: exact rationals, and complex balls of chosen precision at given
// points (MPFR, GMP).
#pragma once

#include <gmp.h>
#include <mpfr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "datasets/latex_expression.h"

namespace replayeval {

/// A GMP rational that frees itself.
class Rational {
 public:
  Rational() { mpq_init(value_); }
  Rational(const Rational& other) : Rational() { mpq_set(value_, other.value_); }
  Rational(Rational&& other) noexcept : Rational() { mpq_swap(value_, other.value_); }
  Rational& operator=(Rational other) noexcept {
    mpq_swap(value_, other.value_);
    return *this;
  }
  ~Rational() { mpq_clear(value_); }
  mpq_ptr get() { return value_; }
  mpq_srcptr get() const { return value_; }

 private:
  mpq_t value_;
};

/// Work that one comparison may do, in units of about 0.3 microseconds; evaluation gives up at
/// zero.
struct WorkBudget {
  int64_t left = 150000;
  bool spend(int64_t units) {
    left -= units;
    return left >= 0;
  }
};

/// A decimal literal ("12.5", "0.1(23)") as a rational.
Rational literal_value(std::string_view literal);

/// The exact value of a constant expression of rational operations, integer powers, factorials,
/// binomials and bases. None if it is not of that kind, if a numerator or denominator would pass
/// 2^18 bits, for a division by zero, or when the budget is spent. A percent sign divides by 100.
std::optional<Rational> exact_value(const MathTree& tree, int node, WorkBudget* budget);

/// Where an expression is evaluated.
struct EvaluationPoint {
  uint64_t seed = 0;  // names and this number give the value of each symbol
  std::vector<std::string>
      negative;              // sorted: symbols with a negative value; all others are positive
  bool small = false;        // magnitudes in (0, 1); otherwise in (1/2, 5/2)
  int sign = 1;              // of every plus-minus
  bool decimal_log = false;  // log without a base is to base 10; otherwise natural
  mpfr_prec_t precision = 256;
};

/// A complex number with a bound on its absolute error: |true - value| <= 2^error (error -infinity:
/// exact).
class ComplexBall {
 public:
  explicit ComplexBall(mpfr_prec_t precision);
  ComplexBall(const ComplexBall& other);
  ComplexBall& operator=(const ComplexBall& other);
  ~ComplexBall();
  mpfr_t re, im;
  double error;

  bool is_real() const { return mpfr_zero_p(im) != 0; }
  /// Upper bound of log2 |value|, -infinity for zero.
  double magnitude() const;
};

enum class EvaluationFailure {
  kNone,
  kUnsupported,  // not a numeric expression, or beyond a limit
  kUndefined,    // division by zero, outside of a domain: try another point
};

struct Evaluation {
  EvaluationFailure failure = EvaluationFailure::kNone;
  std::optional<ComplexBall> value;
  bool complex_branch =
      false;             // a root, power or logarithm of a negative real took its principal value
  double lost_bits = 0;  // an addition needs this much precision more to keep its smaller term
};

/// Evaluates an expression at a point. Sums, products, quotients, powers, roots, exponential,
/// logarithms, trigonometric and hyperbolic functions and their inverses, absolute value, floor,
/// ceil, factorial (gamma function for real arguments up to 10^6), binomials of integers, max and
/// min. The error bound follows every operation.
Evaluation evaluate(const MathTree& tree, int node, const EvaluationPoint& point,
                    WorkBudget* budget);

/// The symbols of an expression (constants excepted), sorted, each once.
std::vector<std::string> free_symbols(const MathTree& tree, int node);

/// Whether a node or anything below it satisfies the predicate.
bool any_node(const MathTree& tree, int node,
              const std::function<bool(const MathNode&)>& predicate);

}  // namespace replayeval
