#include "models/random_checkpoint.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "kernels/dense.h"
#include "models/safetensors.h"

namespace replayeval {
namespace {

/// How the values of a tensor are drawn.
enum class Fill : uint8_t { matrix, zeros, ones, log_decay, dt_bias };

struct RandomTensor {
  TensorHeader header;
  Fill fill = Fill::matrix;
};

struct RandomModel {
  nlohmann::json config;
  std::vector<RandomTensor> tensors;

  void matrix(const std::string& name, std::vector<int64_t> shape) {
    tensors.push_back({{name, TensorType::bf16, std::move(shape)}, Fill::matrix});
  }
  void vector(const std::string& name, int64_t size, Fill fill,
              TensorType type = TensorType::bf16) {
    tensors.push_back({{name, type, {size}}, fill});
  }
};

struct GdnSizes {
  int hidden, mlp, layers, heads, kv_heads, head_dim, key_heads, value_heads, linear_dim,
      vocabulary;
};

RandomModel gdn_model(const GdnSizes& s) {
  RandomModel m;
  m.config = {{"model_type", "qwen3_5_text"},
              {"hidden_size", s.hidden},
              {"intermediate_size", s.mlp},
              {"num_hidden_layers", s.layers},
              {"num_attention_heads", s.heads},
              {"num_key_value_heads", s.kv_heads},
              {"head_dim", s.head_dim},
              {"linear_num_key_heads", s.key_heads},
              {"linear_num_value_heads", s.value_heads},
              {"linear_key_head_dim", s.linear_dim},
              {"linear_value_head_dim", s.linear_dim},
              {"linear_conv_kernel_dim", 4},
              {"vocab_size", s.vocabulary},
              {"max_position_embeddings", 262144},
              {"rms_norm_eps", 1e-6},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"tie_word_embeddings", true},
              {"full_attention_interval", 4},
              {"rope_parameters",
               {{"rope_type", "default"}, {"rope_theta", 1e7}, {"partial_rotary_factor", 0.25}}}};
  m.matrix("model.embed_tokens.weight", {s.vocabulary, s.hidden});
  const int64_t key = int64_t{s.key_heads} * s.linear_dim,
                value = int64_t{s.value_heads} * s.linear_dim;
  for (int i = 0; i < s.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    m.vector(layer + "input_layernorm.weight", s.hidden, Fill::zeros);
    m.vector(layer + "post_attention_layernorm.weight", s.hidden, Fill::zeros);
    if ((i + 1) % 4 == 0) {
      const std::string a = layer + "self_attn.";
      m.matrix(a + "q_proj.weight", {2 * int64_t{s.heads} * s.head_dim, s.hidden});
      m.matrix(a + "k_proj.weight", {int64_t{s.kv_heads} * s.head_dim, s.hidden});
      m.matrix(a + "v_proj.weight", {int64_t{s.kv_heads} * s.head_dim, s.hidden});
      m.matrix(a + "o_proj.weight", {s.hidden, int64_t{s.heads} * s.head_dim});
      m.vector(a + "q_norm.weight", s.head_dim, Fill::zeros);
      m.vector(a + "k_norm.weight", s.head_dim, Fill::zeros);
    } else {
      const std::string g = layer + "linear_attn.";
      m.matrix(g + "in_proj_qkv.weight", {2 * key + value, s.hidden});
      m.matrix(g + "in_proj_z.weight", {value, s.hidden});
      m.matrix(g + "in_proj_b.weight", {s.value_heads, s.hidden});
      m.matrix(g + "in_proj_a.weight", {s.value_heads, s.hidden});
      m.matrix(g + "conv1d.weight", {2 * key + value, 1, 4});
      m.vector(g + "A_log", s.value_heads, Fill::log_decay, TensorType::f32);
      m.vector(g + "dt_bias", s.value_heads, Fill::dt_bias, TensorType::f32);
      m.vector(g + "norm.weight", s.linear_dim, Fill::ones);
      m.matrix(g + "out_proj.weight", {s.hidden, value});
    }
    m.matrix(layer + "mlp.gate_proj.weight", {s.mlp, s.hidden});
    m.matrix(layer + "mlp.up_proj.weight", {s.mlp, s.hidden});
    m.matrix(layer + "mlp.down_proj.weight", {s.hidden, s.mlp});
  }
  m.vector("model.norm.weight", s.hidden, Fill::zeros);
  return m;
}

struct Mamba2ModelSizes {
  int hidden, mlp, heads, head_dim, groups, state_dim, q_heads, kv_heads, attention_dim, vocabulary;
  std::string pattern;  // M Mamba-2, * attention, - MLP
};

RandomModel mamba2_model(const Mamba2ModelSizes& s) {
  RandomModel m;
  m.config = {{"model_type", "nemotron_h"},
              {"hidden_size", s.hidden},
              {"intermediate_size", s.mlp},
              {"num_hidden_layers", static_cast<int>(s.pattern.size())},
              {"hybrid_override_pattern", s.pattern},
              {"mamba_num_heads", s.heads},
              {"mamba_head_dim", s.head_dim},
              {"n_groups", s.groups},
              {"ssm_state_size", s.state_dim},
              {"conv_kernel", 4},
              {"use_conv_bias", true},
              {"use_bias", false},
              {"mlp_bias", false},
              {"mlp_hidden_act", "relu2"},
              {"mamba_hidden_act", "silu"},
              {"num_attention_heads", s.q_heads},
              {"num_key_value_heads", s.kv_heads},
              {"head_dim", s.attention_dim},
              {"vocab_size", s.vocabulary},
              {"max_position_embeddings", 262144},
              {"layer_norm_epsilon", 1e-5},
              {"time_step_min", 0.001},
              {"tie_word_embeddings", false}};
  const int64_t inner = int64_t{s.heads} * s.head_dim, group = int64_t{s.groups} * s.state_dim;
  m.matrix("backbone.embeddings.weight", {s.vocabulary, s.hidden});
  for (size_t i = 0; i < s.pattern.size(); ++i) {
    const std::string layer = "backbone.layers." + std::to_string(i) + ".";
    const std::string x = layer + "mixer.";
    m.vector(layer + "norm.weight", s.hidden, Fill::ones);
    if (s.pattern[i] == 'M') {
      m.matrix(x + "in_proj.weight", {2 * inner + 2 * group + s.heads, s.hidden});
      m.matrix(x + "conv1d.weight", {inner + 2 * group, 1, 4});
      m.vector(x + "conv1d.bias", inner + 2 * group, Fill::zeros);
      m.vector(x + "A_log", s.heads, Fill::log_decay, TensorType::f32);
      m.vector(x + "D", s.heads, Fill::ones, TensorType::f32);
      m.vector(x + "dt_bias", s.heads, Fill::dt_bias, TensorType::f32);
      m.vector(x + "norm.weight", inner, Fill::ones);
      m.matrix(x + "out_proj.weight", {s.hidden, inner});
    } else if (s.pattern[i] == '*') {
      m.matrix(x + "q_proj.weight", {int64_t{s.q_heads} * s.attention_dim, s.hidden});
      m.matrix(x + "k_proj.weight", {int64_t{s.kv_heads} * s.attention_dim, s.hidden});
      m.matrix(x + "v_proj.weight", {int64_t{s.kv_heads} * s.attention_dim, s.hidden});
      m.matrix(x + "o_proj.weight", {s.hidden, int64_t{s.q_heads} * s.attention_dim});
    } else {
      m.matrix(x + "up_proj.weight", {s.mlp, s.hidden});
      m.matrix(x + "down_proj.weight", {s.hidden, s.mlp});
    }
  }
  m.vector("backbone.norm_f.weight", s.hidden, Fill::ones);
  m.matrix("lm_head.weight", {s.vocabulary, s.hidden});
  return m;
}

RandomModel random_model(const std::string& name) {
  if (name == "bench-gdn-4b") return gdn_model({2560, 9216, 32, 16, 4, 256, 16, 32, 128, 248320});
  // 0.2 billion weights, the vocabulary of the small models that ship: beyond a processor's caches.
  if (name == "bench-gdn-200m") return gdn_model({1024, 2816, 12, 8, 2, 128, 8, 16, 128, 4096});
  if (name == "bench-gdn-tiny") return gdn_model({64, 96, 4, 4, 2, 16, 2, 4, 16, 4096});
  // 42 blocks: 21 Mamba-2, 17 MLP, 4 attention.
  if (name == "bench-mamba2-4b")
    return mamba2_model({3136, 12544, 96, 80, 8, 128, 40, 8, 128, 131072,
                         "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM-M*-M-M-MM"});
  if (name == "bench-mamba2-tiny")
    return mamba2_model({64, 96, 8, 16, 2, 32, 4, 2, 16, 4096, "M-M*-M"});
  std::string known;
  for (const std::string& candidate : random_checkpoint_names()) known += " " + candidate;
  throw std::invalid_argument("random checkpoint: unknown name '" + name + "'; known:" + known);
}

/// SplitMix64.
struct Random {
  uint64_t state;
  uint64_t next() {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
};

void fill_tensor(const RandomTensor& tensor, Random& random, SafetensorsWriter& writer) {
  int64_t count = 1;
  for (int64_t d : tensor.header.shape) count *= d;
  if (tensor.fill != Fill::matrix) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) {
      switch (tensor.fill) {
        case Fill::ones:
          v = 1.0f;
          break;
        case Fill::log_decay:
          v = static_cast<float>(std::log(1.0 + 15.0 * random.uniform()));
          break;               // A in -1 .. -16
        case Fill::dt_bias: {  // softplus^-1 of a step between 0.001 and 0.1
          const double step = std::exp(std::log(0.001) + random.uniform() * std::log(100.0));
          v = static_cast<float>(step + std::log(-std::expm1(-step)));
          break;
        }
        default:
          v = 0.0f;
      }
    }
    if (tensor.header.type == TensorType::f32) {
      writer.append(std::as_bytes(std::span(values)));
    } else {
      std::vector<uint16_t> codes(values.size());
      narrow(values.data(), count, WeightType::bf16, codes.data());
      writer.append(std::as_bytes(std::span(codes)));
    }
    return;
  }
  // Uniform 16-bit integers, widened once to a table of BF16 codes of the tensor's range.
  int64_t in = tensor.header.shape.back();
  const double limit = std::sqrt(3.0 / static_cast<double>(in));
  std::vector<float> range(65536);
  for (int i = 0; i < 65536; ++i)
    range[static_cast<size_t>(i)] = static_cast<float>(limit * ((i + 0.5) / 32768.0 - 1.0));
  std::vector<uint16_t> table(range.size());
  narrow(range.data(), 65536, WeightType::bf16, table.data());
  std::vector<uint16_t> block(size_t{1} << 20);
  for (int64_t done = 0; done < count;) {
    const size_t size =
        static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(block.size()), count - done));
    for (size_t i = 0; i < size; i += 4) {
      const uint64_t bits = random.next();
      for (size_t j = 0; j < 4 && i + j < size; ++j)
        block[i + j] = table[(bits >> (16 * j)) & 0xFFFF];
    }
    writer.append(std::as_bytes(std::span(block.data(), size)));
    done += static_cast<int64_t>(size);
  }
}

}  // namespace

std::vector<std::string> random_checkpoint_names() {
  return {"bench-gdn-4b", "bench-mamba2-4b", "bench-gdn-200m", "bench-gdn-tiny",
          "bench-mamba2-tiny"};
}

void write_random_checkpoint(const std::string& name, const std::filesystem::path& folder,
                             uint64_t seed) {
  const RandomModel model = random_model(name);
  std::filesystem::create_directories(folder);
  std::vector<TensorHeader> headers;
  for (const RandomTensor& tensor : model.tensors) headers.push_back(tensor.header);
  SafetensorsWriter writer(folder / "model.safetensors", headers);
  Random random{seed};
  for (const RandomTensor& tensor : model.tensors) fill_tensor(tensor, random, writer);
  writer.finish();
  std::ofstream config(folder / "config.json");
  config << model.config.dump(2) << "\n";
  if (!config.flush())
    throw std::runtime_error((folder / "config.json").string() + ": cannot be written");
}

}  // namespace replayeval
