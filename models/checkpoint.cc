#include "models/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "base/hash.h"
#include "quant/codec.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

constexpr size_t kHashWhole = size_t{64} << 20;
constexpr size_t kHashStep = size_t{64} << 20;
constexpr size_t kHashBlock = size_t{1} << 20;
constexpr size_t kHashEnds = 4096;
constexpr int64_t kDefaultBlock = 128;
constexpr int64_t kNvfp4Block = 16;

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// SHA-256 of the pieces' own hashes, so that long pieces need no common buffer.
class PieceHash {
 public:
  void add(std::string_view bytes) { hashes_ += sha256_hex(bytes); }
  std::string hex() const { return sha256_hex(hashes_); }

 private:
  std::string hashes_;
};

std::string_view name_of(WeightType type) {
  return type == WeightType::fp32 ? "FP32" : type == WeightType::bf16 ? "BF16" : "FP16";
}

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// "N-bit KIND" of one entry of compressed-tensors' or ModelOpt's config_groups; empty when it is
/// null.
std::string group_type(const Config& config, const std::string& field) {
  if (!config.has(field)) return {};
  std::string text = std::to_string(config.integer(field + ".num_bits", 0)) + "-bit " +
                     config.text(field + ".type", "value");
  if (config.has(field + ".dynamic")) {
    // compressed-tensors writes true, false or "local".
    const bool dynamic = [&] {
      try {
        return config.boolean(field + ".dynamic");
      } catch (const std::invalid_argument&) {
        return true;
      }
    }();
    text += dynamic ? ", dynamic" : ", static";
  }
  return text;
}

std::optional<DeclaredQuantization> declared_quantization(const Config& config,
                                                          const std::string& root) {
  if (!root.empty() && !config.has(root)) return std::nullopt;
  const std::string prefix = root.empty() ? "" : root + ".";
  DeclaredQuantization out;
  std::string algorithm = config.text(prefix + "quant_algo", "");
  out.method = config.text(prefix + "quant_method", algorithm.empty() ? "" : "modelopt");
  static const std::set<std::string> kKnown = {"fp8", "modelopt", "compressed-tensors"};
  if (!kKnown.contains(out.method)) {
    config.fail(prefix + "quant_method", "fp8, modelopt or compressed-tensors");
  }
  if (out.method == "fp8") {
    out.activations = "FP8 E4M3, " + config.text(prefix + "activation_scheme", "dynamic");
    return out;
  }
  for (const std::string& group : config.members(prefix + "config_groups")) {
    const std::string type =
        group_type(config, prefix + "config_groups." + group + ".input_activations");
    if (!type.empty() && out.activations.find(type) == std::string::npos) {
      out.activations += (out.activations.empty() ? "" : "; ") + type;
    }
  }
  if (!algorithm.empty()) {
    out.method += " " + algorithm;
    if (out.activations.empty()) {
      if (algorithm == "FP8") out.activations = "FP8 E4M3, static";
      if (algorithm == "NVFP4") out.activations = "NVFP4";
      if (algorithm == "MIXED_PRECISION") out.activations = "a type of its own in each layer";
    }
  }
  return out;
}

}  // namespace

struct Checkpoint::Implementation {
  fs::path folder;
  Config config;
  Safetensors tensors;
  WeightType dequantized;
  WeightAccess access;
  std::optional<DeclaredQuantization> quantization;

  mutable std::once_flag hash_once;
  mutable std::string hash;

  /// Matrices that had to be copied, by tensor name and rows.
  struct Owned {
    std::unique_ptr<std::byte[]> memory;
    WeightView view;
  };
  mutable std::mutex mutex;
  mutable std::map<std::pair<std::string, std::vector<int32_t>>, Owned> owned;
  mutable std::mutex asked_mutex{};
  mutable std::set<std::string, std::less<>> asked{};  // names of tensors

