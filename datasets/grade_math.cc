// Equality of answers: readings of both texts, then a comparison of trees that ends in exact
// rationals or in balls at points.
#include "datasets/grade_math.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "datasets/expression_value.h"
#include "datasets/grade_boxed.h"
#include "datasets/latex_expression.h"

namespace replayeval {
namespace {

constexpr size_t kNone = std::string_view::npos;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool is_letter(char c) { return is_upper(c) || (c >= 'a' && c <= 'z'); }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
char to_lower(char c) { return is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c; }

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), to_lower);
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// ---- Units
// ---------------------------------------------------------------------------------------------------------

struct Unit {
  std::string_view name;
  char dimension;
  long above, below;  // in terms of the dimension's base unit
};

constexpr Unit kUnits[] = {{"mm", 'l', 1, 1000},
                           {"millimeter", 'l', 1, 1000},
                           {"cm", 'l', 1, 100},
                           {"centimeter", 'l', 1, 100},
                           {"m", 'l', 1, 1},
                           {"meter", 'l', 1, 1},
                           {"metre", 'l', 1, 1},
                           {"km", 'l', 1000, 1},
                           {"kilometer", 'l', 1000, 1},
                           {"in", 'l', 254, 10000},
                           {"inch", 'l', 254, 10000},
                           {"inche", 'l', 254, 10000},
                           {"ft", 'l', 3048, 10000},
                           {"foot", 'l', 3048, 10000},
                           {"feet", 'l', 3048, 10000},
                           {"yd", 'l', 9144, 10000},
                           {"yard", 'l', 9144, 10000},
                           {"mi", 'l', 1609344, 1000},
                           {"mile", 'l', 1609344, 1000},
                           {"s", 't', 1, 1},
                           {"sec", 't', 1, 1},
                           {"second", 't', 1, 1},
                           {"min", 't', 60, 1},
                           {"minute", 't', 60, 1},
                           {"h", 't', 3600, 1},
                           {"hr", 't', 3600, 1},
                           {"hour", 't', 3600, 1},
                           {"day", 't', 86400, 1},
                           {"week", 't', 604800, 1},
                           {"g", 'm', 1, 1},
                           {"gram", 'm', 1, 1},
                           {"kg", 'm', 1000, 1},
                           {"kilogram", 'm', 1000, 1},
                           {"mg", 'm', 1, 1000},
                           {"milligram", 'm', 1, 1000},
                           {"dollar", '$', 1, 1},
                           {"cent", '$', 1, 100},
                           {"degree", 'a', 1, 1}};

struct KnownUnit {
  char dimension;
  int power;
  long above, below;
};

std::optional<KnownUnit> known_unit(std::string_view text) {
  std::string name = lower(text);
  std::erase_if(name, [](char c) { return c == '.' || c == '{' || c == '}' || c == '~'; });
  int power = 1;
  if (const size_t caret = name.find('^'); caret != std::string::npos) {
    const std::string exponent = name.substr(caret + 1);
    if (exponent != "2" && exponent != "3") return std::nullopt;
    power = exponent == "2" ? 2 : 3;
    name.resize(caret);
  }
  for (const auto& [prefix, exponent] :
       {std::pair<std::string_view, int>{"square ", 2}, {"sq ", 2}, {"cubic ", 3}}) {
    if (!name.starts_with(prefix)) continue;
    name.erase(0, prefix.size());
    power = exponent;
  }
  name = std::string(trimmed(name));
  for (const bool plural : {false, true}) {
    std::string_view candidate = name;
    if (plural) {
      if (name.size() < 3 || name.back() != 's') break;
      candidate.remove_suffix(1);
    }
    for (const Unit& unit : kUnits)
      if (unit.name == candidate) return KnownUnit{unit.dimension, power, unit.above, unit.below};
  }
  return std::nullopt;
}

// ---- Comparison of two trees
// ------------------------------------------------------------------------------------------

enum class Same { kYes, kNo, kUnknown };

struct IntervalView {
  int low = -1, high = -1;  // -1: infinite
  bool low_closed = false, high_closed = false;
  std::string variable;
};

class Comparison {
 public:
  Comparison(const MathTree& gold, const MathTree& answer, const MathOptions& options,
             WorkBudget* budget)
      : options_(options), budget_(budget) {
    gold_ = expand_signs(graft(gold));
    answer_ = expand_signs(graft(answer));
  }

  bool run() { return same(gold_, answer_); }

 private:
  const MathNode& at(int node) const { return tree_.at(node); }
  bool is(int node, MathKind kind) const { return at(node).kind == kind; }

  int graft(const MathTree& tree) {
    const int offset = static_cast<int>(tree_.nodes.size());
    for (MathNode node : tree.nodes) {
      for (int& child : node.children) child += offset;
      tree_.nodes.push_back(std::move(node));
    }
    return tree.root + offset;
  }

  // A copy with every plus-minus resolved (sign 0: kept) and a symbol renamed.
  int copy(int node, int sign, std::string_view from = {}, std::string_view to = {}) {
    MathNode result = at(node);
    for (int& child : result.children) child = copy(child, sign, from, to);
    if (result.kind == MathKind::kPlusMinus && sign != 0) {
      const bool negative = (sign < 0) != (result.text == "-");
      if (!negative) return result.children[0];
      result.kind = MathKind::kNegate;
      result.text.clear();
    }
    if (!from.empty() && result.kind == MathKind::kSymbol && result.text == from) result.text = to;
    tree_.nodes.push_back(std::move(result));
    return static_cast<int>(tree_.nodes.size()) - 1;
  }

  int expand_signs(int root) {
    const auto signs = [&](int node) {
      return any_node(tree_, node,
                      [](const MathNode& n) { return n.kind == MathKind::kPlusMinus; });
    };
    if (!signs(root)) return root;
    const bool items = is(root, MathKind::kList) || is(root, MathKind::kSet);
    std::vector<int> result;
    for (const int item : items ? at(root).children : std::vector<int>{root}) {
      if (signs(item)) {
        result.push_back(copy(item, 1));
        result.push_back(copy(item, -1));
      } else {
        result.push_back(item);
      }
    }
    return tree_.add(items ? at(root).kind : MathKind::kList, {}, std::move(result));
  }

  bool constant(int node) const { return free_symbols(tree_, node).empty(); }

  // Whether a left side only names what the right side is: x, f(x), f(2), AB, |AB|, (x, y), A:B,
  // NO/BO, \sin x, words.
  bool names(int node, std::string* head) const {
    const MathNode& n = at(node);
    head->clear();
    std::string inner;
    const auto all = [&](auto accept) {
      return std::all_of(n.children.begin(), n.children.end(), accept);
    };
    switch (n.kind) {
      case MathKind::kText:
        return true;
      case MathKind::kSymbol:
        if (n.text == "e" || n.text == "i" || n.text == "pi" || n.text == "infinity") return false;
        *head = n.text;
        return true;
      case MathKind::kProduct: {
        if (!is(n.children[0], MathKind::kSymbol)) return false;
        *head = at(n.children[0]).text;
        return all([&](int child) {
          return is(child, MathKind::kSymbol) || is(child, MathKind::kNumber);
        });
      }
      case MathKind::kBracketed:
      case MathKind::kRatio:
      case MathKind::kQuotient:
        return all([&](int child) { return names(child, &inner); });
      case MathKind::kFunction:
        if (n.text == "abs")
          return !any_node(tree_, node, [](const MathNode& part) {
            return part.kind != MathKind::kFunction && part.kind != MathKind::kProduct &&
                   !(part.kind == MathKind::kSymbol && is_upper(part.text[0]));
          });
        return (n.text == "sin" || n.text == "cos" || n.text == "tan" || n.text == "max" ||
                n.text == "min" || n.text == "gcd" || n.text == "lcm") &&
               all([&](int child) { return names(child, &inner); });
      default:
        return false;
    }
  }

