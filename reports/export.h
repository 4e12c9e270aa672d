// A run's figures in open formats, CSV and Parquet: one row a state and position, one a state and
// answer.
#pragma once

#include <filesystem>

#include "reports/results.h"

namespace replayeval {

/// Writes document,position,token,state,kl,nll,top1 to `path`, ordered by document, position and
/// state; only positions that were measured. Numbers are the shortest that read back to the same
/// FP32 value, in nats; "nan", "inf": not finite; empty: no value (nll without a next token, top1
/// at non-finite logits). The file is replaced as a whole; returns the number of lines below the
/// header. Throws std::runtime_error with the system's reason when it cannot be written.
int64_t write_positions_csv(const Report& report, const std::filesystem::path& path);

/// Writes task,item,category,level,repeat,state,gold,extracted,correct,finish_reason,tokens,rule,
/// stage,seconds,prompt_sha256 to `path`, ordered by state and as answered; `extracted` is empty
/// where no answer was found. Throws and returns as above.
int64_t write_answers_csv(const Report& report, const std::filesystem::path& path);

/// The rows and columns of the CSV files as Parquet: FP32 figures, null where the CSV is empty, and
/// of answers also `text` and the lists `token_ids` and `margins`. Throw and return as above.
int64_t write_positions_parquet(const Report& report, const std::filesystem::path& path);
int64_t write_answers_parquet(const Report& report, const std::filesystem::path& path);

}  // namespace replayeval
