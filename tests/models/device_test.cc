// Models on a GPU against the same models on the host: with `dense: invariant` every logit and
// every packed checkpoint has the host's bits; with `dense: fast` what no other row may change.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "models/backend.h"
#include "models/decoder.h"
#include "models/model.h"
#include "models/state_precision.h"
#include "models/state_store.h"
#include "quant/format_file.h"
#include "tests/gpu/gpu.h"
#include "tests/support/case_file.h"

namespace replayeval {
namespace {

std::string mini(const std::string& name) {
  return std::string(REPLAYEVAL_SOURCE_DIR) + "/models/" + name;
}

std::unique_ptr<Model> open_folder(const std::string& folder, Device device, DenseMode dense,
                                   ComputeType compute, Products products = Products::per_row) {
  ModelOptions options;
  options.compute = compute;
  options.dense = dense;
  options.device = device;
  options.products = products;
  return std::make_unique<Model>(
      Checkpoint::open(folder, compute == ComputeType::bf16 ? WeightType::bf16 : WeightType::fp32),
      options);
}

std::unique_ptr<Model> open(const std::string& name, Device device,
                            DenseMode dense = DenseMode::invariant,
                            ComputeType compute = ComputeType::fp32) {
  return open_folder(mini(name), device, dense, compute);
}

NamedFormats formats() {
  return {{"scaled",
           parse_format("library: libtest_codec_good.so", "scaled.yaml", REPLAYEVAL_TEST_CODECS)},
          {"five", parse_format("element: {exponent: 2, mantissa: 2, bias: 1}\n"
                                "scale: {format: e4m3, block: 16}\n",
                                "five.yaml", ".")}};
}

StatePrecision precision(const std::string& text) {
  StateOptions defaults;
  defaults.seed = 1;
  return parse_state_precision(text, defaults, formats());
}

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens{1};
  uint32_t x = 7;
  while (static_cast<int>(tokens.size()) < count) {
    x = x * 1664525u + 1013904223u;
    tokens.push_back(static_cast<int32_t>(4 + (x >> 8) % 4000));
  }
  return tokens;
}

StateSet make_states(const Model& model, const std::vector<std::string>& names,
                     int64_t prompt = 0) {
  std::vector<RowSpec> rows;
  for (const std::string& name : names) rows.push_back({precision(name), 12345u, prompt, 0});
  return StateSet(model, rows, precision("fp32"), KernelForm::fast);
}

/// Logits [rows][tokens, vocabulary] of the same tokens in every row, in calls of these sizes in
/// turn, from token `first` on.
std::vector<std::vector<float>> run(const Model& model, StateSet& states,
                                    const std::vector<int32_t>& tokens,
                                    const std::vector<int>& calls, size_t first = 0) {
  const size_t rows = static_cast<size_t>(states.rows());
  const int64_t vocabulary = model.spec().vocabulary;
  std::vector<std::vector<float>> logits(rows);
  for (size_t call = 0; first < tokens.size(); ++call) {
    const int count =
        std::min<int>(calls[call % calls.size()], static_cast<int>(tokens.size() - first));
    std::vector<int32_t> batch;
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first);
    for (size_t r = 0; r < rows; ++r) batch.insert(batch.end(), begin, begin + count);
    const Hidden hidden = model.forward({batch, std::vector<int>(rows, count)}, states);
    for (size_t r = 0; r < rows; ++r) {
      const size_t at = logits[r].size();
      logits[r].resize(at + static_cast<size_t>(count * vocabulary));
      model.lm_head(hidden, static_cast<int64_t>(r) * count, count, logits[r].data() + at);
    }
    first += static_cast<size_t>(count);
  }
  return logits;
}

void check_equal_bits(const std::vector<float>& got, const std::vector<float>& expected,
                      const std::string& what) {
  REQUIRE_MESSAGE(got.size() == expected.size(), what);
  size_t differing = 0, worst = 0;
  float most = -1;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
    ++differing;
    const float distance = std::fabs(got[i] - expected[i]);
    if (!(distance <= most)) worst = i, most = distance;
  }
  CHECK_MESSAGE(differing == 0, what << ": " << differing << " of " << got.size()
                                     << " differ, element " << worst << ": got " << got[worst]
                                     << ", expected " << expected[worst]);
}

