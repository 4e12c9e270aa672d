// Every family with low-precision state over 512 tokens: the window form against the FP64
// token-by-token mixer inside the whole model (DESIGN.md section 2, level ii). Layers behind the
// first see inputs that already differ by rounding, so codes are compared in the first recurrent
// layer and the predictions as a whole.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "kernels/kl.h"
#include "models/model.h"
#include "models/state_precision.h"
#include "models/state_store.h"
#include "tests/support/case_file.h"

namespace replayeval {
namespace {

constexpr int kTokens = 512;
const std::vector<std::string> kStates = {"fp32", "fp16+sr", "nvfp4+sr", "fp8+sr/nvfp4",
                                          "bf16@L=1"};

struct FormRun {
  std::unique_ptr<StateSet> states;
  std::vector<std::vector<float>> logits;  // [row]
};

FormRun run_form(const Model& model, KernelForm form, const std::vector<int32_t>& tokens) {
  StateOptions defaults;
  defaults.seed = 3;
  const StatePrecision baseline = parse_state_precision("fp32", defaults);
  std::vector<RowSpec> rows;
  for (const std::string& name : kStates)
    rows.push_back({parse_state_precision(name, defaults), 77u, 0, 0});
  FormRun run;
  run.states = std::make_unique<StateSet>(model, rows, baseline, form);
  std::vector<int32_t> batch;
  for (size_t r = 0; r < rows.size(); ++r) batch.insert(batch.end(), tokens.begin(), tokens.end());
  const Hidden hidden = model.forward({batch, std::vector<int>(rows.size(), kTokens)}, *run.states);
  for (size_t r = 0; r < rows.size(); ++r) {
    run.logits.emplace_back(static_cast<size_t>(kTokens) *
                            static_cast<size_t>(model.spec().vocabulary));
    model.lm_head(hidden, static_cast<int64_t>(r) * kTokens, kTokens, run.logits.back().data());
  }
  return run;
}

double mean_kl(const std::vector<float>& reference, const std::vector<float>& candidate,
               int64_t vocabulary) {
  std::vector<LogitSummary> a(kTokens), b(kTokens);
  std::vector<double> kl(kTokens);
  summarize_logits(reference.data(), vocabulary, kTokens, vocabulary, a.data());
  summarize_logits(candidate.data(), vocabulary, kTokens, vocabulary, b.data());
  kl_divergence(reference.data(), vocabulary, a.data(), candidate.data(), vocabulary, b.data(),
                kTokens, vocabulary, kl.data());
  double sum = 0;
  for (double v : kl) sum += v;
  return sum / kTokens;
}

}  // namespace

TEST_CASE("every family: window form and FP64 mixer agree with low-precision state") {
  const char* folders[] = {"nemotron_h-dense",  "nemotron_h-moe",    "mamba2-tied",
                           "mamba2-groups",     "bamba-small",       "granitemoehybrid-moe-nope",
                           "falcon_h1-norm",    "falcon_h1-nonorm",  "qwen3_5-dense",
                           "qwen3_5-dense-hub", "qwen3_5_moe-small", "qwen3_next-small"};
  for (const char* name : folders) {
    std::string path = test::case_path("models-ref/" + std::string(name));
    if (path.empty()) path = test::case_path("cases/models-ref/" + std::string(name));
    if (path.empty()) continue;
    const Model model(Checkpoint::open(path), {});
    const int64_t vocabulary = model.spec().vocabulary;
    std::vector<int32_t> tokens;
    uint32_t x = 11;
    while (tokens.size() < kTokens) {
      x = x * 1664525u + 1013904223u;
      tokens.push_back(static_cast<int32_t>((x >> 8) % static_cast<uint32_t>(vocabulary)));
    }
    const FormRun fast = run_form(model, KernelForm::fast, tokens);
    const FormRun slow = run_form(model, KernelForm::reference, tokens);
    const StateStore& a = *fast.states->stores()[0];
    const StateStore& b = *slow.states->stores()[0];
    const size_t size = static_cast<size_t>(a.shape().state.elements());
    const bool mamba = a.shape().corrections == 0;
    std::string line;
    for (size_t r = 1; r < kStates.size(); ++r) {
      int64_t differing = 0, beyond = 0;
      std::vector<float> fa(size), fb(size);
      for (int h = 0; h < a.shape().heads; ++h) {
        a.decode(static_cast<int>(r), h, StateRole::recurrence, fa.data());
        b.decode(static_cast<int>(r), h, StateRole::recurrence, fb.data());
        for (size_t i = 0; i < size; ++i) {
          // Scales differ in their last bits; a code that flips moves the value by 2^-10 or more.
          const double largest = std::max(std::abs(double{fa[i]}), std::abs(double{fb[i]}));
          if (std::abs(double{fa[i]} - double{fb[i]}) <= 0x1p-18 * largest) continue;
          ++differing;
          // A flipped code is one step of the grid; later flushes carry it on, decayed, and may
          // flip the neighbour again: two steps of FP16 (2^-10 relative, 2^-24 at the bottom) or
          // BF16 (2^-7). Elements of a Mamba-2 state do not mix; in GDN a flip enters the
          // corrections of its whole row, so nothing is said of single elements there.
          const double step = r == 1 ? std::max(0x1p-10 * largest, 0x1p-24) : 0x1p-7 * largest;
          beyond +=
              mamba && (r == 1 || r == 4) && std::abs(double{fa[i]} - double{fb[i]}) > 2 * step;
        }
      }
      const double total = static_cast<double>(size) * a.shape().heads;
      const double own = mean_kl(fast.logits[0], fast.logits[r], vocabulary);
      const double between = mean_kl(slow.logits[r], fast.logits[r], vocabulary);
      char text[120];
      std::snprintf(text, sizeof text, "  %s: %.2g %% of codes, KL %.1e of %.1e",
                    kStates[r].c_str(), 100 * static_cast<double>(differing) / total, between, own);
      line += text;
      CHECK_MESSAGE(beyond == 0, name << " " << kStates[r] << ": " << beyond
                                      << " elements more than two steps apart");
      // Codes near a rounding boundary are few: an FP32 error of about 32 roundings (2^-19) moves a
      // code with a probability of that over the step.
      CHECK_MESSAGE(static_cast<double>(differing) / total < 0.02,
                    name << " " << kStates[r] << ": share " << differing / total);
      // Predictions differ by less than the state's own rounding moves them.
      CHECK_MESSAGE(between < own, name << " " << kStates[r] << ": KL between forms " << between
                                        << ", of the state " << own);
    }
    std::printf("%-26s%s\n", name, line.c_str());
    CHECK(mean_kl(slow.logits[0], fast.logits[0], vocabulary) < 1e-9);
  }
}

}  // namespace replayeval