  static bool only(const std::string& signs, std::string_view allowed) {
    return signs.find_first_not_of(allowed) == std::string::npos;
  }

  // What an equation says its named left side is; -1: it is none of that kind.
  int stated_value(int node, std::string* head) const {
    const MathNode& n = at(node);
    std::string name;
    head->clear();
    if (n.text == "i") return names(n.children[0], &name) ? n.children[1] : -1;
    if (!only(n.text, "=~")) return -1;
    // An approximation behind the exact value does not replace it: x = 1/3 ~ 0.33.
    const size_t approximate = n.text.find('~');
    if (n.children.size() > 2) {
      if (names(n.children[0], &name)) *head = name;
      return approximate == std::string::npos || approximate == 0 ? n.children.back()
                                                                  : n.children[approximate];
    }
    if (names(n.children[0], &name)) {
      *head = name;
      return n.children[1];
    }
    if (constant(n.children[0])) return n.children[approximate == 0 ? 0 : 1];
    if (names(n.children[1], &name) && is(n.children[1], MathKind::kSymbol)) {
      *head = name;
      return n.children[0];
    }
    return -1;
  }

  int infinite(int node) const {
    if (is(node, MathKind::kSymbol)) return at(node).text == "infinity" ? 1 : 0;
    if (is(node, MathKind::kNegate)) return -infinite(at(node).children[0]);
    return 0;
  }

  bool intervals(int node, std::vector<IntervalView>* out) const {
    const MathNode& n = at(node);
    switch (n.kind) {
      case MathKind::kBracketed: {
        if (n.children.size() != 2) return false;
        IntervalView view{n.children[0], n.children[1], n.text[0] == '[', n.text[1] == ']', {}};
        return finish(view, out);
      }
      case MathKind::kUnion:
      case MathKind::kList:
        if (n.kind == MathKind::kList &&
            !std::all_of(n.children.begin(), n.children.end(),
                         [&](int child) { return is(child, MathKind::kRelation); }))
          return false;
        return std::all_of(n.children.begin(), n.children.end(),
                           [&](int child) { return intervals(child, out); });
      case MathKind::kSet:
        for (const int child : n.children) {
          IntervalView view{child, child, true, true, {}};
          if (!finish(view, out)) return false;
        }
        return !n.children.empty();
      case MathKind::kSymbol:
        if (n.text != "set R") return false;
        out->push_back({});
        return true;
      case MathKind::kRelation:
        return relation_interval(n, out);
      default:
        return false;
    }
  }

  bool relation_interval(const MathNode& n, std::vector<IntervalView>* out) const {
    std::string name;
    if (n.text == "i") return names(n.children[0], &name) && intervals(n.children[1], out);
    const auto plain = [&](int node) { return is(node, MathKind::kSymbol) && !constant(node); };
    std::vector<int> sides = n.children;
    std::string signs = n.text;
    if (!only(signs, "<l") && only(signs, ">g")) {
      std::reverse(sides.begin(), sides.end());
      std::reverse(signs.begin(), signs.end());
      for (char& sign : signs) sign = sign == '>' ? '<' : 'l';
    }
    if (!only(signs, "<l")) return false;
    IntervalView view;
    if (sides.size() == 3 && plain(sides[1]) && constant(sides[0]) && constant(sides[2])) {
      view = {sides[0], sides[2], signs[0] == 'l', signs[1] == 'l', at(sides[1]).text};
    } else if (sides.size() == 2 && plain(sides[0]) && constant(sides[1])) {
      view = {-1, sides[1], false, signs[0] == 'l', at(sides[0]).text};
    } else if (sides.size() == 2 && plain(sides[1]) && constant(sides[0])) {
      view = {sides[0], -1, signs[0] == 'l', false, at(sides[1]).text};
    } else {
      return false;
    }
    return finish(view, out);
  }

  bool finish(IntervalView view, std::vector<IntervalView>* out) const {
    if (view.low >= 0 && infinite(view.low) != 0) {
      if (infinite(view.low) > 0) return false;
      view.low = -1;
    }
    if (view.high >= 0 && infinite(view.high) != 0) {
      if (infinite(view.high) < 0) return false;
      view.high = -1;
    }
    if (view.low < 0) view.low_closed = false;
    if (view.high < 0) view.high_closed = false;
    out->push_back(std::move(view));
    return true;
  }

  bool same_interval(const IntervalView& a, const IntervalView& b) {
    if ((a.low < 0) != (b.low < 0) || (a.high < 0) != (b.high < 0)) return false;
    if (a.low_closed != b.low_closed || a.high_closed != b.high_closed) return false;
    if (!a.variable.empty() && !b.variable.empty() && a.variable != b.variable) return false;
    return (a.low < 0 || same(a.low, b.low)) && (a.high < 0 || same(a.high, b.high));
  }

  // Every element of each side has an equal on the other.
  template <class Element, class Equal>
  bool cover(const std::vector<Element> a, const std::vector<Element> b, Equal equal) {
    if (a.size() > 200 || b.size() > 200) return false;
    std::vector<bool> met(b.size(), false);
    for (const Element& x : a) {
      bool found = false;
      for (size_t j = 0; j < b.size(); ++j) {
        if (found && met[j]) continue;
        if (!budget_->spend(1)) return false;
        if (equal(x, b[j])) {
          met[j] = true;
          found = true;
        }
      }
      if (!found) return false;
    }
    return std::find(met.begin(), met.end(), false) == met.end();
  }

