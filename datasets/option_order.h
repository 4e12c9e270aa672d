// Orders in which the options of a question are shown.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "datasets/items.h"

namespace replayeval {

/// order[i] is the index of the option shown in place i.
using OptionOrder = std::vector<int>;

/// The order that is a function of item and seed only: Python's shuffle of 0 .. count-1 with the
/// first 8 bytes (big-endian) of SHA-256 of "<seed>/<task>/<id>" as its seed.
OptionOrder item_option_order(const Item& item, uint64_t seed);

/// GPQA as its authors, lm-eval (both seed 0) and NeMo-Skills (seed 42) show it: one generator
/// shuffles [wrong 1, wrong 2, wrong 3, correct] of each row in turn. Orders of rows 0 .. rows-1 of
/// the whole file, in terms of [correct, wrong 1, wrong 2, wrong 3].
std::vector<OptionOrder> gpqa_shuffled_orders(size_t rows, uint64_t seed);

/// GPQA as simple-evals shows it: one generator with seed 0 draws sample(range(4), 4) for each row
/// of the file, again for each repeat. Entry repeat·rows + row.
std::vector<OptionOrder> gpqa_sampled_orders(size_t rows, size_t repeats);

/// The item with its options in that order, and gold as the new letter. Throws
/// std::invalid_argument unless `order` is a permutation of the options.
Item with_option_order(Item item, const OptionOrder& order);

}  // namespace replayeval
