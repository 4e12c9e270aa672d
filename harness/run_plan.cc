#include "harness/run_plan.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "harness/build_info.h"
#include "models/state_store.h"
#include "models/torch_dense.h"
#include "quant/cuda_support.h"

namespace replayeval {
namespace {

std::string kind_of(const Mixer& mixer) {
  if (std::holds_alternative<Mamba2Spec>(mixer)) return "mamba2";
  if (std::holds_alternative<GdnSpec>(mixer)) return "gdn";
  return {};
}

/// Layers with recurrent state, in block order.
std::vector<LayerInfo> recurrent_layers(const ModelSpec& model) {
  std::vector<LayerInfo> layers;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (auto shape = state_shape(branch.mixer, block.layer)) {
        layers.push_back({block.layer, kind_of(branch.mixer), shape->heads, {}});
      }
    }
  }
  return layers;
}

std::string rounding_name(const StateCodec& codec) {
  return codec.rounding == Rounding::stochastic ? "sr" : "rtn";
}

StateInfo state_info(const StatePrecision& precision, const StatePrecision& baseline,
                     const ModelSpec& model) {
  StateInfo info;
  info.name = precision.name;
  info.definition = state_definition(precision, baseline);
  info.sha256 = state_identity(precision, baseline);
  info.recurrence = codec_name({precision.recurrence.format, Rounding::nearest_even});
  info.recurrence_rounding = rounding_name(precision.recurrence);
  if (precision.read) {
    info.read = codec_name({precision.read->format, Rounding::nearest_even});
    info.read_rounding = rounding_name(*precision.read);
  }
  info.window = precision.options.window;
  info.seed = precision.options.seed;
  info.options = {{"gdn_fold", std::string(name_of(precision.options.gdn_fold))},
                  {"flush_output", std::string(name_of(precision.options.flush_output))},
                  {"ring", std::string(name_of(precision.options.ring))},
                  {"ring_u", std::string(name_of(precision.options.ring_u))},
                  {"beta", std::string(name_of(precision.options.beta))},
                  {"dot", std::string(name_of(precision.options.dot))},
                  {"layers", precision.layers.text()},
                  {"heads", precision.heads.text()}};
  int64_t elements = 0;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      const auto shape = state_shape(branch.mixer, block.layer);
      if (!shape) continue;
      elements += shape->state.elements() * shape->heads;
      info.bytes_per_sequence +=
          static_cast<int64_t>(checkpoint_bytes(*shape, precision, baseline));
    }
  }
  if (elements > 0)
    info.bits_per_element =
        8.0 * static_cast<double>(info.bytes_per_sequence) / static_cast<double>(elements);
  return info;
}

}  // namespace

void use_threads(int threads) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (threads == 0) threads = cores;
  if (threads > cores) {
    std::fprintf(stderr, "WARNING: %d threads on %d cores wait for each other\n", threads, cores);
  }
  omp_set_num_threads(threads);
  set_torch_threads(threads);
}

ModelOptions model_options(const Experiment& experiment, bool dry_run) {
  ModelOptions options;
  options.compute = experiment.compute;
  options.dense = experiment.dense;
  options.dt_clamp = experiment.dt_clamp;
  options.device = dry_run ? Device::cpu : experiment.device;
  options.products = experiment.job == "score" ? Products::together : Products::per_row;
  return options;
}

int64_t available_memory(Device device) {
  if (device == Device::cuda)
    return cuda_available() ? static_cast<int64_t>(cuda_device().free_bytes) : kUnknownMemory;
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  std::string unit;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name == "MemAvailable:") return kib * 1024;
  }
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
}

RowMemory row_memory(const Experiment& experiment, const ModelSpec& model, int64_t tokens) {
  RowMemory bytes;
  auto matrix = [](const WeightView& w) { return w.rows * w.cols * weight_bytes(w.type); };
  int64_t widest = model.hidden;
  bytes.weights = matrix(model.embedding);
  if (model.lm_head.weight.data != model.embedding.data)
    bytes.weights += matrix(model.lm_head.weight);
  const KvType kv = experiment.compute == ComputeType::bf16 ? KvType::bf16 : KvType::fp32;
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      if (const auto shape = state_shape(branch.mixer, block.layer)) {
        bytes.state += shape->heads * shape->state.elements() * int64_t{8};
        bytes.state += int64_t{kMaxWindow + shape->conv_kernel} *
                       (shape->channels + shape->scalars + shape->corrections) * 4;
        widest = std::max<int64_t>(widest, 3 * int64_t{shape->channels});
      }
      if (const auto* attention = std::get_if<AttentionSpec>(&branch.mixer)) {
        bytes.cache += static_cast<int64_t>(
            KvCache::bytes_needed(attention->kv_heads, attention->head_dim, kv, tokens));
        bytes.weights += matrix(attention->q.weight) + matrix(attention->k.weight) +
                         matrix(attention->v.weight) + matrix(attention->o.weight);
      } else if (const auto* mamba = std::get_if<Mamba2Spec>(&branch.mixer)) {
        bytes.weights += matrix(mamba->in_proj.weight) + matrix(mamba->out_proj.weight);
      } else if (const auto* gdn = std::get_if<GdnSpec>(&branch.mixer)) {
        bytes.weights +=
            matrix(gdn->qkv.weight) + matrix(gdn->z.weight) + matrix(gdn->out_proj.weight);
      } else if (const auto* mlp = std::get_if<MlpSpec>(&branch.mixer)) {
        bytes.weights += matrix(mlp->up.weight) + matrix(mlp->down.weight) +
                         (mlp->gate ? matrix(mlp->gate->weight) : 0);
        widest = std::max(widest, 2 * mlp->up.weight.rows);
      } else if (const auto* moe = std::get_if<MoeSpec>(&branch.mixer)) {
        for (const MlpSpec& expert : moe->experts) {
          bytes.weights += matrix(expert.up.weight) + matrix(expert.down.weight) +
                           (expert.gate ? matrix(expert.gate->weight) : 0);
        }
        widest = std::max(
            widest, int64_t{moe->experts_per_token} * 3 * moe->experts.front().up.weight.rows);
      }
    }
  }
  bytes.chunk = int64_t{experiment.chunk_tokens} * (widest + 4 * model.hidden) * 4;
  return bytes;
}