  // By value: comparing adds nodes to the tree.
  bool in_order(const std::vector<int> a, const std::vector<int> b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i)
      if (!same(a[i], b[i])) return false;
    return true;
  }

  int negated_difference(int left, int right) {
    return tree_.add(MathKind::kSum, {}, {left, tree_.add(MathKind::kNegate, {}, {right})});
  }

  // Sign of the constant c with (left - right of a) = c (left - right of b) everywhere; 0: there is
  // none.
  int multiple(int a, int b) {
    const std::vector<std::string> symbols = free_symbols(tree_, a);
    if (symbols.empty() || symbols != free_symbols(tree_, b)) return 0;
    const int above = negated_difference(at(a).children[0], at(a).children[1]);
    const int below = negated_difference(at(b).children[0], at(b).children[1]);
    const int ratio = tree_.add(MathKind::kQuotient, {}, {above, below});
    std::optional<ComplexBall> first;
    int agreeing = 0;
    for (uint64_t i = 0; i < 8 && agreeing < 4; ++i) {
      EvaluationPoint point;
      point.seed = options_.seed * 1000 + i;
      if (i >= 4) point.negative = signs_at(symbols, i - 4);
      point.small = i % 2 == 1;
      Evaluation value = evaluate(tree_, ratio, point, budget_);
      if (value.failure == EvaluationFailure::kUnsupported) return 0;
      if (!value.value) continue;
      if (!first) {
        first = std::move(value.value);
      } else if (agree(*first, *value.value) != Same::kYes) {
        if (i >= 4 && value.complex_branch) continue;
        return 0;
      }
      ++agreeing;
    }
    if (agreeing < 2 || !first->is_real() || first->magnitude() < first->error + 64) return 0;
    return mpfr_sgn(first->re);
  }

  bool relations(int a, int b) {
    std::string head_a, head_b;
    const std::string signs_a = at(a).text, signs_b = at(b).text;
    const int value_a = stated_value(a, &head_a), value_b = stated_value(b, &head_b);
    if (value_a >= 0 && value_b >= 0) {
      if (head_a.empty() || head_b.empty() || head_a == head_b) {
        int other = value_b;
        const MathNode& left_a = at(at(a).children[0]);
        const MathNode& left_b = at(at(b).children[0]);
        // f(x) = ... against f(n) = ...
        if (left_a.kind == MathKind::kProduct && left_b.kind == MathKind::kProduct &&
            left_a.children.size() == 2 && left_b.children.size() == 2) {
          const std::string from = at(left_b.children[1]).text, to = at(left_a.children[1]).text;
          if (is(left_b.children[1], MathKind::kSymbol) &&
              is(left_a.children[1], MathKind::kSymbol)) {
            if (from != to) other = copy(value_b, 0, from, to);
          } else if (from != to) {
            return false;
          }
        }
        if (same(value_a, other)) return true;
      }
      if (signs_a == "=" && signs_b == "=") return multiple(a, b) != 0;
      return false;
    }
    std::vector<IntervalView> views_a, views_b;
    if (intervals(a, &views_a) && intervals(b, &views_b))
      return cover(views_a, views_b,
                   [&](const auto& x, const auto& y) { return same_interval(x, y); });
    if (signs_a.size() != signs_b.size()) return false;
    if (signs_a.size() == 1) {
      const auto turn = [](char sign) {
        return sign == '<' ? '>' : sign == '>' ? '<' : sign == 'l' ? 'g' : sign == 'g' ? 'l' : sign;
      };
      const int sign = multiple(a, b);
      if (sign != 0) return sign > 0 ? signs_a == signs_b : signs_a[0] == turn(signs_b[0]);
      return signs_a == signs_b && in_order(at(a).children, at(b).children);
    }
    std::vector<int> sides = at(b).children;
    std::string signs = signs_b;
    if (signs != signs_a) {
      std::reverse(sides.begin(), sides.end());
      std::reverse(signs.begin(), signs.end());
      for (char& sign : signs)
        sign = sign == '<' ? '>' : sign == '>' ? '<' : sign == 'l' ? 'g' : sign == 'g' ? 'l' : sign;
    }
    return signs == signs_a && in_order(at(a).children, sides);
  }

  static std::string bare_words(std::string_view text) {
    std::string out;
    for (const char c : text)
      if (!is_blank(c) && c != '(' && c != ')' && c != '.' && c != ',' && c != '\'' && c != '"' &&
          c != '-' && c != '~')
        out += c;
    return out;
  }

  bool words(int a, int b) const {
    if (is(a, MathKind::kText) && is(b, MathKind::kText))
      return lower(bare_words(at(a).text)) == lower(bare_words(at(b).text));
    const int text = is(a, MathKind::kText) ? a : b, other = is(a, MathKind::kText) ? b : a;
    return is(other, MathKind::kSymbol) && bare_words(at(text).text) == at(other).text;
  }

  bool identical(int a, int b) const {
    const MathNode &x = at(a), &y = at(b);
    if (x.kind != y.kind || x.text != y.text || x.children.size() != y.children.size())
      return false;
    for (size_t i = 0; i < x.children.size(); ++i)
      if (!identical(x.children[i], y.children[i])) return false;
    return true;
  }

  bool same(int a, int b) {
    if (!budget_->spend(1)) return false;
    const MathKind kind_a = at(a).kind, kind_b = at(b).kind;
    const bool relation_a = kind_a == MathKind::kRelation,
               relation_b = kind_b == MathKind::kRelation;
    if (relation_a && relation_b) return relations(a, b);
    if (relation_a || relation_b) {
      std::string head;
      const int value = stated_value(relation_a ? a : b, &head);
      if (value >= 0) return relation_a ? same(value, b) : same(a, value);
    }
    if (kind_a == MathKind::kText || kind_b == MathKind::kText) return words(a, b);
    if (kind_a == MathKind::kQuantity || kind_b == MathKind::kQuantity) return quantities(a, b);

    const auto items = [&](int node) {
      return is(node, MathKind::kList) || is(node, MathKind::kSet);
    };
    const auto empty = [&](int node) {
      return (is(node, MathKind::kSymbol) && at(node).text == "emptyset") ||
             (is(node, MathKind::kSet) && at(node).children.empty());
    };
    if (empty(a) || empty(b)) return empty(a) && empty(b);
    const bool bracketed_a = kind_a == MathKind::kBracketed,
               bracketed_b = kind_b == MathKind::kBracketed;
    if (bracketed_a && bracketed_b) {
      if (at(a).children.size() != 2 || at(a).text == at(b).text)
        return in_order(at(a).children, at(b).children);
    }
    std::vector<IntervalView> views_a, views_b;
    if (!(items(a) && items(b) && !is(at(a).children[0], MathKind::kRelation)) &&
        intervals(a, &views_a) && intervals(b, &views_b) &&
        !(is(a, MathKind::kSet) && is(b, MathKind::kSet)))
      return cover(views_a, views_b,
                   [&](const auto& x, const auto& y) { return same_interval(x, y); });
    if (items(a) && items(b))
      return cover(at(a).children, at(b).children, [&](int x, int y) { return same(x, y); });
    if ((kind_a == MathKind::kList && bracketed_b) || (kind_b == MathKind::kList && bracketed_a)) {
      const std::string& brackets = at(bracketed_a ? a : b).text;
      return (brackets == "()" || at(a).children.size() > 2) &&
             in_order(at(a).children, at(b).children);
    }
    if (items(a) || items(b)) {
      const int set = items(a) ? a : b;
      return is(set, MathKind::kSet) && at(set).children.size() == 1 &&
             (items(a) ? same(at(a).children[0], b) : same(a, at(b).children[0]));
    }
    if (kind_a != MathKind::kMatrix || kind_b != MathKind::kMatrix) {
      const int matrix_a = as_matrix(a), matrix_b = as_matrix(b);
      if ((matrix_a >= 0 && matrix_a != a) || (matrix_b >= 0 && matrix_b != b))
        return same(matrix_a >= 0 ? matrix_a : a, matrix_b >= 0 ? matrix_b : b);
    }
    if (kind_a == MathKind::kMatrix && kind_b == MathKind::kMatrix)
      return at(a).columns == at(b).columns && in_order(at(a).children, at(b).children);
    if ((kind_a == MathKind::kMatrix && bracketed_b) ||
        (kind_b == MathKind::kMatrix && bracketed_a)) {
      const MathNode& matrix = at(kind_a == MathKind::kMatrix ? a : b);
      const bool vector =
          matrix.columns == 1 || static_cast<size_t>(matrix.columns) == matrix.children.size();
      return vector && in_order(at(a).children, at(b).children);
    }
    if (kind_a == MathKind::kRatio || kind_b == MathKind::kRatio) return ratios(a, b);
    if (kind_a == MathKind::kPercent || kind_b == MathKind::kPercent)
      return scaled(a, b, MathKind::kPercent);
    if (kind_a == MathKind::kDegree || kind_b == MathKind::kDegree)
      return scaled(a, b, MathKind::kDegree);
    return value(a, b);
  }

  // A matrix times or over numbers, negated, transposed, or a sum of such, cell by cell; -1: it is
  // none.
  int as_matrix(int node) {
    const MathNode n = at(node);
    if (n.kind == MathKind::kMatrix) return node;
    if (n.children.empty() || n.kind == MathKind::kFunction || n.kind == MathKind::kBracketed)
      return -1;
    if (!any_node(tree_, node, [](const MathNode& part) { return part.kind == MathKind::kMatrix; }))
      return -1;
    std::vector<int> cells;
    int columns = 0;
    const auto each_cell = [&](int matrix, auto cell) {
      const MathNode m = at(matrix);
      columns = m.columns;
      for (const int child : m.children) cells.push_back(cell(child));
    };
    if (n.kind == MathKind::kProduct || n.kind == MathKind::kQuotient ||
        n.kind == MathKind::kNegate) {
      const size_t places = n.kind == MathKind::kQuotient ? 1 : n.children.size();
      for (size_t i = 0; i < places; ++i) {
        const int matrix = as_matrix(n.children[i]);
        if (matrix < 0) continue;
        if (columns != 0) return -1;  // a product of matrices
        each_cell(matrix, [&](int cell) {
          std::vector<int> parts = n.children;
          parts[i] = cell;
          return tree_.add(n.kind, n.text, std::move(parts));
        });
      }
    } else if (n.kind == MathKind::kSum) {
      std::vector<int> matrices;
      for (const int child : n.children) matrices.push_back(as_matrix(child));
      for (const int matrix : matrices)
        if (matrix < 0 || at(matrix).columns != at(matrices[0]).columns ||
            at(matrix).children.size() != at(matrices[0]).children.size())
          return -1;
      size_t place = 0;
      each_cell(matrices[0], [&](int) {
        std::vector<int> parts;
        for (const int matrix : matrices) parts.push_back(at(matrix).children[place]);
        ++place;
        return tree_.add(MathKind::kSum, {}, std::move(parts));
      });
    } else if (n.kind == MathKind::kPower && is(n.children[1], MathKind::kSymbol) &&
               (at(n.children[1]).text == "T" || at(n.children[1]).text == "top")) {
      const int matrix = as_matrix(n.children[0]);
      if (matrix < 0) return -1;
      const MathNode m = at(matrix);
      const size_t wide = static_cast<size_t>(m.columns), tall = m.children.size() / wide;
      for (size_t column = 0; column < wide; ++column)
        for (size_t row = 0; row < tall; ++row) cells.push_back(m.children[row * wide + column]);
      columns = static_cast<int>(tall);
    }
    if (columns == 0) return -1;
    const int result = tree_.add(MathKind::kMatrix, {}, std::move(cells));
    tree_.nodes[static_cast<size_t>(result)].columns = columns;
    return result;
  }

  // 10% is 10 or 1/10, 180 degrees are 180 or pi, where the other side does not say.
  bool scaled(int a, int b, MathKind kind) {
    const auto inside = [&](int node) { return is(node, kind) ? at(node).children[0] : node; };
    return same(inside(a), inside(b)) || (!(is(a, kind) && is(b, kind)) && value(a, b));
  }

  bool quantities(int a, int b) {
    const auto inside = [&](int node) {
      return is(node, MathKind::kQuantity) ? at(node).children[0] : node;
    };
    const auto unit = [&](int node) -> std::optional<KnownUnit> {
      if (!is(node, MathKind::kQuantity)) return std::nullopt;
      return known_unit(at(node).text);
    };
    const auto percent = [&](int node) {  // "28 percent"
      return is(node, MathKind::kQuantity) && lower(at(node).text).starts_with("percent")
                 ? tree_.add(MathKind::kPercent, {}, {at(node).children[0]})
                 : node;
    };
    const int percent_a = percent(a), percent_b = percent(b);
    if (percent_a != a || percent_b != b) return same(percent_a, percent_b);
    const auto unit_a = unit(a), unit_b = unit(b);
    int x = inside(a), y = inside(b);
    if (unit_a && unit_b) {
      if (unit_a->dimension != unit_b->dimension || unit_a->power != unit_b->power) return false;
      x = in_base_units(x, *unit_a);
      y = in_base_units(y, *unit_b);
    }
    return same(x, y);
  }

  int in_base_units(int node, const KnownUnit& unit) {
    if (unit.above == 1 && unit.below == 1) return node;
    const int above = tree_.add(MathKind::kNumber, std::to_string(unit.above));
    const int below = tree_.add(MathKind::kNumber, std::to_string(unit.below));
    const int factor = tree_.add(MathKind::kQuotient, {}, {above, below});
    std::vector<int> factors{node};
    for (int i = 0; i < unit.power; ++i) factors.push_back(factor);
    return tree_.add(MathKind::kProduct, {}, std::move(factors));
  }

  bool ratios(int a, int b) {
    if (is(a, MathKind::kRatio) && is(b, MathKind::kRatio)) {
      const std::vector<int> x = at(a).children, y = at(b).children;
      if (x.size() != y.size()) return false;
      if (in_order(x, y)) return true;
      for (size_t i = 1; i < x.size(); ++i)
        if (!value(tree_.add(MathKind::kProduct, {}, {x[0], y[i]}),
                   tree_.add(MathKind::kProduct, {}, {x[i], y[0]})))
          return false;
      // Not 0:0 against everything.
      return !zero(x[0]) && !zero(y[0]);
    }
    const int ratio = is(a, MathKind::kRatio) ? a : b, other = is(a, MathKind::kRatio) ? b : a;
    if (at(ratio).children.size() != 2) return false;
    return value(tree_.add(MathKind::kQuotient, {}, at(ratio).children), other);
  }

  bool zero(int node) {
    const auto exact = exact_value(tree_, node, budget_);
    return exact && mpq_sgn(exact->get()) == 0;
  }

  // ---- Values
  // --------------------------------------------------------------------------------------------------------

  // Whether two balls hold the same number; unknown when they overlap but are too wide to say.
  Same agree(const ComplexBall& a, const ComplexBall& b) const {
    ComplexBall difference(std::max(mpfr_get_prec(a.re), mpfr_get_prec(b.re)));
    mpfr_sub(difference.re, a.re, b.re, MPFR_RNDN);
    mpfr_sub(difference.im, a.im, b.im, MPFR_RNDN);
    const double apart = difference.magnitude();
    const double error = std::max(a.error, b.error);
    if (apart == -std::numeric_limits<double>::infinity() && error == apart) return Same::kYes;
    if (apart > error + 4) return Same::kNo;
    const double size = std::max(a.magnitude(), b.magnitude());
    return error <= size - 64 || (size <= error + 4 && error <= -128) ? Same::kYes : Same::kUnknown;
  }

  bool value(int a, int b) {
    if (infinite(a) != 0 || infinite(b) != 0) return infinite(a) == infinite(b);
    if (identical(a, b)) return true;
    const bool constants = constant(a) && constant(b);
    if (constants) {
      const auto x = exact_value(tree_, a, budget_);
      const auto y = x ? exact_value(tree_, b, budget_) : std::nullopt;
      if (x && y)
        return mpq_equal(x->get(), y->get()) != 0 || rounded_decimal(a, b) || rounded_decimal(b, a);
    }
    const auto bare_log = [&](int node) {
      return any_node(tree_, node, [](const MathNode& n) {
        return n.kind == MathKind::kFunction && n.text == "log" && n.children.size() == 1;
      });
    };
    if (points(a, b, false)) return true;
    if ((bare_log(a) || bare_log(b)) && points(a, b, true)) return true;
    return constants && (rounded_decimal(a, b) || rounded_decimal(b, a));
  }

  // Sign patterns: first all symbols negative, then those whose index has bit 0, 1, 2 set, and
  // those that have it clear; any two of eight symbols differ in one of these.
  static std::vector<std::string> signs_at(const std::vector<std::string>& symbols,
                                           uint64_t pattern) {
    if (pattern == 0) return symbols;
    std::vector<std::string> negative;
    for (size_t i = 0; i < symbols.size(); ++i)
      if (((i >> ((pattern - 1) / 2)) & 1) == (pattern % 2)) negative.push_back(symbols[i]);
    return negative;
  }

  // Equal at a constant, or at three of up to twelve positive points and at every pattern of signs
  // (one point each) where both are defined.
  bool points(int a, int b, bool decimal_log) {
    std::vector<std::string> symbols = free_symbols(tree_, a);
    for (std::string& name : free_symbols(tree_, b)) symbols.push_back(std::move(name));
    std::sort(symbols.begin(), symbols.end());
    symbols.erase(std::unique(symbols.begin(), symbols.end()), symbols.end());
    constexpr uint64_t kPositive = 12;
    const uint64_t patterns = symbols.empty()       ? 0
                              : symbols.size() == 1 ? 1
                              : symbols.size() == 2 ? 3
                                                    : 7;
    const int wanted = symbols.empty() ? 1 : 3;
    int counted = 0;
    for (uint64_t i = 0; i < kPositive + patterns; ++i) {
      if (i < kPositive && counted >= wanted) continue;
      EvaluationPoint point;
      point.seed = options_.seed * 1000 + i;
      if (i >= kPositive) point.negative = signs_at(symbols, i - kPositive);
      point.small = i % 3 == 1;
      point.decimal_log = decimal_log;
      const Point result = at_point(a, b, point);
      if (result == Point::kUnequal) return false;
      if (result == Point::kEqual) ++counted;
      if (symbols.empty()) break;
    }
    return counted >= std::min(wanted, 2);
  }

  enum class Point { kEqual, kUnequal, kSkip };

  Point at_point(int a, int b, EvaluationPoint point) {
    for (int attempt = 0; attempt < 4; ++attempt) {
      const Evaluation x = evaluate(tree_, a, point, budget_);
      const Evaluation y = evaluate(tree_, b, point, budget_);
      if (x.failure == EvaluationFailure::kUnsupported ||
          y.failure == EvaluationFailure::kUnsupported)
        return Point::kUnequal;
      if (x.failure == EvaluationFailure::kUndefined || y.failure == EvaluationFailure::kUndefined)
        return Point::kSkip;
      const Same verdict = agree(*x.value, *y.value);
      if (verdict == Same::kNo)
        return !point.negative.empty() && (x.complex_branch || y.complex_branch) ? Point::kSkip
                                                                                 : Point::kUnequal;
      const double lost = std::max(x.lost_bits, y.lost_bits);
      if (verdict == Same::kYes && lost <= 0) return Point::kEqual;
      const double next = static_cast<double>(point.precision) +
                          std::max(lost, static_cast<double>(point.precision));
      if (next > 16384) return Point::kUnequal;
      point.precision = static_cast<mpfr_prec_t>(next);
    }
    return Point::kUnequal;
  }

  // The decimals of a (signed) decimal literal.
  const std::string* decimal_literal(int node) const {
    if (is(node, MathKind::kNegate)) node = at(node).children[0];
    const MathNode& n = at(node);
    return n.kind == MathKind::kNumber && n.text.find('.') != std::string::npos &&
                   n.text.find('(') == std::string::npos
               ? &n.text
               : nullptr;
  }

  bool rounded_decimal(int decimal, int other) {
    const std::string* literal = decimal_literal(decimal);
    if (options_.decimal_places <= 0 || literal == nullptr || decimal_literal(other) != nullptr)
      return false;
    const size_t places = literal->size() - literal->find('.') - 1;
    const size_t first = literal->find_first_of("123456789");
    if (first == std::string::npos) return false;
    const size_t point = literal->find('.');
    const size_t significant = literal->size() - first - (first < point ? 1 : 0);
    const auto least = static_cast<size_t>(options_.decimal_places);
    if (places < least || significant < least || places > 60) return false;
    EvaluationPoint where;
    const int difference = negated_difference(decimal, other);
    const Evaluation apart = evaluate(tree_, difference, where, budget_);
    if (!apart.value || !apart.value->is_real() || apart.value->error > -220) return false;
    // |difference| <= 10^-places / 2, with 2^-60 of slack for a tie
    ComplexBall half(256);
    mpfr_set_ui(half.re, 10, MPFR_RNDN);
    mpfr_pow_si(half.re, half.re, -static_cast<long>(places), MPFR_RNDN);
    mpfr_mul_d(half.re, half.re, 0.5 * (1 + 0x1p-50), MPFR_RNDN);
    return mpfr_cmpabs(apart.value->re, half.re) <= 0;
  }

  const MathOptions& options_;
  WorkBudget* budget_;
  MathTree tree_;
  int gold_ = -1, answer_ = -1;
};

