// The HDF5 form of a batch of answers in a run folder, and the columns of answers that parts and
// report.h5 have in common.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "reports/hdf5_image.h"
#include "reports/results.h"

namespace replayeval {

/// What identifies an answer across runs whose lists of states and items grow.
struct StoredAnswerKey {
  std::string state_sha256;
  std::string task, item;
  int32_t repeat = 0;
};

/// Writes text, token ids, verdict and so on of `answers` as columns of `group`, but neither item
/// nor repeat. Does nothing for no answers. A text ends at a NUL in HDF5: see storable_text.
void write_answer_columns(Hdf5Writer& file, const std::string& group,
                          std::span<const Answer> answers);
/// Reads them back; `item` and `repeat` of the answers stay 0.
std::vector<Answer> read_answer_columns(const Hdf5Reader& file, const std::string& group);

/// `text` with each NUL replaced by U+FFFD, as HDF5 can hold it.
std::string storable_text(std::string text);

/// Keys and answers, index by index, in `/answers`.
void write_answer_rows(Hdf5Writer& file, std::span<const StoredAnswerKey> keys,
                       std::span<const Answer> answers);
std::vector<StoredAnswerKey> read_answer_keys(const Hdf5Reader& file);

/// Empty when two answers agree in everything but the seconds, otherwise what differs first, with
/// both values.
std::string answer_difference(const Answer& stored, const Answer& computed);

}  // namespace replayeval