/// Rows of every state, two each, through the decoder and through forward: the same bits, of logits
/// and of checkpoints.
void compare_decoding(const Model& model, const std::vector<std::string>& names, int64_t prompt,
                      const std::string& what) {
  constexpr int kEach = 2;
  constexpr int kSteps = 40;
  const int64_t vocabulary = model.spec().vocabulary;
  DecoderOptions options;
  for (const std::string& state : names) options.states.push_back(precision(state));
  options.baseline = precision("fp32");
  options.rows_per_state = kEach;
  options.most_positions = 2000;
  options.cache_positions = 3000;
  Decoder decoder(model, options);
  REQUIRE(decoder.rows() == kEach * static_cast<int>(names.size()));
  // Row 0 of each state takes its place at 41 tokens, row 1 at 67 of other tokens, and the
  // first is given up after 20 steps.
  std::vector<int32_t> tokens = some_tokens(400);
  for (int32_t& token : tokens) token %= static_cast<int32_t>(vocabulary);
  std::vector<StateSet> sets;
  std::vector<int> rows;
  for (int each = 0; each < kEach; ++each) {
    const int length = each == 0 ? 41 : 67;
    StateSet& set = sets.emplace_back(make_states(model, names, prompt));
    const std::vector<int32_t> begin(tokens.begin() + 100 * each,
                                     tokens.begin() + 100 * each + length);
    run(model, set, begin, {33, 1, 5});
    for (size_t s = 0; s < names.size(); ++s) {
      const int row = decoder.reserve(static_cast<int>(s), length + kSteps);
      REQUIRE(row == static_cast<int>(s) * kEach + each);
      decoder.admit(row, set, static_cast<int>(s));
      CHECK(decoder.position(row) == length);
    }
  }
  CHECK(decoder.reserve(0, 100) == -1);
  std::vector<float> logits(static_cast<size_t>(vocabulary));
  for (int step = 0; step < kSteps; ++step) {
    std::vector<int32_t> next(static_cast<size_t>(decoder.rows()));
    std::vector<std::vector<float>> expected;
    for (int each = 0; each < kEach; ++each) {
      if (each == 0 && step >= 20) continue;
      const int32_t token = tokens[static_cast<size_t>(200 + 50 * each + step)];
      const auto forward = run(model, sets[static_cast<size_t>(each)], {token}, {1});
      for (size_t s = 0; s < names.size(); ++s) {
        next[s * kEach + static_cast<size_t>(each)] = token;
        expected.push_back(forward[s]);
      }
    }
    const auto choices = decoder.step(next);
    size_t i = 0;
    for (int each = 0; each < kEach; ++each) {
      if (each == 0 && step >= 20) continue;
      for (size_t s = 0; s < names.size(); ++s, ++i) {
        const int row = static_cast<int>(s) * kEach + each;
        decoder.logits(row, logits.data());
        check_equal_bits(logits, expected[i],
                         what + ", " + names[s] + ", step " + std::to_string(step));
        const auto best = std::max_element(expected[i].begin(), expected[i].end());
        CHECK(choices[static_cast<size_t>(row)].token == best - expected[i].begin());
      }
    }
    if (step != 19) continue;
    for (size_t s = 0; s < names.size(); ++s) {
      const int row = static_cast<int>(s) * kEach;
      for (const StateStore* store : sets[0].stores()) {
        for (StateRole role : {StateRole::recurrence, StateRole::read}) {
          const StateCodec& codec = role == StateRole::read && options.states[s].read
                                        ? *options.states[s].read
                                        : options.states[s].recurrence;
          const size_t size = static_cast<size_t>(store->shape().state.elements());
          const size_t bytes = packed_bytes(*codec.format, store->shape().state);
          const auto packed = decoder.packed(store->shape().layer, row, role);
          std::vector<float> have(size), want(size);
          for (int h = 0; h < store->shape().heads; ++h) {
            decode_head(*codec.format, store->shape().state,
                        packed.data() + static_cast<size_t>(h) * bytes, have.data());
            store->decode(static_cast<int>(s), h, role, want.data());
            check_equal_bits(have, want, what + ", " + names[s] + ", state");
          }
        }
      }
      decoder.release(row);
    }
  }
}

