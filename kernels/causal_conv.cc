// Checks, blocking and the FP64 reference of the causal convolution (kernels/causal_conv.h).
#include "kernels/causal_conv.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/causal_conv_simd.h"

namespace replayeval {
namespace {

// A block of 16 tokens by 256 channels and its K - 1 predecessors fit into the first-level cache.
constexpr int kTokenBlock = 16;
constexpr int kChannelBlock = 256;

void check(const CausalConv& conv, std::span<const CausalConvRow> rows) {
  const auto refuse = [](const std::string& message) {
    throw std::invalid_argument("causal_conv: " + message);
  };
  if (conv.channels < 1 || conv.taps < 1) {
    refuse("channels " + std::to_string(conv.channels) + ", taps " + std::to_string(conv.taps) +
           ", expected at least 1 each");
  }
  if (!conv.weight) refuse("weight is null, expected [channels, taps]");
  for (size_t r = 0; r < rows.size(); ++r) {
    const CausalConvRow& row = rows[r];
    const auto where = [r] { return "row " + std::to_string(r) + ": "; };
    if (row.tokens < 0) {
      refuse(where() + std::to_string(row.tokens) + " tokens, expected 0 or more");
    }
    if (row.tokens == 0) continue;
    if (!row.x || !row.y) refuse(where() + "x or y is null, expected inputs and room for outputs");
    if (row.x_stride < conv.channels || row.y_stride < conv.channels) {
      refuse(where() + "strides " + std::to_string(row.x_stride) + " and " +
             std::to_string(row.y_stride) + ", expected at least " + std::to_string(conv.channels) +
             " (channels)");
    }
  }
}

void reference(const CausalConv& conv, const CausalConvRow& row) {
  for (int t = 0; t < row.tokens; ++t) {
    for (int c = 0; c < conv.channels; ++c) {
      double sum = conv.bias ? conv.bias[c] : 0.0;
      for (int k = 0; k < conv.taps; ++k) {
        sum += static_cast<double>(conv.weight[int64_t{c} * conv.taps + k]) *
               row.x[(t - (conv.taps - 1) + k) * row.x_stride + c];
      }
      if (conv.silu) sum = sum / (1.0 + std::exp(-sum));
      row.y[t * row.y_stride + c] = static_cast<float>(sum);
    }
  }
}

}  // namespace

void causal_conv(const CausalConv& conv, std::span<const CausalConvRow> rows, KernelForm form) {
  check(conv, rows);
  if (form == KernelForm::reference) {
    for (const CausalConvRow& row : rows) reference(conv, row);
    return;
  }
  std::vector<float> weight(static_cast<size_t>(conv.channels) * static_cast<size_t>(conv.taps));
  for (int c = 0; c < conv.channels; ++c) {
    for (int k = 0; k < conv.taps; ++k) {
      weight[static_cast<size_t>(int64_t{k} * conv.channels + c)] =
          conv.weight[int64_t{c} * conv.taps + k];
    }
  }
  struct Item {
    size_t row;
    int token;
  };
  std::vector<Item> items;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int t = 0; t < rows[r].tokens; t += kTokenBlock) items.push_back({r, t});
  }
  const int64_t channel_blocks = (conv.channels + kChannelBlock - 1) / kChannelBlock;
  const int64_t count = static_cast<int64_t>(items.size()) * channel_blocks;
#pragma omp parallel for schedule(static) if (count > 8)
  for (int64_t i = 0; i < count; ++i) {
    const Item& item = items[static_cast<size_t>(i / channel_blocks)];
    const CausalConvRow& row = rows[item.row];
    CausalConvBlock block;
    block.first = static_cast<int>(i % channel_blocks) * kChannelBlock;
    block.end = std::min(block.first + kChannelBlock, conv.channels);
    block.tokens = std::min(kTokenBlock, row.tokens - item.token);
    block.channels = conv.channels;
    block.taps = conv.taps;
    block.weight = weight.data();
    block.bias = conv.bias;
    block.silu = conv.silu;
    block.x = row.x + item.token * row.x_stride;
    block.x_stride = row.x_stride;
    block.y = row.y + item.token * row.y_stride;
    block.y_stride = row.y_stride;
    REPLAYEVAL_SIMD_CALL(causal_conv_block)(block);
  }
}

}  // namespace replayeval
