// Generation on the mini models: stored greedy sequences, the same answers for any slots and
// company, agreement with teacher forcing, prompts computed once, where answers end.
#include "harness/generate.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <array>
#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "tests/gpu/gpu.h"

namespace replayeval {
namespace {

using Tokens = std::vector<int32_t>;

struct Mini {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Model> model;
  std::vector<Tokens> prompts;   // of greedy.json
  std::vector<Tokens> expected;  // greedy FP32 answers of another program, end token included
};

const Mini& mini(const std::string& name, Device device = Device::cpu,
                 DenseMode dense = DenseMode::invariant) {
  static std::map<std::tuple<std::string, Device, DenseMode>, Mini> all;
  Mini& m = all[{name, device, dense}];
  if (m.model) return m;
  const std::string folder = std::string(REPLAYEVAL_SOURCE_DIR) + "/models/" + name;
  m.tokenizer = load_tokenizer(folder);
  m.model = std::make_unique<Model>(
      Checkpoint::open(folder),
      ModelOptions{ComputeType::fp32, dense, DtClamp::forward, device, Products::together});
  std::ifstream stream(std::string(REPLAYEVAL_SOURCE_DIR) + "/tests/cases/models-mini/greedy.json");
  const nlohmann::json stored = nlohmann::json::parse(stream);
  for (const auto& entry : stored.at(name)) {
    m.prompts.push_back(entry.at("prompt").get<Tokens>());
    m.expected.push_back(entry.at("tokens").get<Tokens>());
  }
  return m;
}

StatePrecision precision(const std::string& text) {
  StateOptions defaults;
  defaults.seed = 1;
  return parse_state_precision(text, defaults);
}

/// Decoding a few rows of a small model is many short parallel regions: on a machine with other
/// work one thread is faster, and the bits are the same.
struct OneThread {
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before); }
  int before = omp_get_max_threads();
};

struct Job {
  std::vector<std::string> states = {"fp32"};
  std::vector<std::shared_ptr<const Prompt>> prompts;
  Sampling sampling;
  std::shared_ptr<const StopRule> stop;
  int64_t max_tokens = 640;
  int repeats = 1;
  GenerationOptions options;
};

uint32_t stream(size_t prompt, int repeat) {
  return stream_of("math/" + std::to_string(prompt) + "/" + std::to_string(repeat));
}

/// Answers by [prompt][repeat][state].
struct Answers {
  std::map<std::array<int, 3>, GenerationResult> by_key;
  GenerationCounts counts;
  int classes = 0;
  int64_t most_cache_bytes = 0;
};

Answers generate(const Mini& m, Job job) {
  const OneThread one_thread;
  std::vector<StatePrecision> states;
  for (const std::string& name : job.states) states.push_back(precision(name));
  job.options.seed = 1;
  job.options.end_tokens = m.tokenizer->eos_ids();
  Generator generator(*m.model, *m.tokenizer, states, precision("fp32"), job.options);
  const int64_t total =
      static_cast<int64_t>(job.prompts.size()) * job.repeats * static_cast<int64_t>(states.size());
  int64_t next = 0;
  Answers answers;
  const auto key = [&](int64_t tag) {
    const int64_t s = static_cast<int64_t>(states.size());
    return std::array<int, 3>{static_cast<int>(tag / s / job.repeats),
                              static_cast<int>(tag / s % job.repeats), static_cast<int>(tag % s)};
  };
  const bool complete = generator.run(
      [&]() -> std::optional<GenerationRequest> {
        if (next == total) return std::nullopt;
        const auto [prompt, repeat, state] = key(next);
        GenerationRequest request;
        request.tag = next++;
        request.state = state;
        request.prompt = job.prompts[static_cast<size_t>(prompt)];
        request.stream = stream(static_cast<size_t>(prompt), repeat);
        request.sampling = job.sampling;
        request.stop = job.stop;
        request.max_tokens = job.max_tokens;
        return request;
      },
      [&](GenerationResult&& result) {
        CHECK(answers.by_key.count(key(result.tag)) == 0);
        answers.by_key[key(result.tag)] = std::move(result);
      },
      [&](const GenerationCounts&) {
        answers.most_cache_bytes = std::max(answers.most_cache_bytes, generator.cache_bytes());
        return true;
      });
  CHECK(complete);
  CHECK(answers.by_key.size() == static_cast<size_t>(total));
  answers.counts = generator.counts();
  answers.classes = generator.prompt_classes();
  return answers;
}

