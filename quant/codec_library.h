// A codec from a shared library (quant/codec_plugin.h): loading it, checking its version, calling
// it.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "quant/codec_plugin.h"
#include "quant/quantize.h"

namespace replayeval {

/// An open library. It stays open for the life of the process: other threads may still be inside it
/// when the last format goes.
class CodecLibrary {
 public:
  /// Throws std::invalid_argument beginning with `place`: file missing or not loadable, symbol
  /// missing, other version, incomplete table.
  CodecLibrary(const std::filesystem::path& path, const std::string& place);

  const ReplayevalCodec& codec() const { return *codec_; }
  const std::string& path() const { return path_; }
  /// SHA-256 of the library file when it was loaded.
  const std::string& sha256() const { return sha256_; }

 private:
  const ReplayevalCodec* codec_ = nullptr;
  std::string path_;
  std::string sha256_;
};

/// encode_head for a library codec: draws the random words of the key and calls the library. Throws
/// std::runtime_error when it reports a failure.
void encode_library(const CodecLibrary& library, Rounding rounding, StateShape shape,
                    const float* state, const RandomKey& key, std::byte* packed, std::byte* memory,
                    EncodeHealth* health);
void decode_library(const CodecLibrary& library, StateShape shape, const std::byte* packed,
                    float* state);

}  // namespace replayeval