  [[noreturn]] void fail(const TensorInfo& tensor, const std::string& what) const {
    throw std::runtime_error(tensors.shards()[static_cast<size_t>(tensor.shard)].path.string() +
                             ": tensor " + tensor.name + ": " + what);
  }

  [[noreturn]] void missing(std::string_view name, const std::string& expected) const {
    throw std::runtime_error(folder.string() + ": tensor " + std::string(name) + ": expected " +
                             expected + ", got nothing");
  }

  const TensorInfo& tensor(std::string_view name, std::span<const int64_t> shape) const {
    const TensorInfo* found = tensors.find(name);
    if (found == nullptr) {
      const TensorInfo* packed = tensors.find(std::string(name) + "_packed");
      if (packed != nullptr)
        fail(*packed, "expected " + std::string(name) + ", got a packed layout that is not read");
      missing(name, "shape " + shape_text(shape));
    }
    const std::lock_guard lock(asked_mutex);
    asked.emplace(name);
    return *found;
  }

  void check_shape(const TensorInfo& tensor, std::span<const int64_t> shape) const {
    if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
      fail(tensor, "expected shape " + shape_text(shape) + ", got " + shape_text(tensor.shape));
    }
  }

  Owned allocate(int64_t rows, int64_t cols, WeightType type) const {
    Owned out;
    out.memory = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(rows * cols * weight_bytes(type)));
    out.view = {out.memory.get(), type, rows, cols, cols};
    return out;
  }

  /// Scales of an FP8 matrix as one factor for each block_rows x block_cols block of each expert.
  struct BlockScales {
    std::vector<float> values;  // [experts, ceil(rows / block_rows), ceil(cols / block_cols)]
    int64_t block_rows = 0, block_cols = 0;
  };

  BlockScales fp8_scales(const TensorInfo& tensor, int64_t experts, int64_t rows,
                         int64_t cols) const {
    const TensorInfo* scale = tensors.find(tensor.name + "_scale_inv");
    if (scale == nullptr) scale = tensors.find(tensor.name + "_scale");
    if (scale == nullptr) {
      missing(tensor.name + "_scale_inv",
              "a scale of the F8_E4M3 tensor " + tensor.name + " (or " + tensor.name + "_scale)");
    }
    if (scale->type != TensorType::f32 && scale->type != TensorType::bf16 &&
        scale->type != TensorType::f16) {
      fail(*scale, "expected F32, BF16 or F16, got " + scale->type_name);
    }
    BlockScales out;
    out.values = read_floats(*scale);
    const auto count = static_cast<int64_t>(out.values.size());
    std::vector<int64_t> trimmed = scale->shape;  // [n, 1] and [n, 1, 1] are [n]
    while (!trimmed.empty() && trimmed.back() == 1) trimmed.pop_back();
    if (count == 1 || (experts > 1 && trimmed == std::vector<int64_t>{experts})) {
      if (count == 1) out.values.assign(static_cast<size_t>(experts), out.values[0]);
      out.block_rows = rows;
      out.block_cols = cols;
      return out;
    }
    std::vector<int64_t> row_shape = {rows};
    if (experts > 1) row_shape = {experts, rows};
    if (trimmed == row_shape) {
      out.block_rows = 1;
      out.block_cols = cols;
      return out;
    }
    out.block_rows = out.block_cols = kDefaultBlock;
    if (config.has("quantization_config.weight_block_size")) {
      const std::vector<int64_t> size = config.integers("quantization_config.weight_block_size");
      if (size.size() != 2 || size[0] < 1 || size[1] < 1) {
        config.fail("quantization_config.weight_block_size", "two sizes of at least 1");
      }
      out.block_rows = size[0];
      out.block_cols = size[1];
    }
    std::vector<int64_t> expected = {ceil_divide(rows, out.block_rows),
                                     ceil_divide(cols, out.block_cols)};
    if (tensor.shape.size() > 2) expected.insert(expected.begin(), experts);
    if (scale->shape != expected) {
      fail(*scale, "expected one scale, one a row (" + std::to_string(rows) + ") or blocks of " +
                       std::to_string(out.block_rows) + " x " + std::to_string(out.block_cols) +
                       " (" + shape_text(expected) + ") for " + shape_text(tensor.shape) +
                       ", got " + shape_text(scale->shape));
    }
    return out;
  }

  /// Rows of FP32 values from `decode_row(row, out)`, rounded to the type asked for.
  template <class DecodeRow>
  Owned dequantize(int64_t rows, int64_t cols, const DecodeRow& decode_row) const {
    Owned out = allocate(rows, cols, dequantized);
    std::byte* const memory = out.memory.get();
    const int64_t row_bytes = cols * weight_bytes(dequantized);
#pragma omp parallel
    {
      std::vector<float> row(static_cast<size_t>(cols));
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; ++r) {
        decode_row(r, row.data());
        narrow(row.data(), cols, dequantized, memory + r * row_bytes);
      }
    }
    return out;
  }

  Owned dequantize_fp8(const TensorInfo& tensor, int64_t experts, int64_t rows,
                       int64_t cols) const {
    const BlockScales scales = fp8_scales(tensor, experts, rows, cols);
    const int64_t row_blocks = ceil_divide(rows, scales.block_rows);
    const int64_t col_blocks = ceil_divide(cols, scales.block_cols);
    return dequantize(experts * rows, cols, [&](int64_t r, float* out) {
      widen_to_floats(TensorType::f8_e4m3, tensor.data + r * cols, cols, out);
      const float* scale = scales.values.data() +
                           (r / rows * row_blocks + r % rows / scales.block_rows) * col_blocks;
      for (int64_t c = 0; c < cols; ++c) out[c] *= scale[c / scales.block_cols];
    });
  }

  Owned dequantize_nvfp4(const TensorInfo& tensor, int64_t experts, int64_t rows,
                         int64_t cols) const {
    std::vector<int64_t> scale_shape = tensor.shape;
    scale_shape.back() = cols / kNvfp4Block;
    const TensorInfo& scale = this->tensor(tensor.name + "_scale", scale_shape);
    check_shape(scale, scale_shape);
    if (scale.type != TensorType::f8_e4m3) fail(scale, "expected F8_E4M3, got " + scale.type_name);
    const TensorInfo* global = tensors.find(tensor.name + "_scale_2");
    if (global == nullptr) missing(tensor.name + "_scale_2", "the FP32 scale of " + tensor.name);
    if (global->type != TensorType::f32) fail(*global, "expected F32, got " + global->type_name);
    std::vector<float> globals = read_floats(*global);
    if (globals.size() == 1) globals.resize(static_cast<size_t>(experts), globals[0]);
    if (static_cast<int64_t>(globals.size()) != experts) {
      fail(*global, "expected one scale" +
                        (experts > 1 ? " or " + std::to_string(experts) : std::string()) +
                        ", got " + shape_text(global->shape));
    }
    const int64_t blocks = cols / kNvfp4Block;
    return dequantize(experts * rows, cols, [&](int64_t r, float* out) {
      const std::byte* codes = tensor.data + r * (cols / 2);
      for (int64_t b = 0; b < blocks; ++b) {
        float block_scale = 0;
        widen_to_floats(TensorType::f8_e4m3, scale.data + r * blocks + b, 1, &block_scale);
        const float factor = block_scale * globals[static_cast<size_t>(r / rows)];
        for (int64_t i = b * kNvfp4Block; i < (b + 1) * kNvfp4Block; i += 2) {
          const auto pair = std::to_integer<unsigned>(codes[i / 2]);
          out[i] = decode_float(kE2m1, pair & 15) * factor;
          out[i + 1] = decode_float(kE2m1, pair >> 4) * factor;
        }
      }
    });
  }

  /// Throws unless the tensor holds a matrix of this shape in a type that can be read.
  void check_matrix(const TensorInfo& found, std::span<const int64_t> shape) const {
    if (shape.size() < 2) throw std::logic_error(found.name + ": a matrix has two dimensions");
    switch (found.type) {
      case TensorType::f32:
      case TensorType::bf16:
      case TensorType::f16:
      case TensorType::f8_e4m3:
        return check_shape(found, shape);
      case TensorType::u8: {
        if (shape.back() % kNvfp4Block != 0) {
          fail(found,
               "expected a multiple of 16 columns for NVFP4, got shape " + shape_text(shape));
        }
        std::vector<int64_t> packed(shape.begin(), shape.end());
        packed.back() /= 2;
        if (found.shape != packed) {
          fail(found, "expected shape " + shape_text(packed) + " (two NVFP4 codes a byte of " +
                          shape_text(shape) + "), got " + shape_text(found.shape));
        }
        return;
      }
      default:
        fail(found, "expected F32, BF16, F16, F8_E4M3 or U8 (NVFP4), got " + found.type_name);
    }
  }

  /// Rows, columns and type of the matrix of a tensor that check_matrix accepted, without data.
  WeightView form_of(const TensorInfo& found, std::span<const int64_t> shape) const {
    const WeightType type = found.type == TensorType::f32    ? WeightType::fp32
                            : found.type == TensorType::bf16 ? WeightType::bf16
                            : found.type == TensorType::f16  ? WeightType::fp16
                                                             : dequantized;
    const int64_t rows =
        std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>());
    return {nullptr, type, rows, shape.back(), shape.back()};
  }

  /// The matrix itself: a view of the file, or with memory of its own when it had to be
  /// dequantized.
  Owned read_matrix(const TensorInfo& found, std::span<const int64_t> shape) const {
    Owned out;
    if (found.type == TensorType::f8_e4m3 || found.type == TensorType::u8) {
      const int64_t rows = shape[shape.size() - 2];
      const int64_t experts =
          std::accumulate(shape.begin(), shape.end() - 2, int64_t{1}, std::multiplies<>());
      out = found.type == TensorType::u8 ? dequantize_nvfp4(found, experts, rows, shape.back())
                                         : dequantize_fp8(found, experts, rows, shape.back());
      tensors.drop_pages(found);
    } else {
      out.view = form_of(found, shape);
      out.view.data = found.data;
    }
    return out;
  }

  WeightView weight(std::string_view name, std::span<const int64_t> shape) const {
    const TensorInfo& found = tensor(name, shape);
    check_matrix(found, shape);
    if (access == WeightAccess::headers) return form_of(found, shape);
    const std::lock_guard lock(mutex);
    const std::pair key{std::string(name), std::vector<int32_t>{}};
    const auto at = owned.find(key);
    if (at != owned.end()) return at->second.view;
    Owned out = read_matrix(found, shape);
    const WeightView view = out.view;
    if (out.memory) owned.emplace(key, std::move(out));
    return view;
  }

  std::vector<WeightView> split_rows(std::string_view name, std::span<const int64_t> shape,
                                     std::span<const std::vector<int32_t>> parts) const {
    const TensorInfo& found = tensor(name, shape);
    check_matrix(found, shape);
    const std::lock_guard lock(mutex);
    std::vector<WeightView> out;
    if (access == WeightAccess::headers) {
      for (const std::vector<int32_t>& rows : parts) {
        out.push_back(form_of(found, shape));
        out.back().rows = static_cast<int64_t>(rows.size());
      }
      return out;
    }
    Owned source;  // read when a part is missing, and left again at the end
    for (const std::vector<int32_t>& rows : parts) {
      std::pair key{std::string(name), rows};
      const auto at = owned.find(key);
      if (at != owned.end()) {
        out.push_back(at->second.view);
        continue;
      }
      if (source.view.data == nullptr) source = read_matrix(found, shape);
      const WeightView& from = source.view;
      Owned copy = allocate(static_cast<int64_t>(rows.size()), from.cols, from.type);
      const auto row_bytes = static_cast<size_t>(from.cols * weight_bytes(from.type));
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < 0 || rows[i] >= from.rows) {
          throw std::logic_error("split_rows: row " + std::to_string(rows[i]) + " of " + key.first +
                                 ", which has " + std::to_string(from.rows));
        }
        std::memcpy(
            copy.memory.get() + i * row_bytes,
            static_cast<const std::byte*>(from.data) + static_cast<size_t>(rows[i]) * row_bytes,
            row_bytes);
      }
      out.push_back(copy.view);
      owned.emplace(std::move(key), std::move(copy));
    }
    tensors.drop_pages(found);
    return out;
  }

  std::string compute_hash() const {
    PieceHash hash;
    hash.add(config.source());
    std::vector<size_t> order(tensors.shards().size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return tensors.shards()[a].path.filename() < tensors.shards()[b].path.filename();
    });
    for (size_t s : order) {
      const Shard& shard = tensors.shards()[s];
      const size_t size = shard.file.size();
      hash.add(std::to_string(size));
      if (size <= kHashWhole) {
        hash.add(text_of(shard.file));
        continue;
      }
      hash.add(text_of(shard.header));
      for (size_t at = 0; at < size; at += kHashStep) {
        hash.add(text_of(shard.file.subspan(at, std::min(kHashBlock, size - at))));
      }
      hash.add(text_of(shard.file.last(kHashBlock)));
      for (const TensorInfo& tensor : tensors.tensors()) {
        if (tensor.shard != static_cast<int>(s)) continue;
        const std::span data(tensor.data, tensor.bytes);
        hash.add(text_of(data.first(std::min(kHashEnds, data.size()))));
        hash.add(text_of(data.last(std::min(kHashEnds, data.size()))));
      }
    }
    return hash.hex();
  }
};

