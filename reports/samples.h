// Answers as JSON lines: written in the layout of lm-evaluation-harness's logged samples
// (`--log_samples`), and read from that layout or from plain lines of any engine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "reports/results.h"

namespace replayeval {

/// One answer from elsewhere, not graded.
struct Sample {
  size_t line = 0;               // in its file, from 1
  std::vector<std::string> ids;  // what may name the item, the likeliest first
  int64_t row = -1;              // of the data set, where the file has such a number
  int repeat = 0;
  std::string text;
  std::string finish_reason;       // stop | length; empty: not known
  int64_t tokens = -1;             // -1: not known
  std::vector<int32_t> token_ids;  // none: not known
  std::string prompt_sha256;       // empty: not known
};

/// Reads a file with one JSON object a line; empty lines are passed over.
///   plain    {"id", "text", "finish_reason", "tokens"} and, as known, "repeat", "token_ids",
///            "prompt" or its SHA-256 "prompt_sha256". `tokens` is a number, or the list of ids.
///   samples  lm-evaluation-harness: doc_id, doc, resps and prompt_hash are read; finish_reason,
///            tokens, token_ids and repeat where they are (write_samples() adds them). Of several
///            filters over one response the first is read.
/// Finish reasons of other engines are taken over: eos, eos_token, end_turn and stop_sequence are
/// stop, max_tokens is length. Throws std::runtime_error, `file:line: expected ..., got ...`, for a
/// line that is no JSON object, a missing field or one of another type, and a file without an
/// answer.
std::vector<Sample> read_samples(const std::filesystem::path& path);

/// Writes one file a task and state, `samples_TASK_STATE.jsonl` with characters that are no part of
/// a file's name replaced, into `folder`: doc_id, doc (id, category, level, option_order), target,
/// arguments, resps, filtered_resps, filter, metrics, doc_hash, prompt_hash, target_hash,
/// exact_match, and beside these state, repeat, finish_reason, tokens, token_ids, rule and stage.
/// `prompts` maps SHA-256 to text for those prompts that are at hand; where there is none, the
/// argument is null. Returns the files with their numbers of lines. Throws std::runtime_error.
std::vector<std::pair<std::filesystem::path, int64_t>> write_samples(
    const Report& report, const std::map<std::string, std::string>& prompts,
    const std::filesystem::path& folder);

}  // namespace replayeval
