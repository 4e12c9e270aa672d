#include "quant/codec_library.h"

#include <dlfcn.h>

#include <stdexcept>
#include <vector>

#include "base/hash.h"
#include "quant/quantize_core.h"

namespace replayeval {
namespace {

ReplayevalCodecShape plugin_shape(StateShape shape) { return {shape.head_dim, shape.state_dim}; }

}  // namespace

CodecLibrary::CodecLibrary(const std::filesystem::path& path, const std::string& place)
    : path_(std::filesystem::absolute(path).string()) {
  if (!std::filesystem::is_regular_file(path_)) {
    throw std::invalid_argument(
        place + ": library '" + path.string() +
        "' does not exist; expected a shared library built against quant/codec_plugin.h");
  }
  sha256_ = sha256_file(path_);
  void* handle = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw std::invalid_argument(place + ": library '" + path.string() +
                                "' cannot be loaded: " + (reason ? reason : "unknown reason"));
  }
  auto function = reinterpret_cast<ReplayevalCodecFunction>(dlsym(handle, REPLAYEVAL_CODEC_SYMBOL));
  if (function == nullptr) {
    throw std::invalid_argument(place + ": library '" + path.string() +
                                "' does not export " REPLAYEVAL_CODEC_SYMBOL
                                "; see quant/codec_plugin.h");
  }
  codec_ = function();
  if (codec_ == nullptr || codec_->version != REPLAYEVAL_CODEC_VERSION) {
    throw std::invalid_argument(
        place + ": library '" + path.string() + "' has interface version " +
        (codec_ == nullptr ? std::string("none") : std::to_string(codec_->version)) +
        ", expected " + std::to_string(REPLAYEVAL_CODEC_VERSION) +
        "; rebuild it with this program's quant/codec_plugin.h");
  }
  if (codec_->name == nullptr || codec_->bits_per_element == nullptr ||
      codec_->packed_bytes == nullptr || codec_->memory_bytes == nullptr ||
      codec_->encode == nullptr || codec_->decode == nullptr) {
    throw std::invalid_argument(
        place + ": library '" + path.string() +
        "' leaves a function of its table empty; expected all but check_shape");
  }
}

void encode_library(const CodecLibrary& library, Rounding rounding, StateShape shape,
                    const float* state, const RandomKey& key, std::byte* packed, std::byte* memory,
                    EncodeHealth* health) {
  std::vector<uint32_t> random;
  if (rounding == Rounding::stochastic) {
    random.resize(static_cast<size_t>(shape.elements()));
    PhiloxKey philox = philox_key(key);
    for (int r = 0; r < shape.head_dim; ++r) {
      for (int c = 0; c < shape.state_dim; ++c) {
        random[static_cast<size_t>(r) * shape.state_dim + c] = random_word(philox, r, c);
      }
    }
  }
  ReplayevalCodecCall call{plugin_shape(shape),
                           key.layer,
                           key.head,
                           key.position,
                           static_cast<uint32_t>(key.role),
                           random.empty() ? nullptr : random.data()};
  ReplayevalCodecCounts counts{};
  int status = library.codec().encode(&call, state, reinterpret_cast<unsigned char*>(packed),
                                      reinterpret_cast<unsigned char*>(memory), &counts);
  if (status != 0) {
    throw std::runtime_error(library.path() + ": encode of codec '" + library.codec().name +
                             "' failed with status " + std::to_string(status) + " at layer " +
                             std::to_string(key.layer) + ", head " + std::to_string(key.head) +
                             ", position " + std::to_string(key.position));
  }
  health->saturated += counts.saturated;
  health->clipped += counts.clipped;
  health->vanished += counts.vanished;
}

void decode_library(const CodecLibrary& library, StateShape shape, const std::byte* packed,
                    float* state) {
  int status = library.codec().decode(plugin_shape(shape),
                                      reinterpret_cast<const unsigned char*>(packed), state);
  if (status != 0) {
    throw std::runtime_error(library.path() + ": decode of codec '" + library.codec().name +
                             "' failed with status " + std::to_string(status));
  }
}

}  // namespace replayeval