Checkpoint::Checkpoint(std::unique_ptr<Implementation> implementation)
    : implementation_(std::move(implementation)) {}
Checkpoint::~Checkpoint() = default;

std::shared_ptr<const Checkpoint> Checkpoint::open(const fs::path& folder, WeightType dequantized,
                                                   WeightAccess access) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw std::runtime_error(folder.string() +
                             ": expected a model folder with config.json and "
                             "model.safetensors, got " +
                             (fs::exists(folder, error) ? "a file" : "nothing"));
  }
  Config config = Config::load(folder);
  std::optional<DeclaredQuantization> quantization =
      declared_quantization(config, "quantization_config");
  const fs::path modelopt = folder / "hf_quant_config.json";
  if (!quantization && fs::exists(modelopt, error)) {
    quantization = declared_quantization(Config::load(modelopt), "quantization");
  }
  std::unique_ptr<Implementation> implementation(new Implementation{folder,
                                                                    std::move(config),
                                                                    Safetensors::open(folder),
                                                                    dequantized,
                                                                    access,
                                                                    std::move(quantization),
                                                                    {},
                                                                    {},
                                                                    {},
                                                                    {}});
  return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(implementation)));
}

const fs::path& Checkpoint::folder() const { return implementation_->folder; }
const Config& Checkpoint::config() const { return implementation_->config; }
const Safetensors& Checkpoint::tensors() const { return implementation_->tensors; }
const std::optional<DeclaredQuantization>& Checkpoint::quantization() const {
  return implementation_->quantization;
}

