#include "datasets/option_order.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "base/hash.h"
#include "datasets/python_random.h"

namespace replayeval {

OptionOrder item_option_order(const Item& item, uint64_t seed) {
  const std::string hash = sha256_hex(std::to_string(seed) + "/" + item.task + "/" + item.id);
  PythonRandom random(std::stoull(hash.substr(0, 16), nullptr, 16));
  OptionOrder order(item.options.size());
  std::iota(order.begin(), order.end(), 0);
  random.shuffle(&order);
  return order;
}

std::vector<OptionOrder> gpqa_shuffled_orders(size_t rows, uint64_t seed) {
  PythonRandom random(seed);
  std::vector<OptionOrder> orders;
  for (size_t row = 0; row < rows; ++row) {
    OptionOrder order{1, 2, 3, 0};
    random.shuffle(&order);
    orders.push_back(std::move(order));
  }
  return orders;
}

std::vector<OptionOrder> gpqa_sampled_orders(size_t rows, size_t repeats) {
  PythonRandom random(0);
  std::vector<OptionOrder> orders;
  for (size_t i = 0; i < rows * repeats; ++i) {
    const std::vector<uint32_t> sample = random.sample(4, 4);
    orders.emplace_back(sample.begin(), sample.end());
  }
  return orders;
}

Item with_option_order(Item item, const OptionOrder& order) {
  OptionOrder sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted.size() != item.options.size() || sorted[i] != static_cast<int>(i)) {
      throw std::invalid_argument(item.task + "/" + item.id + ": the order is no permutation of " +
                                  std::to_string(item.options.size()) + " options");
    }
  }
  std::vector<std::string> options;
  for (int option : order) options.push_back(std::move(item.options[static_cast<size_t>(option)]));
  item.options = std::move(options);
  item.gold_option =
      static_cast<int>(std::find(order.begin(), order.end(), item.gold_option) - order.begin());
  item.gold = std::string(1, static_cast<char>('A' + item.gold_option));
  return item;
}

}  // namespace replayeval