std::shared_ptr<const Prompt> prompt_of(const Tokens& tokens, const std::string& group = {},
                                        int64_t shared = 0) {
  return std::make_shared<const Prompt>(Prompt{tokens, group, shared, false});
}

std::vector<std::shared_ptr<const Prompt>> short_prompts(const Mini& m, size_t count) {
  std::vector<std::shared_ptr<const Prompt>> prompts;
  for (size_t i = 12; i < 12 + count; ++i) prompts.push_back(prompt_of(m.prompts[i]));
  return prompts;
}

std::string difference(const GenerationResult& got, const GenerationResult& expected) {
  for (size_t i = 0; i < std::min(got.tokens.size(), expected.tokens.size()); ++i) {
    if (got.tokens[i] != expected.tokens[i]) {
      return "token " + std::to_string(i) + ": got " + std::to_string(got.tokens[i]) +
             ", expected " + std::to_string(expected.tokens[i]);
    }
    if (std::bit_cast<uint32_t>(got.margins[i]) != std::bit_cast<uint32_t>(expected.margins[i])) {
      return "margin " + std::to_string(i) + ": got " + std::to_string(got.margins[i]) +
             ", expected " + std::to_string(expected.margins[i]);
    }
  }
  if (got.tokens.size() != expected.tokens.size()) {
    return std::to_string(got.tokens.size()) + " tokens, expected " +
           std::to_string(expected.tokens.size());
  }
  if (got.text != expected.text) return "text: '" + got.text + "', expected '" + expected.text;
  if (got.finish != expected.finish) return "finish reason";
  return {};
}

void check_same(const Answers& got, const Answers& expected) {
  REQUIRE(got.by_key.size() == expected.by_key.size());
  for (const auto& [key, answer] : expected.by_key) {
    CAPTURE(key[0]);
    CAPTURE(key[1]);
    CAPTURE(key[2]);
    CHECK(difference(got.by_key.at(key), answer) == "");
  }
}

/// Logits of positions first .. tokens - 1 of one sequence in one call.
std::vector<float> teacher_forced(const Mini& m, const std::string& state, uint32_t stream_number,
                                  const Tokens& tokens, int64_t prompt, int64_t prefill_chunk,
                                  int64_t first) {
  StateSet states(*m.model, {{precision(state), stream_number, prompt, prefill_chunk}},
                  precision("fp32"), KernelForm::fast);
  const std::vector<int> lengths = {static_cast<int>(tokens.size())};
  const Hidden hidden = m.model->forward({tokens, lengths}, states);
  const int64_t count = static_cast<int64_t>(tokens.size()) - first;
  std::vector<float> logits(static_cast<size_t>(count * m.model->spec().vocabulary));
  m.model->lm_head(hidden, first, count, logits.data());
  return logits;
}

void check_teacher_forcing(const Mini& m, const Job& job, const Answers& answers) {
  const OneThread one_thread;
  const size_t vocabulary = static_cast<size_t>(m.model->spec().vocabulary);
  for (const auto& [key, answer] : answers.by_key) {
    CAPTURE(job.states[static_cast<size_t>(key[2])]);
    CAPTURE(key[0]);
    CAPTURE(key[1]);
    Tokens tokens = job.prompts[static_cast<size_t>(key[0])]->tokens;
    const int64_t prompt = static_cast<int64_t>(tokens.size());
    tokens.insert(tokens.end(), answer.tokens.begin(), answer.tokens.end() - 1);
    const uint32_t number = stream(static_cast<size_t>(key[0]), key[1]);
    const std::vector<float> logits = teacher_forced(
        m, job.states[static_cast<size_t>(key[2])], number, tokens,
        job.options.decode_prompt ? 0 : prompt, job.options.prefill_chunk, prompt - 1);
    size_t equal = 0;
    for (size_t i = 0; i < answer.tokens.size(); ++i) {
      const Choice choice = choose_token({logits.data() + i * vocabulary, vocabulary}, job.sampling,
                                         {1, number, prompt + static_cast<int64_t>(i)});
      equal += choice.token == answer.tokens[i] &&
               std::bit_cast<uint32_t>(choice.margin) == std::bit_cast<uint32_t>(answer.margins[i]);
    }
    CHECK(equal == answer.tokens.size());
  }
}

