// A made-up run whose figures are a function of state, document and position, shared by the tests
// of reports.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string>

#include "base/hash.h"
#include "reports/run_folder.h"
#include "tests/support/temporary_folder.h"

namespace replayeval::test {

inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline float uniform(uint64_t x) { return static_cast<float>(mix(x) >> 40) * 0x1p-24f; }

inline StateInfo sample_state(const std::string& name) {
  StateInfo state;
  state.name = name;
  state.definition = "definition of " + name;
  state.sha256 = sha256_hex(state.definition);
  state.recurrence = name.substr(0, name.find_first_of("+/@"));
  if (name.find('/') != std::string::npos) state.read = name.substr(name.find('/') + 1);
  state.recurrence_rounding = name.find("+sr") != std::string::npos ? "sr" : "rtn";
  state.read_rounding = state.read.empty() ? "" : "rtn";
  state.window = name.find("@L=1") != std::string::npos ? 1 : 16;
  state.options = {{"gdn_fold", "rederive"}};
  state.bits_per_element = 4.5;
  state.bytes_per_sequence = 1234567890123;
  return state;
}

inline RunPlan sample_plan(std::vector<std::string> states = {"fp32", "fp32@L=1", "nvfp4+sr",
                                                              "fp32/nvfp4"},
                           std::vector<int64_t> tokens = {100, 70}, int64_t unit = 32) {
  RunPlan plan;
  plan.run.experiment = "job: kl\nmodel: models/mini-mamba2\n# \xC3\xA9\n";
  plan.run.model = "models/mini-mamba2";
  plan.run.model_sha256 = sha256_hex("model");
  plan.run.family = "nemotron_h";
  plan.run.tokenizer = "tokenizer.model";
  plan.run.tokenizer_sha256 = sha256_hex("tokenizer");
  plan.run.data = "datasets/sample";
  plan.run.data_sha256 = sha256_hex("data");
  plan.run.revision = "0123abc";
  plan.run.notes = {"not asked: item 7: no answer"};
  plan.run.compiler = "g++ 12";
  plan.run.versions = {{"hdf5", "1.10"}, {"libtorch", "2.11"}};
  plan.run.device = "cpu";
  plan.run.compute = "fp32";
  plan.run.dense = "invariant";
  plan.run.seed = 18446744073709551615ull;
  plan.run.vocabulary = 4096;
  plan.run.threads = 2;
  plan.run.created = "2026-11-29T18:51:07Z";
  plan.settings = {
      {"window", "16"}, {"seed", "1"}, {"threads", "2"}, {"data.split", "test"}, {"states", "..."}};
  for (size_t d = 0; d < tokens.size(); ++d) {
    std::string id = std::to_string(3608 + d);
    plan.documents.push_back(
        {id, "Book " + id, tokens[d], sha256_hex("text " + id), stream_of(id)});
  }
  plan.layers = {{0, "mamba2", 3, {}}, {2, "mamba2", 2, {}}};
  for (const std::string& name : states) plan.states.push_back(sample_state(name));
  plan.unit_tokens = unit;
  return plan;
}

inline uint64_t name_key(const std::string& name) {
  return std::stoull(sha256_hex(name).substr(0, 15), nullptr, 16);
}

/// The figures of the unit at `first`, for the given states (all when empty). Samples of the state
/// error every 10 positions.
inline KlSpan sample_span(const RunPlan& plan, int document, int64_t first,
                          std::vector<int> states = {}) {
  const DocumentInfo& info = plan.documents[static_cast<size_t>(document)];
  if (states.empty()) {
    for (size_t i = 0; i < plan.states.size(); ++i) states.push_back(static_cast<int>(i));
  }
  const uint64_t document_key = name_key(info.id);
  KlSpan span;
  span.document = document;
  span.first = first;
  const int64_t end = std::min(first + plan.unit_tokens, info.tokens);
  for (int64_t t = first; t < end; ++t) {
    span.tokens.push_back(
        static_cast<int32_t>(mix(document_key + static_cast<uint64_t>(t)) % 4096));
  }
  span.seconds = 0.25;
  const size_t layers = plan.layers.size(), heads = 3;
  for (size_t i = 0; i < layers * heads; ++i) {
    span.decay_sum.push_back(static_cast<double>(end - first) *
                             (0.5 + 0.0625 * static_cast<double>(i)));
  }
  for (int index : states) {
    const StateInfo& state = plan.states[static_cast<size_t>(index)];
    const uint64_t key = name_key(state.name) ^ document_key;
    StateSpan one;
    one.state = index;
    one.health.resize(layers);
    for (int64_t t = first; t < end; ++t) {
      const uint64_t at = key + 2 * static_cast<uint64_t>(t);
      const bool baseline = state.name == plan.run.baseline;
      one.kl.push_back(baseline ? 0.0f : uniform(at) * 0.01f);
      one.nll.push_back(t == info.tokens - 1 ? std::numeric_limits<float>::quiet_NaN()
                                             : 3 + uniform(at + 1));
      one.top1.push_back(baseline || uniform(at) < 0.9f ? 1 : 0);
      if (t % 10 == 9) {
        one.error_positions.push_back(t);
        for (size_t i = 0; i < layers * heads; ++i) {
          const bool head = i % heads < static_cast<size_t>(plan.layers[i / heads].heads);
          one.error.push_back(head ? uniform(at + 31 * i)
                                   : std::numeric_limits<float>::quiet_NaN());
          if (!state.read.empty())
            one.error_read.push_back(head ? uniform(at + 37 * i)
                                          : std::numeric_limits<float>::quiet_NaN());
        }
      }
      for (size_t l = 0; l < layers; ++l) {
        one.health[l].elements += 64;
        one.health[l].saturated += mix(at + l) % 3;
        if (!baseline && t == 40) {
          one.health[l].merge({0, 2, 0, 0, 0, t, static_cast<int32_t>(l)});
        }
      }
    }
    span.states.push_back(std::move(one));
  }
  return span;
}

inline void put_all(RunFolder& folder) {
  for (const Unit& unit : folder.missing())
    folder.put(sample_span(folder.plan(), unit.document, unit.first, unit.states));
}

inline bool same_float(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

inline bool same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_float);
}

