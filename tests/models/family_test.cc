// Families: contradictory configs get one line with the field and both values; every spelling and
// layout of the same checkpoint gives the same logits, bit for bit. (Agreement with the
// transformers library: tests/harness/check_model_test.cc.)
#include "models/family.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "models/state_precision.h"
#include "models/state_store.h"
#include "tests/models/checkpoint_files.h"
#include "tests/support/case_file.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

const fs::path kMini = fs::path(REPLAYEVAL_SOURCE_DIR) / "models" / "mini-mamba2";
const fs::path kMiniGdn = fs::path(REPLAYEVAL_SOURCE_DIR) / "models" / "mini-gdn";

/// models-ref/NAME; empty (after a loud line) where it is not.
fs::path reference(const std::string& name) { return case_path("models-ref/" + name); }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE_MESSAGE(at != std::string::npos, from);
  return text.replace(at, from.size(), to);
}

/// A folder with another config and, through links, the weights of `base`.
struct Variant {
  TemporaryFolder folder;
  Variant(const fs::path& base, const std::string& config) {
    write_file(folder / "config.json", config);
    for (const auto& entry : fs::directory_iterator(base)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("model")) fs::create_symlink(fs::absolute(entry.path()), folder / name);
    }
  }
};

/// The message with which the model of a changed config is refused, without the folder's name.
std::string refused(const fs::path& base, const std::string& from, const std::string& to) {
  const Variant variant(base, replaced(read_file(base / "config.json"), from, to));
  std::string message = "nothing thrown";
  try {
    const auto checkpoint = Checkpoint::open(variant.folder.path());
    (void)find_family(*checkpoint).build(*checkpoint);
  } catch (const std::exception& e) {
    message = e.what();
  }
  CHECK_MESSAGE(message.find('\n') == std::string::npos, message);
  const std::string folder = variant.folder.path().string() + "/";
  return message.starts_with(folder) ? message.substr(folder.size()) : message;
}

struct Tensor {
  TensorHeader header;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

/// A copy of a checkpoint with other tensors and another config.
struct Rewritten {
  TemporaryFolder folder;
  Rewritten(const fs::path& base, const std::function<void(Tensors&)>& change,
            const std::string& config) {
    const Safetensors file = Safetensors::open(base);
    Tensors tensors;
    for (const TensorInfo& t : file.tensors()) {
      tensors[t.name] = {{t.name, t.type, t.shape},
                         std::string(reinterpret_cast<const char*>(t.data), t.bytes)};
    }
    change(tensors);
    std::vector<TensorSource> sources;
    for (auto& [name, tensor] : tensors) {
      tensor.header.name = name;
      sources.push_back({tensor.header, tensor.bytes.data()});
    }
    write_safetensors(folder / "model.safetensors", sources);
    write_file(folder / "config.json", config);
  }
};

void rename(Tensors& tensors, const std::string& from, const std::string& to) {
  Tensors out;
  for (auto& [name, tensor] : tensors) {
    const size_t at = name.find(from);
    out[at == std::string::npos ? name : std::string(name).replace(at, from.size(), to)] =
        std::move(tensor);
  }
  tensors = std::move(out);
}

/// Joins PREFIX + "experts.E." + part + ".weight" over E into PREFIX + "experts." + name, along a
/// new first dimension; several parts of an expert follow each other in rows.
void stack_experts(Tensors& tensors, const std::string& prefix, int experts,
                   const std::vector<std::string>& parts, const std::string& name) {
  Tensor out;
  for (int e = 0; e < experts; ++e) {
    int64_t rows = 0;
    for (const std::string& part : parts) {
      const auto at =
          tensors.find(prefix + "experts." + std::to_string(e) + "." + part + ".weight");
      REQUIRE(at != tensors.end());
      out.bytes += at->second.bytes;
      rows += at->second.header.shape[0];
      out.header = {"", at->second.header.type, {experts, rows, at->second.header.shape[1]}};
      tensors.erase(at);
    }
  }
  tensors[prefix + "experts." + name] = std::move(out);
}

/// Logits of 40 tokens in one FP32 row, in one call.
std::vector<float> logits_of(const fs::path& folder) {
  const Model model(Checkpoint::open(folder), {});
  const StatePrecision fp32 = parse_state_precision("fp32", {});
  StateSet states(model, {{fp32, 1u, 0, 0}}, fp32, KernelForm::fast);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 40; ++i) tokens.push_back(3 + i * 31 % 250);
  const std::vector<int> lengths = {40};
  const Hidden hidden = model.forward({tokens, lengths}, states);
  std::vector<float> logits(static_cast<size_t>(40 * model.spec().vocabulary));
  model.lm_head(hidden, 0, 40, logits.data());
  return logits;
}