const std::vector<std::string> kStates = {"fp32", "fp16+sr", "fp16+sr/nvfp4", "nvfp4+sr",
                                          "nvfp4+sr@L=1"};
/// Largest margin, nats, of a token that differs where only the order of sums in products and
/// attention does: twice the 2e-4 of the largest logit (about 30) that device_test.cc derives; and,
/// as the codes that such a difference flips make a low-precision state another draw of its
/// roundings, six standard deviations of the difference of two draws, 6 sqrt(2) sqrt(2 KL) with the
/// mini-gdn's mean KL of expected.json (0, 3.3e-8, 1.1e-3, 1.3e-2, 6.9e-2).
const std::array<float, 5> kFastMargin = {0.012f, 0.014f, 0.41f, 1.4f, 3.2f};

TEST_CASE("greedy FP32 answers are the stored ones of an independent program") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    CAPTURE(name);
    const Mini& m = mini(name);
    REQUIRE(m.prompts.size() == 20);
    Job job;
    for (const Tokens& tokens : m.prompts) job.prompts.push_back(prompt_of(tokens));
    job.options.slots = 20;
    const Answers answers = generate(m, job);
    for (int i = 0; i < 20; ++i) {
      CAPTURE(i);
      const GenerationResult& answer = answers.by_key.at({i, 0, 0});
      const Tokens& expected = m.expected[static_cast<size_t>(i)];
      CHECK(answer.tokens == expected);
      CHECK(answer.finish == FinishReason::stop);
      CHECK(answer.text ==
            m.tokenizer->decode({expected.data(), expected.size() - 1}));  // without the end token
    }
  }
}

TEST_CASE("slots 1, 7 and 64 give the same answers, and teacher forcing agrees with them") {
  for (const char* name : {"mini-mamba2", "mini-gdn"}) {
    CAPTURE(name);
    const Mini& m = mini(name);
    Job job;
    job.states = kStates;
    job.prompts = short_prompts(m, 3);
    job.max_tokens = 45;
    job.options.slots = 7;
    const Answers expected = generate(m, job);
    CHECK(expected.counts.most_rows == 7);
    CHECK(expected.classes == 2);  // L = 16, and L = 1
    check_teacher_forcing(m, job, expected);
    job.options.slots = 64;
    const Answers wide = generate(m, job);
    CHECK(wide.counts.most_rows == 15);
    check_same(wide, expected);
    job.options.slots = 1;
    job.options.chunk_tokens = 19;
    check_same(generate(m, job), expected);
  }
}

TEST_CASE("sampled answers draw with (seed, item and repeat, position) in every state") {
  const Mini& m = mini("mini-gdn");
  Job job;
  job.states = {"fp32", "nvfp4+sr", "nvfp4+sr@L=1"};
  job.prompts = short_prompts(m, 2);
  job.sampling = {5, 30, 0.95};  // the models are sure of themselves at 1
  job.repeats = 2;
  job.max_tokens = 30;
  job.options.slots = 5;
  const Answers answers = generate(m, job);
  check_teacher_forcing(m, job, answers);
  CHECK(answers.by_key.at({0, 0, 0}).tokens != answers.by_key.at({0, 1, 0}).tokens);
}