/// Empty when both reports hold the same figures, otherwise what differs first.
inline std::string figures_differ(const Report& a, const Report& b) {
  if (a.states.size() != b.states.size()) return "number of states";
  if (a.token_ids != b.token_ids) return "token ids";
  for (size_t l = 0; l < a.layers.size(); ++l) {
    if (!same_floats(a.layers[l].mean_decay, b.layers.at(l).mean_decay))
      return "mean decay of layer " + std::to_string(l);
  }
  for (size_t s = 0; s < a.states.size(); ++s) {
    const StateReport &x = a.states[s], &y = b.states[s];
    if (x.info.sha256 != y.info.sha256) return "state " + x.info.name + " against " + y.info.name;
    if (x.documents.size() != y.documents.size()) return "number of documents";
    for (size_t d = 0; d < x.documents.size(); ++d) {
      const StateDocument &p = x.documents[d], &q = y.documents[d];
      const std::string where = " of " + x.info.name + ", document " + std::to_string(d);
      if (p.length != q.length)
        return "length" + where + ": " + std::to_string(p.length) + ", " + std::to_string(q.length);
      if (p.first_position != q.first_position) return "first position" + where;
      if (!same_floats(p.kl, q.kl)) return "kl" + where;
      if (!same_floats(p.nll, q.nll)) return "nll" + where;
      if (p.top1 != q.top1) return "top1" + where;
      if (p.error_positions != q.error_positions) return "error positions" + where;
      if (!same_floats(p.error, q.error)) return "error" + where;
      if (!same_floats(p.error_read, q.error_read)) return "error_read" + where;
      if (p.health != q.health) return "health" + where;
    }
  }
  return {};
}

}  // namespace replayeval::test