const std::string& Checkpoint::hash() const {
  std::call_once(implementation_->hash_once,
                 [&] { implementation_->hash = implementation_->compute_hash(); });
  return implementation_->hash;
}

bool Checkpoint::has(std::string_view name) const { return tensors().find(name) != nullptr; }

std::string Checkpoint::first_of(std::initializer_list<std::string> names) const {
  std::string all;
  for (const std::string& name : names) {
    if (has(name)) return name;
    all += (all.empty() ? "" : " or ") + name;
  }
  throw std::runtime_error(folder().string() + ": expected a tensor " + all + ", got " +
                           std::to_string(tensors().tensors().size()) + " tensors without it");
}

WeightView Checkpoint::weight(std::string_view name, std::span<const int64_t> shape) const {
  return implementation_->weight(name, shape);
}

WeightView Checkpoint::weight(std::string_view name, std::initializer_list<int64_t> shape) const {
  return weight(name, std::span<const int64_t>(shape.begin(), shape.size()));
}

std::vector<WeightView> Checkpoint::split_rows(std::string_view name,
                                               std::initializer_list<int64_t> shape,
                                               std::span<const std::vector<int32_t>> parts) const {
  return implementation_->split_rows(name, {shape.begin(), shape.size()}, parts);
}

std::vector<WeightView> Checkpoint::split_rows(
    std::string_view name, std::initializer_list<int64_t> shape,
    std::initializer_list<std::vector<int32_t>> parts) const {
  return split_rows(name, shape, std::span(parts.begin(), parts.size()));
}