std::string available_text(int64_t bytes) {
  if (bytes > kUnknownMemory / 2) return "unknown without a GPU";
  char text[32];
  std::snprintf(text, sizeof text, "%10.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string host_codec_note(const Experiment& experiment) {
  if (experiment.device == Device::cpu) return {};
  std::string names;
  const auto add = [&](const StatePrecision& state) {
    const bool here = state.recurrence.format->library != nullptr ||
                      (state.read && state.read->format->library != nullptr);
    if (here) names += (names.empty() ? "" : ", ") + state.name;
  };
  add(experiment.baseline);
  for (const StatePrecision& state : experiment.states) add(state);
  if (names.empty()) return {};
  return names + ": encoded by a library on the host; checkpoints are copied at each flush";
}

void check_selections(const StatePrecision& precision, const ModelSpec& model) {
  if (precision.whole_model()) return;
  bool any = false;
  int heads = 0;  // most of a layer
  for (const Block& block : model.blocks) {
    for (const Branch& branch : block.branches) {
      const auto shape = state_shape(branch.mixer, block.layer);
      if (!shape) continue;
      heads = std::max(heads, shape->heads);
      if (!precision.layers.contains(block.layer)) continue;
      for (int h = 0; h < shape->heads; ++h) any = any || precision.heads.contains(h);
    }
  }
  const auto within = [&](const char* what, const IndexSelection& selection, int count) {
    if (selection.last() < count) return;
    throw std::invalid_argument("states: " + precision.name + ": there is no " + what + " " +
                                std::to_string(selection.last()) + "; the model has 0 to " +
                                std::to_string(count - 1));
  };
  within("layer", precision.layers, model.layers);
  within("head", precision.heads, heads);
  if (any) return;
  std::string known;
  for (const LayerInfo& layer : recurrent_layers(model))
    known += (known.empty() ? "" : ", ") + std::to_string(layer.index);
  throw std::invalid_argument(
      "states: " + precision.name +
      ": the selection holds no layer and head with state; layers with state: " + known);
}

RunPlan common_plan(const Experiment& experiment, const Model& model, const Tokenizer& tokenizer) {
  RunPlan plan;
  plan.run.job = experiment.job;
  plan.run.experiment = resolved_text(experiment);
  plan.run.model = experiment.model;
  plan.run.model_sha256 = model.checkpoint().hash();
  plan.run.family = model.spec().family;
  plan.run.tokenizer = experiment.tokenizer.string();
  plan.run.tokenizer_sha256 = tokenizer.sha256();
  const BuildInfo build = build_info();
  plan.run.revision = build.revision;
  plan.run.compiler = build.compiler;
  plan.run.versions = build.versions;
  plan.run.device = name_of(experiment.device);
  if (experiment.device == Device::cuda) {
    const CudaDevice device = cuda_device();
    plan.run.versions["gpu"] = device.name + ", compute capability " +
                               std::to_string(device.capability / 10) + "." +
                               std::to_string(device.capability % 10);
  }
  plan.run.compute = experiment.compute == ComputeType::fp32 ? "fp32" : "bf16";
  plan.run.dense = experiment.dense == DenseMode::invariant ? "invariant" : "fast";
  plan.run.baseline = experiment.baseline.name;
  plan.run.window = experiment.state_options.window;
  plan.run.seed = experiment.state_options.seed;
  plan.run.vocabulary = model.spec().vocabulary;
  plan.run.threads = omp_get_max_threads();
  plan.run.created = utc_now();
  plan.run.notes = model.spec().notes;
  for (const ExperimentField& field : experiment_fields(experiment))
    plan.settings.push_back({field.name, field.value});
  plan.settings.push_back({"model sha256", plan.run.model_sha256});
  plan.settings.push_back({"tokenizer sha256", plan.run.tokenizer_sha256});
  plan.layers = recurrent_layers(model.spec());
  plan.states.push_back(state_info(experiment.baseline, experiment.baseline, model.spec()));
  for (const StatePrecision& precision : experiment.states) {
    plan.states.push_back(state_info(precision, experiment.baseline, model.spec()));
  }
  return plan;
}

}  // namespace replayeval