void check_same(const std::vector<float>& got, const std::vector<float>& expected,
                const char* what) {
  REQUIRE_MESSAGE(got.size() == expected.size(), what);
  size_t worst = 0;
  float difference = -1.0f;
  for (size_t i = 0; i < got.size(); ++i) {
    REQUIRE_MESSAGE(std::isfinite(got[i]), what << ": logit " << i << " is " << got[i]);
    if (std::abs(got[i] - expected[i]) > difference) {
      difference = std::abs(got[i] - expected[i]);
      worst = i;
    }
  }
  CHECK_MESSAGE(difference == 0.0f, what << ": logit " << worst << " is " << got[worst]
                                         << ", expected " << expected[worst]);
}

}  // namespace

TEST_CASE("the registry knows its families") {
  CHECK(model_families().size() == 8);
  for (const ModelFamily& family : model_families())
    CHECK(std::string(family.description).size() > 5);
  CHECK(find_family(*Checkpoint::open(kMini)).name == std::string("nemotron_h"));
  CHECK(find_family(*Checkpoint::open(kMiniGdn)).name == std::string("qwen3_5"));
  CHECK(refused(kMini, "\"nemotron_h\"", "\"llama\"") ==
        "config.json: model_type: expected one of: nemotron_h mamba2 bamba granitemoehybrid "
        "falcon_h1 qwen3_5 "
        "qwen3_5_moe qwen3_next, got \"llama\"");
  CHECK(refused(kMini, "\"model_type\"", "\"no_type\"") ==
        "config.json: model_type: expected a string, got nothing");
}