TEST_CASE("the prompt may run in the state's own precision") {
  const Mini& m = mini("mini-gdn");
  Job job;
  job.states = {"nvfp4+sr", "nvfp4+sr@L=1"};
  job.prompts = short_prompts(m, 2);
  job.max_tokens = 12;
  job.options.slots = 3;
  const Answers handed_over = generate(m, job);
  job.options.decode_prompt = true;
  const Answers decoded = generate(m, job);
  check_teacher_forcing(m, job, decoded);
  CHECK(decoded.counts.copied == 0);
  CHECK(difference(decoded.by_key.at({0, 0, 1}), handed_over.by_key.at({0, 0, 1})) != "");
  job.options.decode_prompt = false;
  job.options.prefill_chunk = 40;
  const Answers chunked = generate(m, job);
  check_teacher_forcing(m, job, chunked);
  CHECK(difference(chunked.by_key.at({0, 0, 1}), handed_over.by_key.at({0, 0, 1})) != "");
}

TEST_CASE("prompts are computed once for all states, and what they share once for all items") {
  const Mini& m = mini("mini-mamba2");
  Job job;
  job.states = {"fp32", "nvfp4+sr", "fp16+sr/nvfp4", "fp32@L=1"};
  job.max_tokens = 3;
  job.options.slots = 6;
  // One question behind a long text in five variants, the last of which ends with the text.
  Tokens shots = m.prompts[0];
  std::vector<Tokens> prompts;
  for (int i = 0; i < 4; ++i) {
    prompts.push_back(shots);
    prompts.back().insert(prompts.back().end(), m.prompts[12].begin() + 1 + i, m.prompts[12].end());
  }
  prompts.push_back(shots);
  int64_t tokens = 0;
  for (const Tokens& prompt : prompts) {
    job.prompts.push_back(prompt_of(prompt));
    tokens += static_cast<int64_t>(prompt.size());
  }
  const Answers alone = generate(m, job);
  // Two classes compute all tokens but the last of each prompt; every answer that one itself.
  CHECK(alone.counts.prefilled == 2 * (tokens - 5) + 5 * 4);
  CHECK(alone.counts.copied == 4 * (tokens - 5));
  CHECK(alone.counts.generated == 5 * 4 * 3);

  job.prompts.clear();
  const int64_t common = static_cast<int64_t>(shots.size());
  for (const Tokens& prompt : prompts) job.prompts.push_back(prompt_of(prompt, "shots", common));
  const Answers shared = generate(m, job);
  check_same(shared, alone);
  // The last prompt has only common - 1 tokens to share: the common part is computed again.
  CHECK(shared.counts.prefilled ==
        2 * (common + (tokens - 5 - 4 * common - (common - 1)) + (common - 1)) + 5 * 4);
}

TEST_CASE("answers under way stay within the cache limit") {
  const Mini& m = mini("mini-mamba2");
  Job job;
  job.states = {"fp32", "nvfp4+sr", "fp32@L=1"};
  job.prompts = short_prompts(m, 3);
  job.max_tokens = 30;
  job.options.slots = 9;
  const Answers free = generate(m, job);
  CHECK(free.counts.most_rows == 9);
  // The longest prompt has 105 tokens: with its answer it needs 3 pages of 64 positions, without
  // 2. A page of each of the two attention layers holds 2 heads of 64 keys and values in FP32.
  const int64_t page = 2 * 64 * 2 * 2 * 64 * 4;
  CHECK(free.most_cache_bytes > 10 * page);
  for (int64_t pages : {10, 5}) {
    CAPTURE(pages);
    job.options.cache_bytes = pages * page;
    const Answers tight = generate(m, job);
    CHECK(tight.counts.most_rows < 9);
    CHECK(tight.most_cache_bytes <= pages * page);
    check_same(tight, free);
  }
  job.options.cache_bytes = 4 * page;
  CHECK_THROWS_AS(generate(m, job), std::runtime_error);
}

