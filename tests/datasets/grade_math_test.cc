// Mathematical equality: stored pairs, traps, forms by hand, published normalisers, bounded time
// and depth.
#include "datasets/grade_math.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <set>

#include "datasets/expression_value.h"
#include "datasets/grade_check.h"
#include "datasets/latex_expression.h"
#include "tests/support/case_file.h"
#include "tests/support/temporary_folder.h"

namespace replayeval {
namespace {

struct Pair {
  std::string gold;
  std::string answer;
  bool equal;
};

// The mathematically right verdict of each, both ways round where the rules are symmetric.
const Pair kPairs[] = {
    {R"(33\frac{1}{3}\%)", R"(\frac13)", true},
    {R"(33\frac{1}{3}\%)", R"(33\frac{2}{3}\%)", false},
    {R"(2)", R"(2abcd)", false},
    {R"(2)", R"(2meters)", true},
    {R"(5)", R"(= 5)", true},
    {R"(\binom{n}{2})", R"(\frac{n(n-1)}{2})", true},
    {R"(\binom{n}{2})", R"(\frac{n(n+1)}{2})", false},
    {R"(x=1, y=2)", R"((x,y)=(1,2))", true},
    {R"(a=1, b=2)", R"(a=2, b=1)", false},
    {R"(x \in \{1,2\})", R"(\{2,1\})", true},
    {R"(\left\{1,2\right\})", R"(\{1,2\})", true},
    {R"(\frac{\sqrt{3}}{3})", R"(\frac{1}{\sqrt{3}})", true},
    {R"(\frac{1}{2004!})", R"(\frac{1}{2006!})", false},
    {R"(\frac{\pi}{2004!})", R"(\frac{\pi}{2006!})", false},
    {R"(\frac{\pi}{2004!})", R"(\frac{2\pi}{2\cdot 2004!})", true},
    {R"(1331 and 1728)", R"(1728)", false},
    {R"(1,2)", R"(1)", false},
    {R"(\pm 2021)", R"(2021)", false},
    {R"(\pm 3)", R"(3, -3)", true},
    {R"(2^{100000})", R"(2^{100000}+1)", false},
    {R"(e^{1000})", R"(e^{1000}+1)", false},
    {R"(e^{1000}\cdot e)", R"(e^{1001})", true},
    {R"(10^{10^{10}})", R"(10^{10^{10}}+1)", false},
    {R"(10^{10^{10}})", R"(10^{10^{10}})", true},
    {R"(1-10^{-100})", R"(1)", false},
    {R"(\sqrt{1+10^{-100}})", R"(1)", false},
    {R"(\cos(10^{-100}))", R"(1)", false},
    {R"(e^{10^{-200}})", R"(1)", false},
    {R"(|x|)", R"(x)", false},
    {R"(|xy|)", R"(xy)", false},
    {R"(|xy|)", R"(|x||y|)", true},
    {R"(|a-b||b-c|)", R"((a-b)(b-c))", false},
    {R"(\sqrt{x^2y^2z^2})", R"(|xyz|)", true},
    {R"(\sqrt{x^2y^2z^2})", R"(xyz)", false},
    {R"(\sqrt{x^2})", R"(x)", false},
    {R"(\sqrt{x^2})", R"(|x|)", true},
    {R"(\sqrt{xy})", R"(\sqrt{x}\sqrt{y})", true},
    {R"(\sin^2 x+\cos^2 x)", R"(1)", true},
    {R"(\frac{x^2-1}{x-1})", R"(x+1)", true},
    {R"((x+1)^2)", R"(x^2+2x+1)", true},
    {R"(2x)", R"(x^2)", false},
    {R"(0.333333)", R"(\frac13)", true},
    {R"(\frac13)", R"(0.3333)", false},
    {R"(\pi)", R"(3.14159)", false},
    {R"(\pi)", R"(3.14)", false},
    {R"(\frac{22}{7})", R"(\pi)", false},
    {R"([0,1])", R"((0,1))", false},
    {R"((0,1])", R"(0<x\le 1)", true},
    {R"(x>5)", R"((5,\infty))", true},
    {R"((-\infty,2)\cup(5,\infty))", R"(x<2 \text{ or } x>5)", true},
    {R"(x \ge 5)", R"(x>5)", false},
    {R"(x>5)", R"(y>5)", false},
    {R"(x=5)", R"(y=5)", false},
    {R"(x=5)", R"(5)", true},
    {R"(x+y=3)", R"(2x+2y=6)", true},
    {R"(x+y=3)", R"(3-x=y)", true},
    {R"(2x=4)", R"(4)", false},
    {R"(y=2x+3)", R"(x=2y+3)", false},
    {R"(y-2x=3)", R"(y=2x+3)", true},
    {R"(10\%)", R"(0.1)", true},
    {R"(10\%)", R"(10)", true},
    {R"(0.1)", R"(10)", false},
    {R"(25)", R"(0.25)", false},
    {R"(5 \text{ cm})", R"(5 \text{ m})", false},
    {R"(500 \text{ cm})", R"(5 \text{ m})", true},
    {R"(120^\circ)", R"(\frac{2\pi}{3})", true},
    {R"(120^\circ)", R"(120)", true},
    {R"(\sin 30^\circ)", R"(\frac12)", true},
    {R"(12\frac{3}{5})", R"(12.6)", true},
    {R"(7 3/4)", R"(7.75)", true},
    {R"(1 000 000)", R"(1000000)", true},
    {R"(32, 349)", R"(32349)", false},
    {R"(3,250)", R"(3250)", true},
    {R"(204_5)", R"(54)", true},
    {R"(204_5)", R"(204)", false},
    {R"(\text{(C)})", R"(C)", true},
    {R"(C)", R"(C. 12)", true},
    {R"(12)", R"(C. 12)", true},
    {R"(D)", R"(C. 12)", false},
    {R"(no)", R"(on)", false},
    {R"(ab)", R"(ba)", true},
    {R"(\text{Monday})", R"(Monday)", true},
    {R"(Monday)", R"(Sunday)", false},
    {R"(1:2)", R"(2:4)", true},
    {R"(12:30)", R"(2:05)", false},
    {R"(4:30 p.m.)", R"(4:30)", true},
    {R"(4:30\text{ PM})", R"(4:30 a.m.)", false},
    {R"(2:3)", R"(\frac23)", true},
    {R"(0:0)", R"(1:2)", false},
    {R"(\begin{pmatrix}1\\2\end{pmatrix})", R"((1,2))", true},
    {R"(\begin{pmatrix}1\\2\end{pmatrix})", R"(\begin{pmatrix}1&2\end{pmatrix})", false},
    {R"(\begin{bmatrix}1/2\\2\end{bmatrix})", R"(\begin{pmatrix}0.5\\2\end{pmatrix})", true},
    {R"(\{1,2,3\})", R"(3,2,1)", true},
    {R"((1,2))", R"((2,1))", false},
    {R"((1,2))", R"(1,2)", true},
    {R"((1,2))", R"(2,1)", false},
    {R"(\emptyset)", R"(\{\})", true},
    {R"(\emptyset)", R"(0)", false},
    {R"(\binom{5}{2})", R"(10)", true},
    {R"(5!)", R"(120)", true},
    {R"(\log_2 8)", R"(3)", true},
    {R"(\log 100)", R"(2)", true},
    {R"(\ln e^2)", R"(2)", true},
    {R"(\log_{10} 2)", R"(\frac{\ln 2}{\ln 10})", true},
    {R"(\sqrt[3]{-8})", R"(-2)", true},
    {R"(\sqrt{-4})", R"(2i)", true},
    {R"(3+4i)", R"(4i+3)", true},
    {R"(3+4i)", R"(3-4i)", false},
    {R"(\frac{1}{1+i})", R"(\frac{1-i}{2})", true},
    {R"(0.\overline{3})", R"(\frac13)", true},
    {R"(0.1\overline{6})", R"(\frac16)", true},
    {R"(1.5\times 10^{3})", R"(1500)", true},
    {R"(1.5e3)", R"(1500)", true},
    {R"(\infty)", R"(\infty)", true},
    {R"(\infty)", R"(-\infty)", false},
    {R"(x\in[-2,7])", R"(-2\le x\le 7)", true},
    {R"(f(x)=x+1)", R"(f(n)=n+1)", true},
    {R"(f(x)=x+1)", R"(f(x)=x+2)", false},
    {R"(x^{2/3})", R"(\sqrt[3]{x}^2)", true},
    {R"(-1)", R"(1)", false},
    {R"(1/0)", R"(1/0)", true},
    {R"(1/0)", R"(2/0)", false},
    {R"(\frac{1}{2}x)", R"(x/2)", true},
    {R"(1/2x)", R"(\frac{1}{2x})", false},
    {R"(\sqrt{2}+\sqrt{3})", R"(\sqrt{5+2\sqrt{6}})", true},
    {R"(\sqrt{2}+\sqrt{3})", R"(3.146264)", true},
    {R"(2\sqrt{3})", R"(\sqrt{12})", true},
    {R"(0)", R"(0.000000)", true},
    {R"(0.000000)", R"(\frac{1}{2004!})", false},
    {R"(1.23456789)", R"(1.234568)", false},
    {R"(x!=5)", R"(x \neq 5)", true},
    {R"(x)", R"(X)", false},
    {R"(\text{even})", R"(odd)", false},
    {R"(\left(\frac{3}{4},\infty\right))", R"((0.75,\infty))", true},
    {R"(6 \text{ or } 7)", R"(7, 6)", true},
    {R"(-\frac{1}{2})", R"(\frac{-1}{2})", true},
    {R"(\frac{a}{b})", R"(a/b)", true},
    {R"(\tan x)", R"(\frac{\sin x}{\cos x})", true},
    {R"(x_1=2, x_2=3)", R"(2,3)", true},
    {R"((x-2)(x+2))", R"(x^2-4)", true},
    {R"(\$1,250)", R"(1250)", true},
    {R"(\$12.50)", R"(12.5)", true},
    {R"(12 inches)", R"(1 foot)", true},
    {R"(five)", R"(5)", false},
    {R"(3\sqrt{2}\text{ units})", R"(3\sqrt{2})", true},
    {R"(\frac{9}{4}\pi)", R"(2.25\pi)", true},
    {R"(90^\circ)", R"(90 \text{ degrees})", true},
    {R"(2^10)", R"(1024)", true},
    {R"(\frac{5}{6})", R"(\frac{10}{12})", true},
    {R"(x^2+1=0)", R"(x^2=-1)", true},
    {R"(\arcsin x)", R"(\frac{\pi}{2}-\arccos x)", true},
    {R"(n!)", R"(n\cdot(n-1)!)", true},
    {R"(\lfloor 2.7 \rfloor)", R"(2)", true},
    {R"(11\!\frac12)", R"(11.5)", true},
    {R"(\frac13)", R"(\frac13 \approx 0.333)", true},
    {R"(0.333)", R"(x=\frac13 \approx 0.333)", false},
    {R"(\frac12\begin{pmatrix}2\\4\end{pmatrix})", R"((1,2))", true},
    {R"(\begin{pmatrix}1&2\\3&4\end{pmatrix})", R"(\begin{pmatrix}1&3\\2&4\end{pmatrix}^T)", true},
    {R"((5,\infty))", R"(\{x \mid x>5\})", true},
    {R"(5)", R"(\text{The answer is } 5)", true},
    {R"(5)", R"(\text{Area: }5)", true},
    {R"(-\begin{pmatrix}1\\2\end{pmatrix})", R"(\begin{pmatrix}-1\\-2\end{pmatrix})", true},
    {R"(\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}1\\2\end{pmatrix})",
     R"(\begin{pmatrix}2\\4\end{pmatrix})", true},
    {R"(\left|x-1\right|+\left|x\right|)", R"(|x-1|+|x|)", true},
};

TEST_CASE("equality of hand-made pairs") {
  for (const Pair& pair : kPairs) {
    const MathVerdict verdict = compare_math(pair.gold, pair.answer);
    INFO(pair.gold << " | " << pair.answer << " | " << verdict.reason);
    CHECK(verdict.equal == pair.equal);
  }
}

TEST_CASE("an unequal pair stays unequal when the sides change places") {
  for (const Pair& pair : kPairs) {
    if (pair.equal) continue;
    INFO(pair.gold << " | " << pair.answer);
    CHECK_FALSE(compare_math(pair.answer, pair.gold).equal);
  }
}

TEST_CASE("every answer equals itself, whatever it is") {
  for (const Pair& pair : kPairs)
    for (const std::string& side : {pair.gold, pair.answer}) {
      INFO(side);
      CHECK(compare_math(side, "$ " + side + " $").equal);
    }
}

// The seed moves the points, not the verdicts.
TEST_CASE("verdicts do not depend on the seed") {
  for (uint64_t seed = 2; seed < 12; ++seed) {
    MathOptions options;
    options.seed = seed;
    for (const Pair& pair : kPairs) {
      INFO(pair.gold << " | " << pair.answer << " | seed " << seed);
      CHECK(compare_math(pair.gold, pair.answer, options).equal == pair.equal);
    }
  }
}

TEST_CASE("stored pairs: verdicts, published verdicts, published normal forms") {
  const std::string path = test::case_path("cases/graders/math_equal.jsonl");
  if (path.empty()) return;
  const GraderReport report = check_grader(path);
  CHECK(report.rows == 220);
  const GraderCheck* bare = report.find("math", "bare answers");
  REQUIRE(bare != nullptr);
  CHECK(bare->cases == 83);
  CHECK(bare->agree == 83);
  if (bare->worst)
    MESSAGE(bare->worst->id << ": " << bare->worst->excerpt << ": expected "
                            << bare->worst->expected << ", got " << bare->worst->got);
  // Each disagreement is ruled on in datasets/GRADING.md.
  const std::set<std::string> ruled{"math-verify/test_all/test_set_rel_assymetry/3",
                                    "math-verify/test_numina_cases/test_numina_cases/24"};
  const GraderCheck* texts = report.find("math", "texts");
  REQUIRE(texts != nullptr);
  CHECK(texts->cases == 137);
  std::set<std::string> differing;
  for (const GraderDisagreement& difference : texts->disagreements) {
    differing.insert(difference.id);
    if (ruled.count(difference.id) == 0)
      MESSAGE(difference.id << ": " << difference.excerpt << ": expected " << difference.expected);
  }
  CHECK(differing == ruled);
  for (const auto& [rule, column] :
       {std::pair<const char*, const char*>{"hendrycks", "hendrycks_is_equiv"},
        {"minerva", "minerva_normalized_equal"},
        {"hendrycks normaliser", "hendrycks_strip_gold"},
        {"hendrycks normaliser", "hendrycks_strip_answer"},
        {"minerva normaliser", "minerva_norm_gold"},
        {"minerva normaliser", "minerva_norm_answer"}}) {
    const GraderCheck* check = report.find(rule, column);
    CAPTURE(column);
    REQUIRE(check != nullptr);
    CHECK(check->cases == 83);
    CHECK(check->agree == 83);
    if (check->worst)
      MESSAGE(check->worst->id << ": expected " << check->worst->expected << ", got "
                               << check->worst->got);
  }
}

TEST_CASE("the final answer of a text") {
  CHECK(final_math_answer("thus $x=4$. So \\boxed{5} apples and \\boxed{6} pears.") == "5, 6");
  CHECK(final_math_answer("first \\boxed{5}, then it was cut \\boxed{6") == "");
  CHECK(final_math_answer("$x=4$. Final Answer: The final answer is $7$. I hope it is correct.") ==
        "7");
  CHECK(final_math_answer("Final Answer: The volume of $ABC$ is 120. I hope it is correct.") ==
        "120");
  CHECK(final_math_answer("Final Answer: the value is $12$ where all of the terms count.") == "12");
  CHECK(final_math_answer("We have $a$ and so the answer is 12.5 units.") == "12.5 units");
  CHECK(final_math_answer("Either $1$ and $2$.") == "1, 2");
  CHECK(final_math_answer("It costs \\$5, that is $28$ % of it") == "28\\%");
  CHECK(final_math_answer("Display \\[ x^2 \\] gives \\( y \\)") == "y");
  CHECK(final_math_answer("the probability that Alice wins the game is 2/3. Next") == "2/3");
  CHECK(final_math_answer("the number is not 10 but 1 000.99\xE2\x82\xAC") == "1 000.99");
  CHECK(final_math_answer("x^2 + 1") == "x^2 + 1");
  CHECK(final_math_answer("nothing was found at all") == "");
}

// Corners of the published functions, by hand from their description.
TEST_CASE("published normalisers") {
  CHECK(hendrycks_normalized("\\dfrac12 + \\sqrt3") == "\\frac{1}{2}+\\sqrt{3}");
  CHECK(hendrycks_normalized("x = .25") == "0.25");
  CHECK(hendrycks_normalized("0.5") == "\\frac{1}{2}");
  CHECK(hendrycks_normalized("-3/4") == "\\frac{-3}{4}");
  CHECK(hendrycks_normalized("03/4") == "03/4");
  CHECK(hendrycks_normalized("5\\text{ cm}") == "5");
  CHECK(hendrycks_normalized("abc = 5") == "abc=5");
  CHECK(hendrycks_normalized("\\frac1") == "\\frac1");
  CHECK_THROWS_AS(hendrycks_normalized("1\\frac"), std::runtime_error);
  CHECK_THROWS_AS(hendrycks_normalized("a\\text{ b}\\text{ c}"), std::runtime_error);
  CHECK(math_rule("hendrycks").compare("1\\frac", "1\\frac", {}).equal);
  CHECK(minerva_normalized("x = 1,000\\text{ cm}") == "1000");
  CHECK(minerva_normalized("so $\\frac12$ it is") == "\\frac{1}{2}");
  CHECK(minerva_normalized("\\sqrt2\\boxed{\\text{a}}") == "\\sqrt{2}a");
  CHECK(minerva_normalized("a units wide") == "wide");
  CHECK_THROWS_WITH_AS(math_rule("sympy"), doctest::Contains("known: math hendrycks minerva"),
                       std::invalid_argument);
  CHECK(math_rules().size() == 3);
}

TEST_CASE("decimals count as rounded only at the places asked for") {
  MathOptions options;
  options.decimal_places = 3;
  CHECK(compare_math("\\frac13", "0.333", options).equal);
  CHECK_FALSE(compare_math("\\frac13", "0.334", options).equal);
  CHECK_FALSE(compare_math("\\frac13", "0.33", options).equal);
  CHECK_FALSE(compare_math("\\frac{1}{3000}", "0.000", options).equal);
  options.decimal_places = 0;
  CHECK_FALSE(compare_math("\\frac13", "0.333333", options).equal);
}

// Balls must hold the true value: the same numbers at 256 and at 2,048 bits.
TEST_CASE("error bounds of balls hold") {
  for (const char* text :
       {"\\sqrt{2}+\\sqrt{3}-\\sqrt{5+2\\sqrt{6}}", "e^{\\pi}-\\pi^e", "\\sin(10^{20})",
        "\\tan(1.5707963)", "\\ln(1+10^{-30})", "\\sqrt[5]{x}-x^{1/5}",
        "\\frac{x^{40}-y^{40}}{x-y}", "(1+i)^{17}/\\sqrt{-3}", "\\arctan x+\\arcsin(\\frac{1}{3})",
        "x!-(x-\\frac12)!", "\\cosh x-\\sinh x", "|3+4i|^{1/3}", "(2+3i)^{1-i}", "\\cos(2+i)",
        "\\log_3 7", "e^{-50}\\cdot(1-\\cos 10^{-20})"}) {
    const auto tree = parse_answer(text);
    CAPTURE(text);
    REQUIRE(tree.has_value());
    EvaluationPoint coarse, fine;
    fine.precision = 2048;
    WorkBudget budget;
    const Evaluation a = evaluate(*tree, tree->root, coarse, &budget),
                     b = evaluate(*tree, tree->root, fine, &budget);
    REQUIRE(a.value.has_value());
    REQUIRE(b.value.has_value());
    ComplexBall apart(2048);
    mpfr_sub(apart.re, a.value->re, b.value->re, MPFR_RNDN);
    mpfr_sub(apart.im, a.value->im, b.value->im, MPFR_RNDN);
    CHECK(apart.magnitude() <= std::max(a.value->error, b.value->error) + 1);
    CHECK(a.value->error <= -100);  // and they say something
  }
}

TEST_CASE("exact values") {
  const auto exact = [](const char* text) -> std::string {
    const auto tree = parse_answer(text);
    WorkBudget budget;
    const auto value = tree ? exact_value(*tree, tree->root, &budget) : std::nullopt;
    if (!value) return "none";
    char* digits = mpq_get_str(nullptr, 10, value->get());
    std::string result = digits;
    std::free(digits);
    return result;
  };
  CHECK(exact("0.1\\overline{6}") == "1/6");
  CHECK(exact("-2^{-3}+\\binom{6}{3}/4") == "39/8");
  CHECK(exact("7 3/4") == "31/4");
  CHECK(exact("1112122_3") == "1124");
  CHECK(exact("20!/18!") == "380");
  CHECK(exact("\\lceil -7/2 \\rceil") == "-3");
  CHECK(exact("0^0") == "none");
  CHECK(exact("1/0") == "none");
  CHECK(exact("2^{10^{9}}") == "none");  // past the bound
  CHECK(exact("100000!") == "none");
  CHECK(exact("x") == "none");
}

// Processor time of one comparison or extraction stays bounded, whatever the input; sanitizers slow
// it down about tenfold.
TEST_CASE("no input takes long") {
#if defined(__SANITIZE_ADDRESS__)
  constexpr double limit_ms = 1500;
#else
  constexpr double limit_ms = 50;
#endif
  const auto within = [&](const std::string& what, const auto& work) {
    double best = 1e9;
    for (int attempt = 0; attempt < 2 && best > limit_ms; ++attempt) {
      const std::clock_t start = std::clock();
      work();
      best = std::min(best, 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
    }
    CAPTURE(what);
    CHECK(best < limit_ms);
  };
  const auto repeated = [](const std::string& unit, size_t bytes) {
    std::string text;
    while (text.size() + unit.size() <= bytes) text += unit;
    return text;
  };
  for (const std::string unit : {"so we see that the value of $x$ is not known. ", "$", "\\boxed{",
                                 "\\(", "final answer is ", "1 000 ", "\\boxed{1},", "{"}) {
    const std::string text = repeated(unit, 1 << 20);
    within(unit, [&] { final_math_answer(text); });
    within(unit, [&] { compare_math("5", text); });
  }
  for (const std::string unit : {"2^",
                                 "x!",
                                 "sin ",
                                 "(",
                                 "1/",
                                 "(1,",
                                 "|",
                                 "9",
                                 "\\sqrt{",
                                 "\\left|",
                                 "%",
                                 "1,",
                                 "x=",
                                 "\\pm 1,",
                                 "10^{9}!+",
                                 "e^{x}+",
                                 "10^{10^{",
                                 "123456789!*",
                                 "\\text{\\text{",
                                 "(x+1)^{99}+",
                                 "x^{1000000}+",
                                 "\\sin(10^{9})+",
                                 "(3/7)^{9999}+"}) {
    const std::string text = repeated(unit, 8000) + "1";
    within(unit, [&] { compare_math("5", text); });
    within(unit, [&] { compare_math(text + "+0", text); });
  }
}

TEST_CASE("nesting is bounded") {
  const auto nested = [](size_t depth) {
    return std::string(depth, '(') + "1" + std::string(depth, ')');
  };
  CHECK(compare_math("1", nested(50)).equal);
  CHECK(compare_math("1", nested(3000)).reason == "not understood");
  const std::string deep = std::string(100000, '{') + "1" + std::string(100000, '}');
  CHECK_FALSE(compare_math("1", deep).equal);
  CHECK(compare_math(deep, deep).equal);
  CHECK_FALSE(compare_math("1", "1" + std::string(4000, '!')).equal);
  CHECK(final_math_answer("\\boxed{" + deep + "}") == deep);
}

TEST_CASE("check_grader names a broken line") {
  CHECK_THROWS_WITH_AS(check_grader("/nonexistent.jsonl"),
                       doctest::Contains("cannot read /nonexistent.jsonl"), std::runtime_error);
  const test::TemporaryFolder folder;
  const std::string path = (folder.path() / "cases.jsonl").string();
  const auto complaint = [&](const char* lines) {
    std::ofstream(path) << lines;
    try {
      check_grader(path);
    } catch (const std::runtime_error& error) {
      return std::string(error.what()).substr(path.size());
    }
    return std::string("none");
  };
  CHECK(complaint("{\"a\": 1}\n\n{\"a\": \n").starts_with(":3: "));
  CHECK(complaint("\n \n") == ": no rows, expected JSON lines of cases");
  CHECK(complaint("[1]\n") == ":1: expected a JSON object");
  CHECK(complaint("{\"gold\": 5, \"answer\": \"5\", \"equal\": true}\n").starts_with(":1: "));
  CHECK(complaint("{\"a\": 1}\n") == "none");
  CHECK(check_grader(path).unknown_rows == 1);
}

}  // namespace
}  // namespace replayeval
