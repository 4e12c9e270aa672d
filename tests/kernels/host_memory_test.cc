// Memory of the host: blocks that are handed out again never overlap.
#include "kernels/host_memory.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace replayeval {
namespace {

struct Block {
  std::byte* memory = nullptr;
  size_t bytes = 0;
  int mark = 0;
  bool intact() const {
    for (size_t i = 0; i < bytes; ++i) {
      if (memory[i] != static_cast<std::byte>(mark)) return false;
    }
    return true;
  }
};

TEST_CASE("host memory: blocks are aligned, whole and their own") {
  std::mt19937 random(5);
  std::vector<Block> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (blocks.size() > 40) {
      const size_t at = random() % blocks.size();
      REQUIRE(blocks[at].intact());
      give_host_memory(blocks[at].memory, blocks[at].bytes);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(at));
    }
    // Around the limits of classes too: powers of two and their neighbours.
    size_t bytes = random() % 60000;
    if (i % 3 == 0) bytes = (size_t{1} << (random() % 18)) + random() % 3 - 1;
    if (i % 500 == 0) bytes = (size_t{8} << 20) + random() % 2;
    Block block{take_host_memory(bytes), bytes, i % 251};
    REQUIRE(reinterpret_cast<uintptr_t>(block.memory) % 64 == 0);
    if (bytes > 0) std::memset(block.memory, block.mark, bytes);
    blocks.push_back(block);
  }
  for (const Block& block : blocks) {
    REQUIRE(block.intact());
    give_host_memory(block.memory, block.bytes);
  }
  give_host_memory(nullptr, 5000);
}

}  // namespace
}  // namespace replayeval