TEST_CASE("an answer ends at the end token, a stop text or the limit") {
  const Mini& m = mini("mini-gdn");
  Job job;
  job.prompts = {prompt_of(m.prompts[12])};
  const GenerationResult whole = generate(m, job).by_key.at({0, 0, 0});
  CHECK(whole.finish == FinishReason::stop);
  CHECK(whole.tokens.back() == 2);
  REQUIRE(whole.text.size() > 60);

  // A stop text that begins and ends inside tokens.
  const size_t at = 31;
  auto stop = std::make_shared<StopRule>();
  stop->stop = {"never seen", whole.text.substr(at, 9)};
  job.stop = stop;
  const GenerationResult cut = generate(m, job).by_key.at({0, 0, 0});
  CHECK(cut.finish == FinishReason::stop);
  CHECK(cut.text == whole.text.substr(0, whole.text.find(stop->stop[1])));
  CHECK(cut.tokens.size() < whole.tokens.size());
  CHECK(m.tokenizer->decode(cut.tokens).find(stop->stop[1]) != std::string::npos);

  // One that never comes.
  auto never = std::make_shared<StopRule>();
  never->stop = {"\n\nProblem:"};
  job.stop = never;
  CHECK(difference(generate(m, job).by_key.at({0, 0, 0}), whole) == "");
  job.max_tokens = 17;
  const GenerationResult limited = generate(m, job).by_key.at({0, 0, 0});
  CHECK(limited.finish == FinishReason::length);
  CHECK(limited.tokens == Tokens(whole.tokens.begin(), whole.tokens.begin() + 17));
  CHECK(whole.text.starts_with(limited.text));
}

TEST_CASE("stop texts across tokens, inside characters and in thinking sections") {
  const Mini& m = mini("mini-mamba2");
  struct Outcome {
    std::string text;
    bool ended = false;
    size_t tokens = 0;
  };
  const auto read = [&](const std::string& text, const StopRule& rule, bool opened = false) {
    AnswerText answer(*m.tokenizer, rule, opened);
    Outcome outcome;
    for (int32_t token : m.tokenizer->encode(text)) {
      ++outcome.tokens;
      if (answer.push(token)) {
        outcome.ended = true;
        break;
      }
    }
    if (!outcome.ended) outcome.ended = answer.finish();
    outcome.text = answer.text();
    return outcome;
  };
  CHECK(read("one two three", {}).text == "one two three");
  CHECK(read("one two three", {{"o t"}, ""}).text == "one tw");
  CHECK(read("one two three", {{"three", "two"}, ""}).text == "one ");
  CHECK(read("one two three", {{"three!", "hree"}, ""}).text == "one two t");
  CHECK_FALSE(read("one two three", {{"three!"}, ""}).ended);
  CHECK(read("aaab", {{"aab"}, ""}).text == "a");
  CHECK(read("snow \xE2\x98\x83 man", {{"\xE2\x98\x83"}, ""}).text == "snow ");
  // Nothing after the stop text was read.
  CHECK(read("stop. A longer rest of the text", {{"."}, ""}).tokens <
        m.tokenizer->encode("stop. A longer rest of the text").size());

  const StopRule thinking{{"\n\n"}, "</think>"};
  CHECK(read("a\n\nb</think>c\n\nd", thinking, true).text == "a\n\nb</think>c");
  CHECK(read("<think>a\n\nb</think>c\n\nd", thinking).text == "<think>a\n\nb</think>c");
  CHECK(read("\n<think>\n\nb</think>c\n\nd", thinking).text == "\n<think>\n\nb</think>c");
  CHECK(read("a\n\nb</think>c\n\nd", thinking).text == "a");
  CHECK(read("a</think>\n\nb", thinking, true).text == "a</think>");
  CHECK_FALSE(read("<think>a\n\nb", thinking).ended);
  CHECK_FALSE(read("<thi", thinking).ended);
  CHECK(read("<thi\n\n", thinking).text == "<thi");
  CHECK(opens_thinking("Question?\n<think>\n", "</think>"));
  CHECK_FALSE(opens_thinking("Question?\n<think>\n</think>\n", "</think>"));
  CHECK_FALSE(opens_thinking("Question?", ""));
  CHECK_THROWS_AS(read("a", {{""}, ""}), std::invalid_argument);
}

