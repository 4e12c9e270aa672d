// `replayeval check quant`: codes of the codecs against stored answers of other implementations,
// bit for bit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace replayeval {

/// One group of stored answers.
struct QuantCheckRow {
  std::string what;  // "e4m3fn encode_satfinite"
  int64_t compared = 0;
  int64_t equal = 0;
  std::string worst;  // index, input, expected and got of the mismatch that lies furthest apart;
                      // empty when none
  std::string note;   // why nothing was compared, where compared is 0
};

/// Reads an HDF5 file of vectors and compares everything in it that is known; the layouts are those
/// of:
///   float formats    GROUP/{input, decode, encode_satfinite, encode_overflow}; e8m0
///   encode_{toward_zero, upward, nearest} stochastic       GROUP/{input, random, encode_satfinite,
///   encode_overflow}, attribute random_bits philox           seed, offset, philox4x32_{10, 7, 4}
///   nvfp4            CASE/x and CASE/{te, vllm, modelopt, te_4over6_*}/{codes, scales, global_*}
///   scale per row    CASE/x and CASE/{int8, int16, e4m3}/{codes, decode_scale}
/// Throws std::runtime_error when the file cannot be read, std::invalid_argument when it holds none
/// of these.
std::vector<QuantCheckRow> check_quant_results(const std::filesystem::path& file);

/// Prints one line a group, and the worst element where something differs; returns 0 when all are
/// equal, otherwise 1.
int check_quant(const std::filesystem::path& file);

}  // namespace replayeval