const std::vector<std::string> kStates = {
    "fp32",          "fp16+sr",        "fp8+sr",  "nvfp4+sr",  "nvfp4+sr@L=1", "fp32/nvfp4",
    "fp16+sr/nvfp4", "nvfp4@layers=2", "five+sr", "scaled+sr", "fp32/scaled",  "scaled@heads=1-2"};

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("a model on the GPU has the host's bits with dense: invariant") {
    for (const std::string& name : kStates) CHECK_NOTHROW(precision(name));
    if (!test::gpu()) return;
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      for (ComputeType compute : {ComputeType::fp32, ComputeType::bf16}) {
        const auto host = open(name, Device::cpu, DenseMode::invariant, compute);
        const auto device = open(name, Device::cuda, DenseMode::invariant, compute);
        for (int64_t prompt : {int64_t{0}, int64_t{21}}) {
          const std::string what = std::string(name) +
                                   (compute == ComputeType::bf16 ? ", bf16" : "") + ", prompt " +
                                   std::to_string(prompt);
          StateSet a = make_states(*host, kStates, prompt);
          StateSet b = make_states(*device, kStates, prompt);
          const std::vector<int32_t> tokens = some_tokens(150);
          const auto expected = run(*host, a, tokens, {37, 1, 70});
          const auto got = run(*device, b, tokens, {37, 1, 70});
          for (size_t r = 0; r < kStates.size(); ++r) {
            check_equal_bits(got[r], expected[r], what + ", " + kStates[r]);
            for (size_t l = 0; l < a.stores().size(); ++l) {
              const int row = static_cast<int>(r);
              const StateStore& x = *a.stores()[l];
              const StateStore& y = *b.stores()[l];
              const size_t size = static_cast<size_t>(x.shape().state.elements());
              std::vector<float> want(size), have(size);
              for (int h = 0; h < x.shape().heads; ++h) {
                CHECK(x.pending(row, h) == y.pending(row, h));
                for (StateRole role : {StateRole::recurrence, StateRole::read}) {
                  x.decode(row, h, role, want.data());
                  y.decode(row, h, role, have.data());
                  check_equal_bits(have, want, what + ", state of " + kStates[r]);
                }
              }
              CHECK(x.health(row).encode.elements == y.health(row).encode.elements);
              CHECK(x.health(row).encode.vanished == y.health(row).encode.vanished);
            }
          }
        }
      }
    }
  }

  TEST_CASE("fast products on the GPU: a row's logits depend on no other row") {
    if (!test::gpu()) return;
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      for (ComputeType compute : {ComputeType::fp32, ComputeType::bf16}) {
        const auto model = open(name, Device::cuda, DenseMode::fast, compute);
        StateSet alone = make_states(*model, {"fp32"});
        StateSet all = make_states(*model, kStates);
        const std::vector<int32_t> tokens = some_tokens(400);
        const auto expected = run(*model, alone, tokens, {128, 3, 1});
        const auto got = run(*model, all, tokens, {128, 3, 1});
        check_equal_bits(got[0], expected[0], name);
        // The library's products and attention against the host's order, in FP32.
        if (compute == ComputeType::bf16) continue;
        const auto host = open(name, Device::cpu);
        StateSet slow = make_states(*host, {"fp32"});
        const auto exact = run(*host, slow, tokens, {128});
        // Two orders of a sum of 1,024 terms differ by about sqrt(1024) roundings, 2e-6 of the
        // terms' norm; about 30 products follow one another: 6e-5 of the largest logit, of which
        // three times are allowed.
        float worst = 0, most = 0;
        for (size_t i = 0; i < exact[0].size(); ++i) {
          worst = std::max(worst, std::fabs(exact[0][i] - got[0][i]));
          most = std::max(most, std::fabs(exact[0][i]));
        }
        CHECK(worst < 2e-4f * most);
        CHECK(worst > 0);
      }
    }
  }

  TEST_CASE("experts' products on the GPU, grouped and one by one, against FP64") {
    if (!test::gpu()) return;
    constexpr int kIn = 64, kOut = 24, kTokens = 17;
    const std::vector<int32_t> offsets = {0, 3, 3, 10, 11, 31};  // the second expert has none
    const size_t experts = offsets.size() - 1, slots = static_cast<size_t>(offsets.back());
    uint32_t seed = 5;
    // Multiples of 1/64 below 2: exact in BF16.
    const auto any = [&] {
      seed = seed * 1664525u + 1013904223u;
      return static_cast<float>(static_cast<int32_t>(seed >> 24) - 128) / 64.0f;
    };
    std::vector<std::vector<float>> weights(experts, std::vector<float>(kIn * kOut));
    std::vector<WeightView> views;
    const std::vector<float> no_bias;
    for (auto& w : weights) {
      for (float& value : w) value = any();
      views.push_back({w.data(), WeightType::fp32, kOut, kIn, kIn});
    }
    std::vector<float> x(kTokens * kIn);
    for (float& value : x) value = any();
    std::vector<int32_t> rows(slots);
    for (size_t s = 0; s < slots; ++s) rows[s] = static_cast<int32_t>((5 * s + 3) % kTokens);
    for (bool bf16 : {true, false}) {
      const auto backend = make_cuda_backend(true, bf16);
      const Buffer device_x(*backend, kTokens * kIn),
          y(*backend, static_cast<int64_t>(slots) * kOut);
      const Memory device_rows(*backend, slots * sizeof(int32_t));
      backend->upload(device_x.data(), x.data(), x.size() * sizeof(float));
      backend->upload(device_rows.data(), rows.data(), device_rows.bytes());
      ExpertProducts p;
      p.x = device_x.data();
      p.x_stride = kIn;
      p.rows = reinterpret_cast<const int32_t*>(device_rows.data());
      p.offsets = offsets;
      for (const WeightView& view : views) p.experts.push_back({&view, &no_bias});
      p.y = y.data();
      backend->linear({&p, 1});
      std::vector<float> got(slots * kOut);
      backend->download(got.data(), y.data(), got.size() * sizeof(float));
      for (size_t e = 0; e < experts; ++e) {
        for (int32_t s = offsets[e]; s < offsets[e + 1]; ++s) {
          for (int o = 0; o < kOut; ++o) {
            double sum = 0, size = 0;
            for (int i = 0; i < kIn; ++i) {
              const double term =
                  double{x[static_cast<size_t>(rows[static_cast<size_t>(s)] * kIn + i)]} *
                  double{weights[e][static_cast<size_t>(o * kIn + i)]};
              sum += term;
              size += std::fabs(term);
            }
            // FP32 sums of 64 terms, and the result's own rounding to BF16.
            const double bound = 64 * 0x1p-24 * size + (bf16 ? 0x1p-8 * std::fabs(sum) : 0);
            CHECK(std::fabs(got[static_cast<size_t>(s) * kOut + static_cast<size_t>(o)] - sum) <=
                  bound);
          }
        }
      }
    }
  }

  TEST_CASE("attention to a long past in parts: a row's logits depend on no other row") {
    if (!test::gpu()) return;
    const auto model = open("mini-gdn", Device::cuda, DenseMode::fast, ComputeType::bf16);
    const auto invariant = open("mini-gdn", Device::cuda, DenseMode::invariant, ComputeType::bf16);
    const std::vector<int32_t> tokens = some_tokens(6200);
    StateSet alone = make_states(*model, {"fp32"}), beside = make_states(*model, {"fp32", "fp8"}),
             whole = make_states(*invariant, {"fp32"});
    const auto expected = run(*model, alone, tokens, {512});
    const auto got = run(*model, beside, tokens, {512});
    check_equal_bits(got[0], expected[0], "6,200 tokens");
    // Against attention in one piece. Both round each operand to BF16 (2^-9); where 30 of those
    // follow one another, a logit moves by about sqrt(30) 2^-9 = 1 % of the largest, and no
    // logit by ten times that.
    const auto exact = run(*invariant, whole, tokens, {512});
    double sum = 0, most = 0;
    const size_t from = size_t{4608} * static_cast<size_t>(model->spec().vocabulary);
    for (size_t i = from; i < exact[0].size(); ++i) {
      sum += std::pow(exact[0][i] - got[0][i], 2);
      most = std::max<double>(most, std::fabs(exact[0][i]));
    }
    const double rms = std::sqrt(sum / static_cast<double>(exact[0].size() - from));
    MESSAGE("logits of 4,608 positions and more: rms " << rms << " of " << most);
    CHECK(rms < 0.01 * most);
    CHECK(rms > 0);
  }

  TEST_CASE("captured decoding has the bits of forward, one token a row") {
    if (!test::gpu()) return;
    // FP32 records before BF16 ones, and behind them.
    const std::vector<std::string> names = {"fp32@ring=fp32",
                                            "fp32",
                                            "fp16+sr",
                                            "fp8+sr",
                                            "nvfp4+sr",
                                            "nvfp4+sr@L=1",
                                            "fp32@L=1",
                                            "fp16+sr/nvfp4",
                                            "fp16+sr/nvfp4@gdn_fold=cached",
                                            "five+sr",
                                            "nvfp4+sr@ring=fp32;L=5",
                                            "fp32/nvfp4@flush_output=read"};
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      for (ComputeType compute : {ComputeType::fp32, ComputeType::bf16}) {
        const auto model = open(name, Device::cuda, DenseMode::invariant, compute);
        for (int64_t prompt : {int64_t{0}, int64_t{30}}) {
          compare_decoding(*model, names, prompt,
                           std::string(name) + ", prompt " + std::to_string(prompt));
        }
      }
    }
  }

  // What the small models have not: multipliers, two branches of a block, gates without a norm,
  // groups, tied embeddings, heads without rotary embedding.
  TEST_CASE("captured decoding of every dense reference model has the bits of forward") {
    if (!test::gpu()) return;
    for (const char* name :
         {"bamba-small", "falcon_h1-nonorm", "falcon_h1-norm", "mamba2-groups", "mamba2-tied",
          "nemotron_h-dense", "qwen3_5-dense", "qwen3_5-dense-hub"}) {
      const std::string folder = test::case_path(std::string("models-ref/") + name);
      if (folder.empty()) continue;
      for (ComputeType compute : {ComputeType::fp32, ComputeType::bf16}) {
        const auto model = open_folder(folder, Device::cuda, DenseMode::invariant, compute);
        compare_decoding(*model, {"fp32@ring=fp32", "fp16+sr/nvfp4", "fp32"}, 0, name);
      }
    }
  }

  // The products of both are the library's in BF16, of other shapes: an operand may round the other
  // way (2^-9), which moves a logit by about sqrt(30) 2^-9 = 1 % of the largest (see above).
  TEST_CASE("captured decoding with the library's products stays close to forward") {
    if (!test::gpu()) return;
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      const auto model = open_folder(mini(name), Device::cuda, DenseMode::fast, ComputeType::bf16,
                                     Products::together);
      DecoderOptions options;
      options.states = {precision("fp32")};
      options.baseline = precision("fp32");
      options.rows_per_state = 3;
      options.most_positions = 200;
      options.cache_positions = 600;
      Decoder decoder(*model, options);
      const std::vector<int32_t> tokens = some_tokens(100);
      StateSet states = make_states(*model, {"fp32"});
      run(*model, states, {tokens.begin(), tokens.begin() + 50}, {50});
      for (int row = 0; row < 3; ++row) {
        REQUIRE(decoder.reserve(0, 100) == row);
        decoder.admit(row, states, 0);
      }
      const auto expected = run(*model, states, tokens, {1}, 50);
      const auto vocabulary = static_cast<size_t>(model->spec().vocabulary);
      std::vector<float> logits(vocabulary);
      double sum = 0, most = 0;
      for (size_t t = 50; t < tokens.size(); ++t) {
        decoder.step(std::vector<int32_t>(3, tokens[t]));
        for (int row = 0; row < 3; ++row) {
          decoder.logits(row, logits.data());
          for (size_t v = 0; v < vocabulary; ++v) {
            const float want = expected[0][(t - 50) * vocabulary + v];
            sum += std::pow(logits[v] - want, 2);
            most = std::max<double>(most, std::fabs(want));
          }
        }
      }
      const double rms = std::sqrt(sum / static_cast<double>(150 * vocabulary));
      MESSAGE(name << ": rms " << rms << " of " << most);
      CHECK(rms < 0.01 * most);
    }
  }

  TEST_CASE("a decoder refuses what it cannot do, and keeps its rows apart") {
    if (!test::gpu()) return;
    const auto model = open("mini-gdn", Device::cuda);
    const auto options = [&](const std::string& state) {
      DecoderOptions o;
      o.states = {precision(state)};
      o.baseline = precision("fp32");
      o.rows_per_state = 2;
      o.most_positions = 100;
      o.cache_positions = 150;
      return o;
    };
    CHECK(Decoder::refusal(*model, options("nvfp4@layers=2")).has_value());
    CHECK(Decoder::refusal(*model, options("scaled+sr")).has_value());
    CHECK_THROWS_AS(Decoder(*model, options("scaled+sr")), std::invalid_argument);
    CHECK_THROWS_AS(Decoder(*model, options("nvfp4@span=layer")), std::invalid_argument);
    Decoder decoder(*model, options("nvfp4+sr"));
    CHECK_THROWS_AS(decoder.reserve(0, 101), std::invalid_argument);
    const int row = decoder.reserve(0, 100);
    CHECK(row == 0);
    StateSet states = make_states(*model, {"nvfp4+sr"});
    run(*model, states, some_tokens(10), {10});
    decoder.admit(row, states, 0);
    CHECK_THROWS_AS(decoder.admit(row, states, 0), std::invalid_argument);
    const std::vector<int32_t> bad = {4096000, 0};
    CHECK_THROWS_AS(decoder.step(bad), std::invalid_argument);
    CHECK_THROWS_AS(decoder.step(std::vector<int32_t>{1}), std::invalid_argument);
    decoder.release(row);
    CHECK(decoder.position(row) == -1);
    CHECK(decoder.reserve(0, 100) == 0);
  }

  TEST_CASE("states saved on the GPU continue there and on the host with the same bits") {
    if (!test::gpu()) return;
    const auto host = open("mini-gdn", Device::cpu);
    const auto device = open("mini-gdn", Device::cuda);
    const std::vector<std::string> names = {"fp32", "nvfp4+sr", "fp16+sr/nvfp4", "scaled+sr"};
    StateSet states = make_states(*device, names);
    const std::vector<int32_t> tokens = some_tokens(120);
    const std::vector<int32_t> begin(tokens.begin(), tokens.begin() + 75);
    run(*device, states, begin, {75});
    const std::vector<std::byte> saved = states.save();
    StateSet again = make_states(*device, names);
    again.restore(saved);
    for (int r = 0; r < states.rows(); ++r) {
      again.append_cache(r, states.save_cache(r, 0, 40));
      again.append_cache(r, states.save_cache(r, 40, 75));
    }
    const auto expected = run(*device, states, tokens, {30, 1}, 75);
    const auto got = run(*device, again, tokens, {30, 1}, 75);
    for (size_t r = 0; r < names.size(); ++r) check_equal_bits(got[r], expected[r], names[r]);
    CHECK(states.save() == again.save());
  }

  TEST_CASE("a speculation on the GPU leaves the host's bits") {
    if (!test::gpu()) return;
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      const auto host = open(name, Device::cpu);
      const auto device = open(name, Device::cuda);
      const std::vector<std::string> names = {"fp32", "nvfp4+sr", "fp16+sr/nvfp4", "scaled+sr"};
      StateSet a = make_states(*host, names);
      StateSet b = make_states(*device, names);
      const std::vector<int32_t> tokens = some_tokens(200);
      size_t position = 0;
      for (int step = 0; step < 20; ++step) {
        std::vector<int32_t> batch;
        for (size_t r = 0; r < names.size(); ++r) {
          batch.insert(batch.end(), tokens.begin() + static_cast<std::ptrdiff_t>(position),
                       tokens.begin() + static_cast<std::ptrdiff_t>(position) + 4);
        }
        const std::vector<int> lengths(names.size(), 4);
        const auto x = host->forward({batch, lengths}, a, AdvanceMode::verify).values();
        const auto y = device->forward({batch, lengths}, b, AdvanceMode::verify).values();
        check_equal_bits(y, x, std::string(name) + ", step " + std::to_string(step));
        const std::vector<int> accepted(names.size(), 1 + step % 4);
        a.commit(accepted);
        b.commit(accepted);
        position += static_cast<size_t>(1 + step % 4);
      }
    }
  }
}

}  // namespace replayeval