std::vector<float> Checkpoint::values(std::string_view name,
                                      std::initializer_list<int64_t> shape) const {
  const std::span<const int64_t> expected(shape.begin(), shape.size());
  const TensorInfo& found = implementation_->tensor(name, expected);
  implementation_->check_shape(found, expected);
  switch (found.type) {
    case TensorType::f64:
    case TensorType::f32:
    case TensorType::bf16:
    case TensorType::f16:
      if (implementation_->access == WeightAccess::headers) {
        return std::vector<float>(static_cast<size_t>(found.elements()));
      }
      return read_floats(found);
    default:
      implementation_->fail(found, "expected F32, BF16 or F16, got " + found.type_name);
  }
}

WeightView Checkpoint::lm_head(std::string_view embedding, int64_t vocabulary,
                               int64_t hidden) const {
  if (has("lm_head.weight")) return weight("lm_head.weight", {vocabulary, hidden});
  if (!config().boolean("tie_word_embeddings", true)) {
    throw std::runtime_error(
        folder().string() + ": tensor lm_head.weight: expected shape " +
        shape_text(std::vector<int64_t>{vocabulary, hidden}) +
        ", got nothing; and tie_word_embeddings: false in config.json says that " +
        std::string(embedding) + " does not stand in for it");
  }
  return weight(embedding, {vocabulary, hidden});
}

