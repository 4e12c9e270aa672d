// The stored answers of a score run as documents for teacher forcing: `data: {kind: answers}`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "datasets/token_stream.h"
#include "datasets/tokenizer.h"
#include "harness/experiment.h"

namespace replayeval {

/// One document an answer, called "task/item/repeat": the prompt's tokens, then the answer's own
/// (its end token included). The stream of such a document is the answer's, so that a state draws
/// the random bits here that it drew there.
struct AnswerDocuments {
  LoadedDocuments loaded;
  std::vector<int64_t> prompt_tokens;  // [documents]
  std::string model_sha256;            // of the model that gave the answers
};

/// Reads the answers of experiment.data_state (its baseline's when empty) from the report or run
/// folder experiment.data.path, in order of item and repeat, as far as data.documents (the first n,
/// or ids) selects them and cut to data.tokens. Prompts are written again from the tasks that the
/// report names, and compared with its hashes: they are not stored. Throws std::invalid_argument
/// when the report holds no answers, has no such state, comes from another tokenizer, or when tasks
/// or data are not those of the report, and std::runtime_error for files that cannot be read.
AnswerDocuments load_answer_documents(const Experiment& experiment, const Tokenizer& tokenizer);

}  // namespace replayeval