TEST_CASE("contradictory configs: Nemotron-H") {
  const auto message = [](const std::string& from, const std::string& to) {
    return refused(kMini, from, to);
  };
  CHECK(message("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3") ==
        "config.json: num_key_value_heads: expected a divisor of num_attention_heads (4), got 3");
  CHECK(message("\"n_groups\": 1", "\"n_groups\": 3") ==
        "config.json: n_groups: expected a divisor of mamba_num_heads (8), got 3");
  CHECK(message("\"vocab_size\": 4096", "\"vocab_size\": 5000") ==
        "config.json: vocab_size: expected 4096 (the rows of tensor backbone.embeddings.weight), "
        "got 5000");
  CHECK(message("\"layer_norm_epsilon\": 1e-05", "\"layer_norm_epsilon\": -1") ==
        "config.json: layer_norm_epsilon: expected a number, 0 or more, got -1");
  CHECK(message("\"hidden_size\": 256", "\"hidden_size\": 128") ==
        "config.json: hidden_size: expected 256 (the columns of tensor "
        "backbone.embeddings.weight), got 128");
  CHECK(message("\"mamba_head_dim\": 64", "\"mamba_head_dim\": 32") ==
        "model.safetensors: tensor backbone.layers.0.mixer.in_proj.weight: expected shape [776, "
        "256], got [1288, 256]");
  CHECK(message("\"ssm_state_size\": 128", "\"unknown\": 1") ==
        "config.json: ssm_state_size: expected an integer of at least 1, got nothing");
  CHECK(message("\"ssm_state_size\": 128", "\"ssm_state_size\": \"big\"") ==
        "config.json: ssm_state_size: expected an integer of at least 1, got \"big\"");
  CHECK(message("\"mlp\",", "\"pool\",") ==
        "config.json: layers_block_type: expected linear_attention (mamba) and full_attention "
        "(attention), mlp, moe, got "
        "\"pool\"");
  CHECK(message("\"linear_attention\",", "") ==
        "config.json: expected more than 11 layers (the file has the tensor "
        "backbone.layers.11.mixer.down_proj.weight), "
        "got 11");
  CHECK(contains(message("\"linear_attention\",", "\"linear_attention\", \"linear_attention\","),
                 "tensor backbone.layers.1.mixer"));
  CHECK(message("\"mamba_hidden_act\": \"silu\"", "\"mamba_hidden_act\": \"gelu\"") ==
        "config.json: mamba_hidden_act: expected silu or relu2, got \"gelu\"");
  CHECK(message("\"mamba_hidden_act\": \"silu\"", "\"mamba_hidden_act\": \"relu2\"") ==
        "config.json: mamba_hidden_act: expected silu, got \"relu2\"");
  CHECK(
      message("\"vocab_size\"", "\"hybrid_override_pattern\": \"M-MM*-MM-M*M\", \"vocab_size\"") ==
      "config.json: hybrid_override_pattern: expected the same layers as in layers_block_type, got "
      "\"M-MM*-MM-M*M\"");
  CHECK(message("\"vocab_size\"", "\"hybrid_override_pattern\": \"M-X\", \"vocab_size\"") ==
        "config.json: hybrid_override_pattern: expected only M (Mamba), * (attention), - (MLP) and "
        "E (experts), got "
        "\"M-X\"");
  CHECK(message("\"layers_block_type\"", "\"other\"") ==
        "config.json: layers_block_type: expected a list of layers, or hybrid_override_pattern, "
        "got nothing");

  const fs::path moe = reference("nemotron_h-moe");
  if (moe.empty()) return;
  CHECK(refused(moe, "\"n_routed_experts\": 8", "\"n_routed_experts\": 6") ==
        "config.json: n_routed_experts: expected 8 (the rows of tensor "
        "backbone.layers.1.mixer.gate.weight), got 6");
  CHECK(refused(moe, "\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 9") ==
        "config.json: num_experts_per_tok: expected at most n_routed_experts (8), got 9");
  CHECK(refused(moe, "\"n_group\": 1", "\"n_group\": 3") ==
        "config.json: n_group: expected a divisor of n_routed_experts (8), got 3");
  CHECK(refused(moe, "\"n_group\": 1", "\"n_group\": 4") ==
        "config.json: num_experts_per_tok: expected at most topk_group * n_routed_experts / "
        "n_group (2), got 3");
  CHECK(refused(moe, "\"n_group\": 1", "\"n_group\": 8") ==
        "config.json: n_group: expected groups of at least 2 of the n_routed_experts (8), got 8");
  CHECK(refused(moe, "\"topk_group\": 1", "\"topk_group\": 2") ==
        "config.json: topk_group: expected at most n_group (1), got 2");
}