std::vector<std::string> Checkpoint::unread() const {
  const std::lock_guard lock(implementation_->asked_mutex);
  // Scales stand beside what they belong to; those of activations and caches are not used here.
  const auto is_scale = [](std::string_view name) {
    return name.ends_with("_scale") || name.ends_with("_scale_inv") || name.ends_with("_scale_2");
  };
  // Parts beside the language model, and what follows from the config.
  const auto is_beside = [](std::string_view name) {
    return name.starts_with("mtp.") || name.find(".mtp.") != std::string_view::npos ||
           name.starts_with("visual.") || name.find(".visual.") != std::string_view::npos ||
           name.ends_with("rotary_emb.inv_freq");
  };
  std::vector<std::string> names;
  for (const TensorInfo& tensor : tensors().tensors()) {
    if (!implementation_->asked.contains(tensor.name) && !is_scale(tensor.name) &&
        !is_beside(tensor.name)) {
      names.push_back(tensor.name);
    }
  }
  return names;
}

std::vector<std::string> Checkpoint::notes() const {
  if (!quantization()) return {};
  std::vector<std::string> out = {"weights quantized (" + quantization()->method +
                                  ") were dequantized at load to " +
                                  std::string(name_of(implementation_->dequantized))};
  if (!quantization()->activations.empty()) {
    out.push_back("the checkpoint declares quantized activations (" + quantization()->activations +
                  "); the run did not quantize them");
  }
  return out;
}

}  // namespace replayeval