// ---- Readings of a text
// ---------------------------------------------------------------------------------------------

bool digits_around_comma(std::string_view text) {
  for (size_t i = 1; i + 1 < text.size(); ++i)
    if (text[i] == ',' && is_digit(text[i - 1]) && is_digit(text[i + 1])) return true;
  return false;
}

// 1,22 and 0,5: a decimal comma; not 1,234 and not 2,1.
bool decimal_comma(std::string_view text) {
  std::string tight;
  for (const char c : text)
    if (!is_blank(c) && c != '$' && c != '-') tight += c;
  const size_t comma = tight.find(',');
  if (comma == std::string::npos || comma == 0 || tight.find(',', comma + 1) != std::string::npos)
    return false;
  if (!std::all_of(tight.begin(), tight.end(), [](char c) { return is_digit(c) || c == ','; }))
    return false;
  const size_t decimals = tight.size() - comma - 1;
  const bool below_one = tight.substr(0, comma) == "0";
  return below_one ? decimals >= 1 : decimals == 2 || decimals > 3;
}

std::vector<CommaReading> readings(std::string_view text) {
  std::vector<CommaReading> result{CommaReading::kThousands};
  if (digits_around_comma(text)) {
    result.push_back(CommaReading::kSeparator);
    if (decimal_comma(text)) result.push_back(CommaReading::kDecimal);
  }
  return result;
}

