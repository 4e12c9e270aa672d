// Byte-pair merging: applies merge rules to symbols, lowest rank first, leftmost first. Used by
// both tokenizer formats.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace replayeval {

/// Two adjacent symbols that may become one. Lower ranks go first; rules may share a rank.
struct MergeRule {
  int32_t left, right, result;
  uint32_t rank;
};

/// Hash table from a pair of symbols to a value: open addressing, a power of two of slots, at most
/// half full.
template <class Value>
class PairTable {
 public:
  explicit PairTable(size_t capacity) {
    size_t slots = 16;
    while (slots < 2 * capacity) slots *= 2;
    slots_.resize(slots);
  }
  /// Inserts, or replaces the value of the pair.
  void put(int32_t left, int32_t right, Value value) {
    slots_[slot(left, right)] = {left, right, value};
  }
  const Value* find(int32_t left, int32_t right) const {
    const Slot& s = slots_[slot(left, right)];
    return s.left < 0 ? nullptr : &s.value;
  }

 private:
  struct Slot {
    int32_t left = -1, right = -1;
    Value value{};
  };
  size_t slot(int32_t left, int32_t right) const {
    uint64_t hash =
        (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right));
    hash =
        (hash ^ hash >> 31) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio: multiplicative hashing
    size_t i = (hash >> 20) & (slots_.size() - 1);
    while (slots_[i].left >= 0 && (slots_[i].left != left || slots_[i].right != right)) {
      i = (i + 1) & (slots_.size() - 1);
    }
    return i;
  }
  std::vector<Slot> slots_;
};

/// Merge rules, and which pairs of initial symbols a merge can ever join. Symbols are numbers >= 0.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank;
    int32_t result;
  };
  /// A later rule for the same pair replaces an earlier one. A symbol that is no rule's result is
  /// an initial symbol; `also_initial` lists results that occur in the input as well. Throws
  /// std::runtime_error for rules that form a circle.
  MergeTable(std::span<const MergeRule> rules, const std::unordered_set<int32_t>& also_initial);

  const Merge* find(int32_t left, int32_t right) const { return merges_.find(left, right); }
  /// False: whatever stands around two adjacent initial symbols, no merge joins them.
  bool crossable(int32_t left, int32_t right) const {
    return crossable_.find(left, right) != nullptr;
  }

 private:
  PairTable<Merge> merges_;
  PairTable<char> crossable_;
};

/// Applies a MergeTable to a stream of initial symbols. The input is cut where no merge can cross;
/// merges on either side of a cut touch nothing on the other, so the result is that of merging the
/// whole word. Time n log n at worst.
class MergeStream {
 public:
  /// Merged symbols are appended to *out.
  MergeStream(const MergeTable& table, std::vector<int32_t>* out) : table_(&table), out_(out) {}

  /// Takes the next symbol of the current word. *out may lag behind.
  void push(int32_t symbol) {
    if (!segment_.empty() && !table_->crossable(segment_.back(), symbol)) flush();
    segment_.push_back(symbol);
  }
  /// Ends the word: no merge joins what comes before and after. *out is complete.
  void end_word() {
    if (!segment_.empty()) flush();
  }

 private:
  struct Node {
    int32_t symbol;  // -1: gone into its left neighbour
    uint32_t previous, next;
  };
  struct Candidate {
    uint32_t position;
    int32_t result;
  };
  // Candidates of one rank by position: those that arrived in order, and a heap of the late ones.
  struct Bucket {
    uint32_t rank = 0;
    bool queued = false;
    std::vector<Candidate> ordered;
    size_t taken = 0;
    std::vector<Candidate> late;
  };
  struct SymbolsHash {
    size_t operator()(const std::vector<int32_t>& symbols) const;
  };

  void flush();
  void merge_segment();
  void add_candidate(uint32_t position);
  bool take_candidate(Candidate* candidate);

  const MergeTable* table_;
  std::vector<int32_t>* out_;
  std::vector<int32_t> segment_;
  std::vector<Node> nodes_;
  std::vector<Bucket> buckets_;
  size_t buckets_used_ = 0;
  std::unordered_map<uint32_t, uint32_t> bucket_of_rank_;
  std::vector<std::pair<uint32_t, uint32_t>> ranks_;  // min-heap of (rank, bucket)
  std::unordered_map<std::vector<int32_t>, std::vector<int32_t>, SymbolsHash> cache_;
};

}  // namespace replayeval