TEST_CASE("contradictory configs: Qwen") {
  const auto message = [](const std::string& from, const std::string& to) {
    return refused(kMiniGdn, from, to);
  };
  CHECK(
      message("\"linear_num_key_heads\": 2", "\"linear_num_key_heads\": 3") ==
      "config.json: linear_num_key_heads: expected a divisor of linear_num_value_heads (4), got 3");
  CHECK(message("\"linear_attention\",", "") ==
        "config.json: layer_types: expected num_hidden_layers (8) entries, got 7");
  CHECK(message("\"full_attention\"", "\"mlp\"") ==
        "config.json: layer_types: expected linear_attention (mamba) and full_attention "
        "(attention), got \"mlp\"");
  CHECK(message("\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"") ==
        "config.json: rope_parameters.rope_type: expected \"default\" (scaled rotary positions are "
        "not supported), got "
        "\"yarn\"");
  CHECK(contains(message("\"partial_rotary_factor\": 0.25,\n    \"rope_theta\"",
                         "\"partial_rotary_factor\": 0.05,\n    \"rope_theta\""),
                 "config.json: head_dim: expected an even number of rotary dimensions, got 64 * "
                 "partial_rotary_factor"));
  CHECK(message("\"qwen3_5_text\"", "\"qwen3_5_moe_text\"") ==
        "config.json: num_experts_per_tok: expected an integer of at least 1, got nothing");
  CHECK(message("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": 3") ==
        "config.json: tie_word_embeddings: expected true or false, got 3");
  const fs::path next = reference("qwen3_next-small");
  if (next.empty()) return;
  CHECK(refused(next, "\"num_experts\": 8", "\"num_experts\": 9") ==
        "config.json: num_experts: expected 8 (the rows of tensor model.layers.0.mlp.gate.weight), "
        "got 9");
  CHECK(contains(
      refused(next, "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 3"),
      "config.json: expected more than 3 layers (the file has the tensor model.layers.3."));
}

TEST_CASE("contradictory configs: the other Mamba-2 families") {
  const fs::path mamba2 = reference("mamba2-tied");
  if (mamba2.empty()) return;
  CHECK(refused(mamba2, "\"num_heads\": 8", "\"num_heads\": 4") ==
        "config.json: num_heads: expected 128 (expand * hidden_size) / head_dim (16), got 4");
  CHECK(refused(mamba2, "\"time_step_limit\": [\n    0.0,", "\"time_step_limit\": [") ==
        "config.json: time_step_limit: expected [lowest, highest], got [null]");
  const fs::path bamba = reference("bamba-small");
  CHECK(
      refused(bamba, "\"mamba_n_heads\": 8", "\"mamba_n_heads\": 7") ==
      "config.json: mamba_n_heads: expected a divisor of mamba_expand * hidden_size (128), got 7");
  CHECK(
      refused(bamba, "\"mamba_d_head\": 16", "\"mamba_d_head\": 8") ==
      "config.json: mamba_d_head: expected 16 (mamba_expand * hidden_size / mamba_n_heads), got 8");
  CHECK(refused(bamba, "\"attn_layer_indices\": [\n    2", "\"attn_layer_indices\": [\n    4") ==
        "config.json: attn_layer_indices: expected indices below num_hidden_layers (4), got [4]");
  CHECK(refused(bamba, "\"num_attention_heads\": 4", "\"num_attention_heads\": 6") ==
        "config.json: num_attention_heads: expected a divisor of hidden_size (64), got 6");
  const fs::path granite = reference("granitemoehybrid-moe-nope");
  CHECK(refused(granite, "\"num_local_experts\": 6", "\"num_local_experts\": 5") ==
        "config.json: num_local_experts: expected 6 (the rows of tensor "
        "model.layers.0.block_sparse_moe.router.layer.weight), got 5");
  CHECK(refused(granite, "\"logits_scaling\": 0.2", "\"logits_scaling\": 0") ==
        "config.json: logits_scaling: expected a positive number, got 0");
  const fs::path falcon = reference("falcon_h1-nonorm");
  CHECK(refused(falcon, "\"mamba_d_ssm\": 96", "\"mamba_d_ssm\": 128") ==
        "config.json: mamba_n_heads: expected mamba_d_ssm (128) / mamba_d_head (16), got 6");
  CHECK(refused(falcon, "\"mlp_multipliers\": [", "\"mlp_multipliers\": [ 1,") ==
        "config.json: mlp_multipliers: expected 2 numbers, got [1,0.9,0.6]");
}

TEST_CASE("biases of Nemotron-H's attention") {
  const std::string config = read_file(kMini / "config.json");
  const std::string asked = replaced(config, "\"num_key_value_heads\": 2",
                                     "\"num_key_value_heads\": 2, \"attention_bias\": true");
  const auto with = [&](float value, const char* only, const std::string& text) {
    return Rewritten(
        kMini,
        [&](Tensors& tensors) {
          for (const std::string layer : {"4", "10"}) {
            for (const std::string part : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
              const std::string name = "backbone.layers." + layer + ".mixer." + part;
              const int64_t rows = tensors.at(name + ".weight").header.shape[0];
              const std::vector<float> bias(static_cast<size_t>(rows), part == only ? value : 0);
              tensors[name + ".bias"] = {
                  {"", TensorType::f32, {rows}},
                  std::string(reinterpret_cast<const char*>(bias.data()), 4 * bias.size())};
            }
          }
        },
        text);
  };
  const std::vector<float> expected = logits_of(kMini);
  check_same(logits_of(with(0, "", asked).folder.path()), expected, "zeros");
  for (const char* part : {"q_proj", "k_proj", "v_proj", "o_proj"})
    CHECK_MESSAGE(logits_of(with(0.5f, part, asked).folder.path()) != expected, part);
  CHECK(refused(kMini, "\"num_key_value_heads\": 2",
                "\"num_key_value_heads\": 2, \"attention_bias\": true")
            .find("mixer.q_proj.bias: expected shape [") != std::string::npos);

  // Not asked for by the config: the report says so.
  const Rewritten beside = with(1, "q_proj", config);
  const Model model(Checkpoint::open(beside.folder.path()), {});
  REQUIRE(model.spec().notes.size() == 1);
  CHECK(model.spec().notes[0] ==
        "tensors of the checkpoint that nemotron_h does not read (8): "
        "backbone.layers.10.mixer.k_proj.bias backbone.layers.10.mixer.o_proj.bias "
        "backbone.layers.10.mixer.q_proj.bias backbone.layers.10.mixer.v_proj.bias ...");
}

TEST_CASE("every tensor of the reference checkpoints is read") {
  std::vector<fs::path> folders = {kMini, kMiniGdn};
  for (const char* name :
       {"bamba-small", "falcon_h1-nonorm", "falcon_h1-norm", "granitemoehybrid-moe-nope",
        "mamba2-groups", "mamba2-tied", "nemotron_h-dense", "nemotron_h-moe", "qwen3_5-dense",
        "qwen3_5-dense-hub", "qwen3_5_moe-small", "qwen3_next-small"}) {
    if (fs::path folder = reference(name); !folder.empty()) folders.push_back(std::move(folder));
  }
  for (const fs::path& folder : folders) {
    const auto checkpoint = Checkpoint::open(folder);
    (void)find_family(*checkpoint).build(*checkpoint);
    const std::vector<std::string> unread = checkpoint->unread();
    CHECK_MESSAGE(unread.empty(), folder.string() << ": " << (unread.empty() ? "" : unread[0]));
  }
}

TEST_CASE("other spellings of a config give the same model") {
  const std::string config = read_file(kMini / "config.json");
  const std::vector<float> expected = logits_of(kMini);
  const size_t first = config.find("\"layers_block_type\"");
  const size_t last = config.find(']', first) + 2;  // with the comma
  const auto with_layers = [&](const std::string& layers) {
    return logits_of(
        Variant(kMini, std::string(config).replace(first, last - first, layers)).folder.path());
  };
  check_same(
      with_layers("\"hybrid_override_pattern\": \"M-MM*-MM-M*-\", \"num_hidden_layers\": 3,"),
      expected, "pattern");
  check_same(with_layers("\"layers_block_type\": [\"mamba\", \"mlp\", \"mamba\", \"mamba\", "
                         "\"attention\", \"mlp\", \"mamba\", "
                         "\"mamba\", \"mlp\", \"mamba\", \"attention\", \"mlp\"],"),
             expected, "old names");

  // The text part of a multimodal file.
  const std::string gdn = read_file(kMiniGdn / "config.json");
  const std::vector<float> gdn_expected = logits_of(kMiniGdn);
  const std::string nested =
      "{\"model_type\": \"qwen3_5\", \"tie_word_embeddings\": false, \"text_config\": " + gdn + "}";
  const Rewritten multimodal(
      kMiniGdn,
      [](Tensors& tensors) {
        rename(tensors, "model.", "model.language_model.");
        tensors["model.visual.blocks.0.norm1.weight"] = {{"", TensorType::f32, {1}},
                                                         std::string(4, '\0')};
        tensors["mtp.layers.0.norm.weight"] = {{"", TensorType::f32, {1}}, std::string(4, '\0')};
      },
      nested);
  check_same(logits_of(multimodal.folder.path()), gdn_expected, "nested");

  // Layer kinds from the interval, rotary settings at the top.
  const size_t types = gdn.find("\"layer_types\"");
  std::string old = std::string(gdn).replace(types, gdn.find(']', types) + 2 - types,
                                             "\"full_attention_interval\": 4,");
  const size_t rope = old.find("\"rope_parameters\"");
  old.replace(rope, old.find('}', rope) + 2 - rope,
              "\"rope_theta\": 10000000, \"rope_scaling\": null,");
  check_same(logits_of(Variant(kMiniGdn, old).folder.path()), gdn_expected, "old fields");
}

TEST_CASE("other layouts of the tensors give the same model") {
  const fs::path nemotron = reference("nemotron_h-moe");
  if (nemotron.empty()) return;
  const Rewritten stacked(
      nemotron,
      [](Tensors& tensors) {
        for (const char* layer : {"1", "4"}) {
          const std::string prefix = "backbone.layers." + std::string(layer) + ".mixer.";
          stack_experts(tensors, prefix, 8, {"up_proj"}, "up_proj");
          stack_experts(tensors, prefix, 8, {"down_proj"}, "down_proj");
        }
        rename(tensors, "backbone.", "model.");
      },
      read_file(nemotron / "config.json"));
  check_same(logits_of(stacked.folder.path()), logits_of(nemotron),
             "Nemotron-H, stacked experts, model.");

  const fs::path next = reference("qwen3_next-small");
  const Rewritten joined(
      next,
      [](Tensors& tensors) {
        for (const char* layer : {"0", "2", "3"}) {
          const std::string prefix = "model.layers." + std::string(layer) + ".mlp.";
          stack_experts(tensors, prefix, 8, {"gate_proj", "up_proj"}, "gate_up_proj");
          stack_experts(tensors, prefix, 8, {"down_proj"}, "down_proj");
        }
      },
      read_file(next / "config.json"));
  check_same(logits_of(joined.folder.path()), logits_of(next),
             "Qwen3-Next, stacked experts, one file");

  const fs::path granite = reference("granitemoehybrid-moe-nope");
  const Rewritten in_memory(
      granite,
      [](Tensors& tensors) {
        rename(tensors, "block_sparse_moe.input_linear.weight",
               "block_sparse_moe.experts.gate_up_proj");
        rename(tensors, "block_sparse_moe.output_linear.weight",
               "block_sparse_moe.experts.down_proj");
        rename(tensors, "router.layer.weight", "router.weight");
      },
      read_file(granite / "config.json"));
  check_same(logits_of(in_memory.folder.path()), logits_of(granite), "Granite, names in memory");

  const fs::path mamba2 = reference("mamba2-tied");
  const Rewritten original(
      mamba2,
      [](Tensors& tensors) { rename(tensors, "backbone.embeddings.", "backbone.embedding."); },
      read_file(mamba2 / "config.json"));
  check_same(logits_of(original.folder.path()), logits_of(mamba2), "Mamba-2, backbone.embedding");
}

TEST_CASE("quantized weights run as their dequantized values") {
  // One matrix as E4M3 codes with a scale for each 128 x 128 block, against the same matrix as
  // FP32.
  const std::string name = "backbone.layers.1.mixer.up_proj.weight";  // [768, 256]
  std::string codes;
  std::vector<float> scales, values;
  for (int i = 0; i < 6 * 2; ++i) scales.push_back(0.001f * static_cast<float>(i + 1));
  for (int r = 0; r < 768; ++r) {
    for (int c = 0; c < 256; ++c) {
      const auto code =
          static_cast<uint8_t>((r * 37 + c * 11) % 127 | (r + c) % 2 << 7);  // never NaN
      codes += static_cast<char>(code);
      float value = 0;
      const auto byte = static_cast<std::byte>(code);
      widen_to_floats(TensorType::f8_e4m3, &byte, 1, &value);
      values.push_back(value * scales[static_cast<size_t>(r / 128 * 2 + c / 128)]);
    }
  }
  const auto bytes = [](const std::vector<float>& x) {
    return std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float));
  };
  const std::string config = read_file(kMini / "config.json");
  const Rewritten quantized(
      kMini,
      [&](Tensors& tensors) {
        tensors[name] = {{"", TensorType::f8_e4m3, {768, 256}}, codes};
        tensors[name + "_scale_inv"] = {{"", TensorType::f32, {6, 2}}, bytes(scales)};
      },
      replaced(config, "{",
               "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, "
               "128]},"));
  const Rewritten plain(
      kMini,
      [&](Tensors& tensors) {
        tensors[name] = {{"", TensorType::f32, {768, 256}}, bytes(values)};
      },
      config);
  check_same(logits_of(quantized.folder.path()), logits_of(plain.folder.path()), "FP8 blocks");
  const auto checkpoint = Checkpoint::open(quantized.folder.path());
  CHECK(build_nemotron_h(*checkpoint).notes == checkpoint->notes());
  CHECK(checkpoint->notes().size() == 2);
}