// 4:30, 12:05 p.m.: digits of hours and minutes, and the half of the day if stated (or 0).
struct Clock {
  std::string hours, minutes;
  char half = 0;
};

std::optional<Clock> clock_time(std::string_view text) {
  std::string tight;
  for (size_t i = 0; i < text.size() && tight.size() < 64; ++i) {
    const char c = text[i];
    if (is_blank(c) || c == '$' || c == '{' || c == '}' || c == '~' || c == '.') continue;
    if (c == '\\') {
      while (i + 1 < text.size() && is_letter(text[i + 1])) ++i;  // \text, \mathrm
      continue;
    }
    tight += to_lower(c);
  }
  const size_t colon = tight.find(':');
  if (colon == std::string::npos || colon == 0 || colon > 2 || tight.size() < colon + 3)
    return std::nullopt;
  Clock clock{tight.substr(0, colon), tight.substr(colon + 1, 2), 0};
  const std::string rest = tight.substr(colon + 3);
  if (!std::all_of(clock.hours.begin(), clock.hours.end(), is_digit) ||
      !std::all_of(clock.minutes.begin(), clock.minutes.end(), is_digit))
    return std::nullopt;
  if (rest == "pm" || rest == "p")
    clock.half = 'p';
  else if (rest == "am" || rest == "a")
    clock.half = 'a';
  else if (!rest.empty())
    return std::nullopt;
  if (clock.hours.size() == 2 && clock.hours[0] == '0') clock.hours.erase(0, 1);
  return clock;
}

