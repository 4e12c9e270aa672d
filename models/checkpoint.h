// A model folder as families see it: config.json and weights by name, with shapes checked,
// quantized weights dequantized at load, and one hash that identifies it. Weights stay in the
// mapped files; only what must change its layout is copied.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/dense.h"
#include "models/config.h"
#include "models/safetensors.h"

namespace replayeval {

/// What quantization_config (or hf_quant_config.json) declares.
struct DeclaredQuantization {
  std::string method;       // "fp8", "modelopt NVFP4", "compressed-tensors"
  std::string activations;  // "FP8 E4M3, dynamic"; empty: activations are not quantized
};

/// `headers`: no weight is read. Shapes and types are checked as ever, but matrices have no data
/// and values are zeros: enough to measure a model (`--dry-run`), not to run it.
enum class WeightAccess : uint8_t { data, headers };

class Checkpoint {
 public:
  /// Reads config.json and the headers of the weights in `folder`. Quantized weights will be
  /// dequantized to `dequantized` when they are asked for. Throws as Config::load and
  /// Safetensors::open do, and std::invalid_argument for a quantization method that is not read
  /// (known: fp8, modelopt, compressed-tensors).
  static std::shared_ptr<const Checkpoint> open(const std::filesystem::path& folder,
                                                WeightType dequantized = WeightType::fp32,
                                                WeightAccess access = WeightAccess::data);
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  const std::filesystem::path& folder() const;
  const Config& config() const;
  const Safetensors& tensors() const;

  /// Identifies the model: SHA-256 over config.json and, shard by shard in the order of their file
  /// names, the size, the header, and samples of the data: of a file up to 64 MiB everything; of a
  /// larger one 1 MiB at every multiple of 64 MiB and the last 1 MiB, and the first and last 4 KiB
  /// of every tensor. So a 16 GB model takes a second, and a change of any whole tensor is seen,
  /// though not of single elements in the middle. Computed on the first call; safe from several
  /// threads.
  const std::string& hash() const;

  bool has(std::string_view name) const;
  /// The first of the names that the checkpoint has. Throws std::runtime_error naming all when it
  /// has none.
  std::string first_of(std::initializer_list<std::string> names) const;

  /// The matrix [shape[0] * ... * shape[n-2], shape[n-1]] of a tensor of exactly this shape. F32,
  /// BF16 and F16 are views into the mapped file; quantized tensors are dequantized once into
  /// memory of the checkpoint:
  ///   F8_E4M3 with NAME_scale_inv or NAME_scale (F32, BF16 or F16; one for the tensor, the expert,
  ///   the row, or a block of weight_block_size, default 128 x 128):  w = code * scale U8 with
  ///   NAME_scale (F8_E4M3, one for 16 elements) and NAME_scale_2 (F32, one for the tensor or the
  ///   expert), two E2M1 codes a byte, element 2i in the low nibble (ModelOpt NVFP4):  w = code *
  ///   (scale * scale_2)
  /// The product is taken in FP32, then rounded to nearest to the type given to `open`.
  /// Throws std::runtime_error naming file, tensor, expected and got.
  WeightView weight(std::string_view name, std::span<const int64_t> shape) const;
  WeightView weight(std::string_view name, std::initializer_list<int64_t> shape) const;

  /// Matrices copied out of weight(name, shape) into memory of the checkpoint, row i of result p
  /// being row parts[p][i]: for layouts that interleave what the model reads apart. The same name
  /// and rows give the same memory.
  std::vector<WeightView> split_rows(std::string_view name, std::initializer_list<int64_t> shape,
                                     std::span<const std::vector<int32_t>> parts) const;
  std::vector<WeightView> split_rows(std::string_view name, std::initializer_list<int64_t> shape,
                                     std::initializer_list<std::vector<int32_t>> parts) const;

  /// A small tensor (F64, F32, BF16, F16) of exactly this shape as FP32, row-major.
  std::vector<float> values(std::string_view name, std::initializer_list<int64_t> shape) const;

  /// The output matrix [vocabulary, hidden]: lm_head.weight if the file has it, whatever the config
  /// says; otherwise the embedding matrix. Throws std::runtime_error naming both when it is absent
  /// and the config says tie_word_embeddings: false.
  WeightView lm_head(std::string_view embedding, int64_t vocabulary, int64_t hidden) const;

  /// Nothing when the config declares none.
  const std::optional<DeclaredQuantization>& quantization() const;
  /// Names of the tensors that nobody has asked for so far, without scales, image encoders,
  /// multi-token prediction and rotary frequencies.
  std::vector<std::string> unread() const;
  /// For the report: the declared quantization and the types used instead; empty without one.
  std::vector<std::string> notes() const;

 private:
  struct Implementation;
  explicit Checkpoint(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace replayeval