TEST_CASE("a run that is told to stop stops, and wrong requests are refused") {
  const Mini& m = mini("mini-mamba2");
  GenerationOptions options;
  options.slots = 2;
  const OneThread one_thread;
  Generator generator(*m.model, *m.tokenizer, {precision("fp32")}, precision("fp32"), options);
  int given = 0, taken = 0;
  GenerationRequest request;
  request.prompt = prompt_of(m.prompts[12]);
  request.max_tokens = 5;
  const auto supply = [&]() -> std::optional<GenerationRequest> {
    if (given == 6) return std::nullopt;
    ++given;
    return request;
  };
  const auto sink = [&](GenerationResult&&) { ++taken; };
  CHECK_FALSE(generator.run(supply, sink, [&](const GenerationCounts&) { return taken < 2; }));
  CHECK(taken == 2);
  CHECK(generator.run(supply, sink));  // and goes on with what is left
  CHECK(given == 6);
  request.max_tokens = 0;
  given = 0;
  CHECK_THROWS_AS(generator.run(supply, sink), std::invalid_argument);
  options.slots = 0;
  CHECK_THROWS_AS(
      Generator(*m.model, *m.tokenizer, {precision("fp32")}, precision("fp32"), options),
      std::invalid_argument);
}

TEST_SUITE("gpu") {
  TEST_CASE("captured steps on the GPU give the host's answers with dense: invariant") {
    if (!test::gpu()) return;
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      CAPTURE(name);
      const Mini& host = mini(name);
      const Mini& device = mini(name, Device::cuda);
      Job job;
      job.states = kStates;
      job.prompts = short_prompts(host, 4);
      job.max_tokens = 60;
      const Answers expected = generate(host, job);
      CHECK(expected.counts.captured == 0);
      job.options.most_tokens = 400;
      for (int slots : {5, 12, 64}) {
        job.options.slots = slots;
        const Answers got = generate(device, job);
        CHECK(got.counts.captured > 0);
        CHECK(got.counts.most_rows >= std::min(slots, 20) / 5 * 5);
        check_same(got, expected);
      }
      job.options.most_tokens = 0;  // without the decoder
      const Answers forward = generate(device, job);
      CHECK(forward.counts.captured == 0);
      check_same(forward, expected);
    }
  }

  TEST_CASE("captured steps: drawn answers, decoded prompts, little cache") {
    if (!test::gpu()) return;
    const Mini& host = mini("mini-gdn");
    const Mini& device = mini("mini-gdn", Device::cuda);
    Job job;
    job.states = {"fp32", "nvfp4+sr@L=1", "fp16+sr/nvfp4"};
    job.prompts = short_prompts(host, 5);
    job.max_tokens = 40;
    job.sampling = {5, 30, 0.95};
    job.repeats = 2;
    for (bool decoded : {false, true}) {
      job.options.decode_prompt = decoded;
      job.options.most_tokens = 0;
      job.options.cache_bytes = 0;
      const Answers expected = generate(host, job);
      job.options.most_tokens = 300;
      job.options.slots = 9;
      const Answers got = generate(device, job);
      CHECK(got.counts.captured > 0);
      check_same(got, expected);
    }
  }

  TEST_CASE("dense: fast on the GPU: a token that differs had a small margin") {
    if (!test::gpu()) return;
    for (const char* name : {"mini-mamba2", "mini-gdn"}) {
      CAPTURE(name);
      const Mini& host = mini(name);
      const Mini& device = mini(name, Device::cuda, DenseMode::fast);
      Job job;
      job.states = kStates;
      job.prompts = short_prompts(host, 8);
      job.max_tokens = 200;
      const Answers expected = generate(host, job);
      job.options.most_tokens = 600;
      job.options.slots = 40;
      const Answers got = generate(device, job);
      for (const auto& [key, answer] : expected.by_key) {
        const GenerationResult& other = got.by_key.at(key);
        const size_t common = std::min(answer.tokens.size(), other.tokens.size());
        size_t t = 0;
        while (t < common && answer.tokens[t] == other.tokens[t]) ++t;
        if (t == common) continue;
        MESSAGE(job.states[static_cast<size_t>(key[2])] << ", prompt " << key[0] << ", token " << t
                                                        << ": margins " << answer.margins[t]
                                                        << " and " << other.margins[t]);
        CHECK(std::min(answer.margins[t], other.margins[t]) < kFastMargin[key[2]]);
      }
    }
  }
}

}  // namespace
}  // namespace replayeval