// "C. 12", "(C) 12": the letter and what follows it.
std::optional<std::pair<char, std::string_view>> option_prefix(std::string_view text) {
  text = trimmed(text);
  size_t i = 0;
  const bool open = !text.empty() && text[0] == '(';
  if (open) ++i;
  if (i + 2 >= text.size() || text[i] < 'A' || text[i] > 'J') return std::nullopt;
  const char letter = text[i];
  const char close = text[i + 1];
  if (!(close == ')' || (!open && (close == '.' || close == ':'))) || !is_blank(text[i + 2]))
    return std::nullopt;
  const std::string_view rest = trimmed(text.substr(i + 2));
  if (rest.empty()) return std::nullopt;
  return std::pair{letter, rest};
}

std::string_view without_dollars(std::string_view text) {
  text = trimmed(text);
  while (text.size() >= 2 && text.front() == '$' && text.back() == '$' &&
         text[text.size() - 2] != '\\')
    text = trimmed(text.substr(1, text.size() - 2));
  return text;
}

MathVerdict compare_values(std::string_view gold, std::string_view answer,
                           const MathOptions& options, WorkBudget* budget) {
  bool understood = false;
  for (const CommaReading gold_reading : readings(gold)) {
    const auto gold_tree = parse_answer(gold, gold_reading);
    if (!gold_tree) continue;
    for (const CommaReading answer_reading : readings(answer)) {
      // A decimal comma is one only against a decimal point.
      if (gold_reading == CommaReading::kDecimal &&
          (answer.find('.') == kNone || answer.find(',') != kNone))
        continue;
      if (answer_reading == CommaReading::kDecimal &&
          (gold.find('.') == kNone || gold.find(',') != kNone))
        continue;
      const auto answer_tree = parse_answer(answer, answer_reading);
      if (!answer_tree) continue;
      understood = true;
      if (Comparison(*gold_tree, *answer_tree, options, budget).run()) return {true, "value"};
    }
  }
  return {false, understood ? "unequal" : "not understood"};
}

}  // namespace

MathVerdict compare_math(std::string_view gold, std::string_view answer,
                         const MathOptions& options) {
  gold = without_dollars(gold);
  answer = without_dollars(answer);
  if (gold.empty() || answer.empty()) return {false, "no answer"};
  if (gold == answer) return {true, "spelling"};
  if (std::max(gold.size(), answer.size()) > kMaxAnswerBytes) {
    if (std::abs(static_cast<double>(gold.size()) - static_cast<double>(answer.size())) >
        kMaxAnswerBytes)
      return {false, "not understood"};
    return canonical_answer(gold) == canonical_answer(answer)
               ? MathVerdict{true, "spelling"}
               : MathVerdict{false, "not understood"};
  }
  bool gold_words = false, answer_words = false;
  std::string gold_line = canonical_answer(gold, &gold_words),
              answer_line = canonical_answer(answer, &answer_words);
  if (gold_line.empty() || answer_line.empty()) return {false, "no answer"};
  if (gold_line == answer_line) return {true, "spelling"};
  const auto gold_time = clock_time(gold), answer_time = clock_time(answer);
  if (gold_time && answer_time)
    return {gold_time->hours == answer_time->hours && gold_time->minutes == answer_time->minutes &&
                (gold_time->half == 0 || answer_time->half == 0 ||
                 gold_time->half == answer_time->half),
            "time"};
  WorkBudget budget;
  MathVerdict verdict = compare_values(gold, answer, options, &budget);
  if (verdict.equal) return verdict;
  if (gold_words || answer_words) {
    const auto bare = [](const std::string& line) {
      std::string out;
      for (const char c : line)
        if (c != '(' && c != ')' && c != '{' && c != '}' && c != '.' && c != ' ' && c != ',' &&
            c != '-')
          out += to_lower(c);
      return out;
    };
    gold_line = bare(gold_line);
    answer_line = bare(answer_line);
    const auto letters_only = [](const std::string& line) {
      return std::all_of(line.begin(), line.end(), is_letter);
    };
    if (!gold_line.empty() && gold_line.size() > 1 && gold_line == answer_line &&
        letters_only(gold_line))
      return {true, "words"};
  }
  const auto prefix = option_prefix(answer);
  if (prefix && !option_prefix(gold)) {
    const std::string letter(1, prefix->first);
    if (gold_line == letter || gold_line == "(" + letter + ")") return {true, "option"};
    if (compare_values(gold, prefix->second, options, &budget).equal) return {true, "option"};
  }
  return verdict;
}

// ---- The answer that a text states
// ------------------------------------------------------------------------------------

namespace {

struct Formula {
  size_t begin, end;  // with its delimiters
  std::string_view content;
};

std::vector<Formula> formulas(std::string_view text) {
  std::vector<Formula> result;
  // Next closing delimiter of each kind, searched once as the scan moves on.
  size_t i = 0;
  const auto find_dollar = [&](size_t from, bool two) {
    for (size_t j = from; j < text.size(); ++j) {
      if (text[j] == '\\') {
        ++j;
      } else if (text[j] == '$' && (!two || (j + 1 < text.size() && text[j + 1] == '$'))) {
        return j;
      }
    }
    return kNone;
  };
  bool dollars = true, displays = true, round = true,
       square = true;  // a search that failed once fails for good
  while (i < text.size()) {
    if (text[i] == '$' && dollars) {
      const bool two = i + 1 < text.size() && text[i + 1] == '$';
      const size_t open = i + (two ? 2 : 1);
      const size_t close = two && !displays ? kNone : find_dollar(open, two);
      if (close == kNone) {
        (two ? displays : dollars) = false;
        ++i;
        continue;
      }
      const size_t end = close + (two ? 2 : 1);
      result.push_back({i, end, text.substr(open, close - open)});
      i = end;
    } else if (text[i] == '\\' && i + 1 < text.size()) {
      const char kind = text[i + 1];
      if ((kind == '(' && round) || (kind == '[' && square)) {
        const size_t close = text.find(kind == '(' ? "\\)" : "\\]", i + 2);
        if (close == kNone) {
          (kind == '(' ? round : square) = false;
          i += 2;
          continue;
        }
        result.push_back({i, close + 2, text.substr(i + 2, close - i - 2)});
        i = close + 2;
      } else {
        i += 2;
      }
    } else {
      ++i;
    }
  }
  return result;
}

bool joins_formulas(std::string_view gap) {
  std::string tight;
  for (const char c : gap)
    if (!is_blank(c)) tight += c;
  return tight == "," || tight == "and" || tight == ",and" || tight == "or" || tight == ";" ||
         tight == ",or";
}

// The last formula with its neighbours, and a percent sign behind it.
std::string last_formula(std::string_view text, const std::vector<Formula>& all) {
  size_t first = all.size() - 1;
  while (first > 0 &&
         joins_formulas(text.substr(all[first - 1].end, all[first].begin - all[first - 1].end)))
    --first;
  std::string result;
  for (size_t i = first; i < all.size(); ++i) {
    if (i > first) result += ", ";
    result += trimmed(all[i].content);
  }
  const std::string_view behind = trimmed(text.substr(all.back().end, 16));
  if (behind.starts_with("%") || behind.starts_with("\\%") || behind.starts_with("percent"))
    result += "\\%";
  return result;
}

std::string last_number(std::string_view text) {
  size_t end = text.size();
  while (end > 0 && !is_digit(text[end - 1])) --end;
  if (end == 0) return {};
  size_t begin = end;
  const auto digit = [&](size_t i) { return i < text.size() && is_digit(text[i]); };
  const auto part = [&](size_t i) {
    const char c = text[i];
    if (is_digit(c)) return true;
    if (i == 0 || !digit(i - 1) || !digit(i + 1)) return false;
    if (c == '.' || c == ',' || c == '/') return true;
    // 1 000: at most three digits before, exactly three behind
    return c == ' ' && digit(i + 2) && digit(i + 3) && !digit(i + 4) &&
           !(i >= 4 && digit(i - 2) && digit(i - 3) && digit(i - 4));
  };
  while (begin > 0 && part(begin - 1)) --begin;
  if (begin > 0 && text[begin - 1] == '.') --begin;
  if (begin > 0 && text[begin - 1] == '-' &&
      (begin == 1 || !(is_digit(text[begin - 2]) || is_letter(text[begin - 2]))))
    --begin;
  std::string result(text.substr(begin, end - begin));
  if (trimmed(text.substr(end, 8)).starts_with("%")) result += "\\%";
  return result;
}

// Words of three letters and more that are neither commands nor well-known names.
size_t prose_words(std::string_view text) {
  size_t count = 0;
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '\\') {
      ++i;
      while (i < text.size() && is_letter(text[i])) ++i;
      continue;
    }
    size_t end = i;
    while (end < text.size() && is_letter(text[end])) ++end;
    if (end - i >= 3) {
      const std::string word = lower(text.substr(i, end - i));
      if (word != "and" && word != "sin" && word != "cos" && word != "tan" && word != "log" &&
          word != "sqrt" && word != "percent")
        ++count;
    }
    i = end == i ? i + 1 : end;
  }
  return count;
}