TEST_CASE("what a specification holds") {
  const auto checkpoint = Checkpoint::open(kMini);
  const ModelSpec model = build_nemotron_h(*checkpoint);
  CHECK(model.layers == 12);
  CHECK(model.blocks.size() == 12);
  CHECK(model.max_positions == 131072);
  CHECK(model.notes.empty());
  const auto& mamba = std::get<Mamba2Spec>(model.blocks[0].branches[0].mixer);
  CHECK(mamba.heads == 8);
  CHECK(mamba.head_dim == 64);
  CHECK(mamba.state_dim == 128);
  CHECK(mamba.norm_group == 512);
  CHECK(mamba.dt_min == 1e-6f);
  CHECK(mamba.dt_max == std::numeric_limits<float>::infinity());
  const float a_log = checkpoint->values("backbone.layers.0.mixer.A_log", {8})[3];
  CHECK(mamba.a[3] == static_cast<float>(-std::exp(static_cast<double>(a_log))));
  CHECK(std::get<AttentionSpec>(model.blocks[4].branches[0].mixer).rotary_dim == 0);
  // Weights stay in the mapped file.
  const Shard& shard = checkpoint->tensors().shards()[0];
  const auto* data = static_cast<const std::byte*>(mamba.in_proj.weight.data);
  CHECK((data >= shard.file.data() && data < shard.file.data() + shard.file.size()));

  const auto gdn_checkpoint = Checkpoint::open(kMiniGdn);
  const ModelSpec gdn_model = build_qwen3_5(*gdn_checkpoint);
  CHECK(gdn_model.blocks.size() == 16);
  CHECK(gdn_model.lm_head.weight.data == gdn_model.embedding.data);  // tied
  const auto& attention = std::get<AttentionSpec>(gdn_model.blocks[6].branches[0].mixer);
  CHECK(attention.rotary_dim == 16);
  CHECK(attention.inverse_frequency.size() == 8);
  CHECK(attention.inverse_frequency[0] == 1.0f);
  // theta^(-2/16): 10^(-7/8) = 0.13335214...
  CHECK(attention.inverse_frequency[1] == doctest::Approx(0.1333521432).epsilon(1e-7));
  CHECK(attention.scale == 0.125f);
}
