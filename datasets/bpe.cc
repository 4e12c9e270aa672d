#include "datasets/bpe.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

namespace replayeval {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr size_t kCachedSymbols = 64;      // longer segments are rarely seen twice
constexpr size_t kCacheEntries = 1 << 18;  // emptied when full, so that memory stays bounded

// Initial symbols that a symbol can begin (or end) with.
class Edges {
 public:
  Edges(std::span<const MergeRule> rules, const std::unordered_set<int32_t>& also_initial,
        bool first)
      : rules_(rules), also_initial_(also_initial), first_(first) {
    for (size_t i = 0; i < rules.size(); ++i) rules_of_[rules[i].result].push_back(i);
  }

  const std::vector<int32_t>& of(int32_t symbol) {
    const auto [entry, is_new] = edges_.try_emplace(symbol);
    if (!is_new) {
      if (entry->second.empty()) {
        throw std::runtime_error("merge rules: symbol " + std::to_string(symbol) +
                                 " is built from itself");
      }
      return entry->second;
    }
    std::vector<int32_t> found;
    const auto rules = rules_of_.find(symbol);
    if (rules == rules_of_.end() || also_initial_.contains(symbol)) found.push_back(symbol);
    if (rules != rules_of_.end()) {
      for (size_t i : rules->second) {
        const std::vector<int32_t>& part = of(first_ ? rules_[i].left : rules_[i].right);
        found.insert(found.end(), part.begin(), part.end());
      }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return edges_[symbol] = std::move(found);
  }

 private:
  std::span<const MergeRule> rules_;
  const std::unordered_set<int32_t>& also_initial_;
  bool first_;
  std::unordered_map<int32_t, std::vector<size_t>> rules_of_;
  std::unordered_map<int32_t, std::vector<int32_t>> edges_;  // references stay valid while it grows
};

std::vector<std::pair<int32_t, int32_t>> crossable_pairs(
    std::span<const MergeRule> rules, const std::unordered_set<int32_t>& also_initial) {
  Edges firsts(rules, also_initial, true), lasts(rules, also_initial, false);
  std::vector<std::pair<int32_t, int32_t>> pairs;
  pairs.reserve(rules.size());
  for (const MergeRule& rule : rules) {
    for (int32_t left : lasts.of(rule.left)) {
      for (int32_t right : firsts.of(rule.right)) pairs.emplace_back(left, right);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  return pairs;
}

constexpr auto later_position = [](const auto& a, const auto& b) {
  return a.position > b.position;
};

}  // namespace

MergeTable::MergeTable(std::span<const MergeRule> rules,
                       const std::unordered_set<int32_t>& also_initial)
    : merges_(rules.size()), crossable_(0) {
  for (const MergeRule& rule : rules) merges_.put(rule.left, rule.right, {rule.rank, rule.result});
  const auto pairs = crossable_pairs(rules, also_initial);
  crossable_ = PairTable<char>(pairs.size());
  for (const auto& [left, right] : pairs) crossable_.put(left, right, 1);
}

size_t MergeStream::SymbolsHash::operator()(const std::vector<int32_t>& symbols) const {
  uint64_t hash = symbols.size();
  for (int32_t symbol : symbols) {
    hash = (hash ^ static_cast<uint32_t>(symbol)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

void MergeStream::flush() {
  if (segment_.size() == 1) {
    out_->push_back(segment_[0]);
  } else if (segment_.size() > kCachedSymbols) {
    merge_segment();
  } else {
    const auto [entry, is_new] = cache_.try_emplace(segment_);
    if (is_new) {
      const size_t before = out_->size();
      merge_segment();
      entry->second.assign(out_->begin() + static_cast<ptrdiff_t>(before), out_->end());
      if (cache_.size() > kCacheEntries) cache_.clear();
    } else {
      out_->insert(out_->end(), entry->second.begin(), entry->second.end());
    }
  }
  segment_.clear();
}

void MergeStream::merge_segment() {
  const auto size = static_cast<uint32_t>(segment_.size());
  nodes_.resize(size);
  for (uint32_t i = 0; i < size; ++i) {
    nodes_[i] = {segment_[i], i == 0 ? kNone : i - 1, i + 1 == size ? kNone : i + 1};
  }
  for (uint32_t i = 0; i + 1 < size; ++i) add_candidate(i);
  Candidate candidate;
  while (take_candidate(&candidate)) {
    Node& left = nodes_[candidate.position];
    if (left.symbol < 0 || left.next == kNone) continue;
    Node& right = nodes_[left.next];
    // A candidate stays good as long as its two places still form the same symbol, by whichever
    // rule: this is how both reference implementations treat candidates whose parts have changed
    // meanwhile.
    const MergeTable::Merge* merge = table_->find(left.symbol, right.symbol);
    if (merge == nullptr || merge->result != candidate.result) continue;
    left.symbol = candidate.result;
    right.symbol = -1;
    left.next = right.next;
    if (left.next != kNone) nodes_[left.next].previous = candidate.position;
    if (left.previous != kNone) add_candidate(left.previous);
    if (left.next != kNone) add_candidate(candidate.position);
  }
  for (uint32_t i = 0; i != kNone; i = nodes_[i].next) out_->push_back(nodes_[i].symbol);
  for (size_t i = 0; i < buckets_used_; ++i) {
    buckets_[i].ordered.clear();
    buckets_[i].taken = 0;
    buckets_[i].queued = false;
    // One long segment should not hold its memory for all that follow.
    if (buckets_[i].ordered.capacity() > 1 << 16) buckets_[i].ordered.shrink_to_fit();
  }
  buckets_used_ = 0;
  bucket_of_rank_.clear();
}

void MergeStream::add_candidate(uint32_t position) {
  const MergeTable::Merge* merge =
      table_->find(nodes_[position].symbol, nodes_[nodes_[position].next].symbol);
  if (merge == nullptr) return;
  const auto [entry, is_new] =
      bucket_of_rank_.try_emplace(merge->rank, static_cast<uint32_t>(buckets_used_));
  if (is_new) {
    if (buckets_used_ == buckets_.size()) buckets_.emplace_back();
    buckets_[buckets_used_++].rank = merge->rank;
  }
  Bucket& bucket = buckets_[entry->second];
  const Candidate candidate{position, merge->result};
  if (bucket.taken == bucket.ordered.size() || bucket.ordered.back().position <= position) {
    bucket.ordered.push_back(candidate);
  } else {
    bucket.late.push_back(candidate);
    std::push_heap(bucket.late.begin(), bucket.late.end(), later_position);
  }
  if (!bucket.queued) {
    bucket.queued = true;
    ranks_.emplace_back(bucket.rank, entry->second);
    std::push_heap(ranks_.begin(), ranks_.end(), std::greater<>());
  }
}

bool MergeStream::take_candidate(Candidate* candidate) {
  while (!ranks_.empty()) {
    Bucket& bucket = buckets_[ranks_.front().second];
    const bool has_ordered = bucket.taken < bucket.ordered.size();
    if (!bucket.late.empty() &&
        (!has_ordered || bucket.late.front().position < bucket.ordered[bucket.taken].position)) {
      *candidate = bucket.late.front();
      std::pop_heap(bucket.late.begin(), bucket.late.end(), later_position);
      bucket.late.pop_back();
      return true;
    }
    if (has_ordered) {
      *candidate = bucket.ordered[bucket.taken++];
      return true;
    }
    bucket.queued = false;
    std::pop_heap(ranks_.begin(), ranks_.end(), std::greater<>());
    ranks_.pop_back();
  }
  return false;
}

}  // namespace replayeval