size_t find_last_any_case(std::string_view text, std::string_view phrase) {
  if (text.size() < phrase.size()) return kNone;
  for (size_t at = text.size() - phrase.size() + 1; at-- > 0;) {
    size_t i = 0;
    while (i < phrase.size() && to_lower(text[at + i]) == phrase[i]) ++i;
    if (i == phrase.size()) return at;
  }
  return kNone;
}

// The sentence that starts at `begin`: up to a full stop before white space or the end, or a line
// break.
std::string_view sentence(std::string_view text, size_t begin) {
  size_t end = begin;
  bool formula = false;
  for (; end < text.size(); ++end) {
    if (text[end] == '$') formula = !formula;
    if (text[end] == '\n' && end > begin + 1 && !formula) break;
    if (text[end] == '.' && !formula && (end + 1 == text.size() || is_blank(text[end + 1]))) break;
  }
  return text.substr(begin, end - begin);
}

std::string answer_in_sentence(std::string_view said) {
  while (!said.empty() && (is_blank(said.front()) || said.front() == ':' || said.front() == '*' ||
                           said.front() == '"'))
    said.remove_prefix(1);
  const std::vector<Formula> all = formulas(said);
  if (!all.empty()) {
    const std::string_view behind = trimmed(said.substr(all.back().end));
    if (prose_words(behind) == 0 && last_number(behind).empty()) return last_formula(said, all);
  }
  const size_t verb = find_last_any_case(said, " is ");
  const std::string_view stated = verb == kNone ? said : said.substr(verb + 4);
  if (prose_words(stated) <= 1) return std::string(trimmed(stated));
  return all.empty() ? last_number(stated) : last_formula(said, all);
}

}  // namespace

std::string final_math_answer(std::string_view text) {
  if (const auto boxes = last_boxed_group(text); !boxes.empty()) {
    std::string result;
    for (const BoxedAnswer& box : boxes) {
      if (!result.empty()) result += ", ";
      result += box.content;
    }
    return result;
  }
  if (text.find("\\boxed") != kNone) return {};
  for (const std::string_view phrase : {"final answer is", "final answer:", "answer is"}) {
    const size_t at = find_last_any_case(text, phrase);
    if (at == kNone) continue;
    const std::string answer = answer_in_sentence(sentence(text, at + phrase.size()));
    if (!answer.empty()) return answer;
  }
  const std::vector<Formula> all = formulas(text);
  if (!all.empty()) {
    const std::string_view behind = text.substr(all.back().end);
    // A number in the prose behind the last formula is the later statement.
    if (all.back().content.size() > 0 && (prose_words(behind) < 2 || last_number(behind).empty()))
      return last_formula(text, all);
  }
  if (text.size() <= kMaxAnswerBytes && prose_words(text) <= 1) return std::string(trimmed(text));
  return last_number(text);
}

// ---- Published normalisers
// --------------------------------------------------------------------------------------------

namespace {

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t found; (found = text.find(from, at)) != kNone; at = found + from.size())
    out.append(text.substr(at, found - at)).append(to);
  return out.append(text.substr(at));
}

std::vector<std::string_view> split(std::string_view text, std::string_view by) {
  std::vector<std::string_view> parts;
  size_t at = 0;
  for (size_t found; (found = text.find(by, at)) != kNone; at = found + by.size())
    parts.push_back(text.substr(at, found - at));
  parts.push_back(text.substr(at));
  return parts;
}

// Bytes of the code point at the front.
size_t character(std::string_view text) {
  size_t length = text.empty() ? 0 : 1;
  while (length < text.size() && length < 4 &&
         (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80)
    ++length;
  return length;
}

size_t characters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

[[noreturn]] void published_function_raises(const char* where) {
  throw std::runtime_error(std::string("hendrycks normaliser: ") + where);
}

std::string braced_fractions(const std::string& text) {
  const auto parts = split(text, "\\frac");
  std::string out(parts[0]);
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string_view part = parts[i];
    out += "\\frac";
    if (part.empty()) published_function_raises("nothing after \\frac");
    if (part[0] == '{') {
      out += part;
      continue;
    }
    const size_t first = character(part);
    if (first == part.size()) return text;
    const std::string_view rest = part.substr(first);
    out.append("{").append(part.substr(0, first)).append("}");
    if (rest[0] == '{') {
      out += rest;
    } else {
      const size_t second = character(rest);
      out.append("{").append(rest.substr(0, second)).append("}").append(rest.substr(second));
    }
  }
  return out;
}

std::string braced_roots(const std::string& text) {
  const auto parts = split(text, "\\sqrt");
  std::string out(parts[0]);
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string_view part = parts[i];
    if (part.empty()) published_function_raises("nothing after \\sqrt");
    const size_t first = character(part);
    if (part[0] == '{')
      out.append("\\sqrt").append(part);
    else
      out.append("\\sqrt{").append(part.substr(0, first)).append("}").append(part.substr(first));
  }
  return out;
}

bool python_integer(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  if (text.empty() || text.size() > 4300 || !std::all_of(text.begin(), text.end(), is_digit))
    return false;
  return text == "0" || text[0] != '0';  // it must print as it was written
}

std::string slash_fraction(const std::string& text) {
  const auto parts = split(text, "/");
  if (parts.size() != 2 || !python_integer(parts[0]) || !python_integer(parts[1]) ||
      parts[0] == "-0" || parts[1] == "-0")
    return text;
  return "\\frac{" + std::string(parts[0]) + "}{" + std::string(parts[1]) + "}";
}

}  // namespace

std::string hendrycks_normalized(std::string_view answer) {
  std::string text(answer);
  for (const auto& [from, to] : {std::pair<std::string_view, std::string_view>{"\n", ""},
                                 {"\\!", ""},
                                 {"\\\\", "\\"},
                                 {"tfrac", "frac"},
                                 {"dfrac", "frac"},
                                 {"\\left", ""},
                                 {"\\right", ""},
                                 {"^{\\circ}", ""},
                                 {"^\\circ", ""},
                                 {"\\$", ""}})
    text = replaced(text, from, to);
  if (text.find("\\text{ ") != std::string::npos) {
    const auto parts = split(text, "\\text{ ");
    if (parts.size() != 2) published_function_raises("more than one unit");
    text = std::string(parts[0]);
  }
  text = replaced(text, "\\%", "");
  text = replaced(text, " .", " 0.");
  text = replaced(text, "{.", "{0.");
  if (text.empty()) return text;
  if (text[0] == '.') text.insert(0, "0");
  if (const auto sides = split(text, "="); sides.size() == 2 && characters(sides[0]) <= 2)
    text = std::string(sides[1]);
  if (text.find("\\sqrt") != std::string::npos) text = braced_roots(text);
  text = replaced(text, " ", "");
  if (text.find("\\frac") != std::string::npos) text = braced_fractions(text);
  if (text == "0.5") text = "\\frac{1}{2}";
  return slash_fraction(text);
}

namespace {

// Each "\name{...}" up to the first brace of its line gives its content.
std::string unwrapped(const std::string& text, std::string_view open) {
  std::string out;
  size_t at = 0, stop = 0;
  for (size_t found; (found = text.find(open, at)) != std::string::npos;) {
    const size_t inside = found + open.size();
    if (stop < inside) stop = std::min(text.find_first_of("}\n", inside), text.size());
    if (stop == text.size()) break;
    if (text[stop] == '\n') {
      out.append(text, at, inside - at);
      at = inside;
      continue;
    }
    out.append(text, at, found - at).append(text, inside, stop - inside);
    at = stop + 1;
  }
  return out.append(text, at);
}

// "\boxed{...}" up to the last brace of its line.
std::string unboxed(const std::string& text) {
  constexpr std::string_view open = "\\boxed{";
  std::string out;
  size_t line = 0;
  while (line <= text.size()) {
    const size_t end = std::min(text.find('\n', line), text.size());
    const std::string_view row = std::string_view(text).substr(line, end - line);
    const size_t found = row.find(open), close = row.rfind('}');
    if (found != kNone && close != kNone && close >= found + open.size()) {
      out.append(row.substr(0, found))
          .append(row.substr(found + open.size(), close - found - open.size()));
      out.append(row.substr(close + 1));
    } else {
      out.append(row);
    }
    if (end < text.size()) out += '\n';
    line = end + 1;
  }
  return out;
}

// A line with two dollar signs becomes what they enclose.
std::string first_formula(const std::string& text) {
  std::string out;
  size_t line = 0;
  while (line <= text.size()) {
    const size_t end = std::min(text.find('\n', line), text.size());
    const std::string_view row = std::string_view(text).substr(line, end - line);
    const size_t first = row.find('$');
    const size_t second = first == kNone ? kNone : row.find('$', first + 1);
    if (second == kNone)
      out.append(row);
    else
      out.append("$").append(row.substr(first + 1, second - first - 1)).append("$");
    if (end < text.size()) out += '\n';
    line = end + 1;
  }
  return out;
}

}  // namespace

std::string minerva_normalized(std::string_view answer) {
  std::string text(split(answer, "=").back());
  for (const auto& [from, to] : {std::pair<std::string_view, std::string_view>{"an ", ""},
                                 {"a ", ""},
                                 {".$", "$"},
                                 {"\\$", ""},
                                 {"\\ ", ""},
                                 {" ", ""},
                                 {"mbox", "text"},
                                 {",\\text{and}", ","},
                                 {"\\text{and}", ","},
                                 {"\\text{m}", "\\text{}"}}) {
    if (text.find(from) != kNone) text = replaced(text, from, to);
  }
  for (const std::string_view gone : {"square",       "ways",
                                      "integers",     "dollars",
                                      "mph",          "inches",
                                      "ft",           "hours",
                                      "km",           "units",
                                      "\\ldots",      "sue",
                                      "points",       "feet",
                                      "minutes",      "digits",
                                      "cents",        "degrees",
                                      "cm",           "gm",
                                      "pounds",       "meters",
                                      "meals",        "edges",
                                      "students",     "childrentickets",
                                      "multiples",    "\\text{s}",
                                      "\\text{.}",    "\\text{\ns}",
                                      "\\text{}^2",   "\\text{}^3",
                                      "\\text{\n}",   "\\text{}",
                                      "\\mathrm{th}", "^\\circ",
                                      "^{\\circ}",    "\\;",
                                      ",\\!",         "{,}",
                                      "\"",           "\\dots"}) {
    if (text.find(gone) != kNone) text = replaced(text, gone, "");
  }
  text = first_formula(text);
  text = unwrapped(text, "\\text{");
  text = unwrapped(text, "\\textbf{");
  text = unwrapped(text, "\\overline{");
  text = unboxed(text);
  // fracab -> frac{a}{b}, sqrta -> sqrt{a}; the second argument is not a line break.
  for (const bool fraction : {true, false}) {
    const std::string_view name = fraction ? "frac" : "sqrt";
    std::string out;
    size_t at = 0;
    for (size_t found; (found = text.find(name, at)) != std::string::npos;) {
      const std::string_view rest = std::string_view(text).substr(found + name.size());
      const size_t first = character(rest);
      const size_t second = fraction && first != 0 ? character(rest.substr(first)) : 0;
      out.append(text, at, found + name.size() - at);
      at = found + name.size();
      if (first == 0 || rest[0] == '{' || (fraction && (second == 0 || rest[first] == '\n')))
        continue;
      out.append("{").append(rest.substr(0, first)).append("}");
      if (fraction) out.append("{").append(rest.substr(first, second)).append("}");
      at += first + second;
    }
    text = out.append(text, at);
  }
  text = replaced(text, "$", "");
  const std::string digits = replaced(text, ",", "");
  if (!digits.empty() && std::all_of(digits.begin(), digits.end(), is_digit)) return digits;
  return text;
}

namespace {

MathVerdict by_hendrycks(std::string_view gold, std::string_view answer, const MathOptions&) {
  bool equal;
  try {
    equal = hendrycks_normalized(gold) == hendrycks_normalized(answer);
  } catch (const std::runtime_error&) {
    equal = gold == answer;
  }
  return {equal, equal ? "spelling" : "unequal"};
}

MathVerdict by_minerva(std::string_view gold, std::string_view answer, const MathOptions&) {
  const bool equal = minerva_normalized(gold) == minerva_normalized(answer);
  return {equal, equal ? "spelling" : "unequal"};
}

constexpr MathRule kRules[] = {
    {"math", "ReplayEval",
     "equality by value: exact rationals, 256-bit evaluation, sets, intervals, units, words",
     compare_math},
    {"hendrycks", "hendrycks/math", "equal strings after its normaliser", by_hendrycks},
    {"minerva", "lm-evaluation-harness minerva_math", "equal strings after its normaliser",
     by_minerva},
};

}  // namespace

std::span<const MathRule> math_rules() { return kRules; }

const MathRule& math_rule(std::string_view name) {
  std::string known;
  for (const MathRule& rule : kRules) {
    if (rule.name == name) return rule;
    known.append(" ").append(rule.name);
  }
  throw std::invalid_argument("math rule: unknown rule '" + std::string(name) +
                              "'; known:" + known);
}

}  // namespace replayeval
