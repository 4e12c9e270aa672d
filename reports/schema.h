// The HDF5 form of a report, schema `replayeval/1` (DESIGN.md section 6; every name is described in
// reports/SCHEMA.md).
#pragma once

#include <filesystem>

#include "reports/results.h"

namespace replayeval {

constexpr const char* kSchema = "replayeval/1";

/// Reads a report.h5. Throws std::runtime_error when the file cannot be read, is no report, or has
/// another schema.
Report read_report(const std::filesystem::path& path);

/// Writes `report` to `path`: under a temporary name first, synced, then renamed. Throws
/// std::runtime_error with the system's reason (disk full, not writable); `path` then still holds
/// what it held before.
void write_report(const Report& report, const std::filesystem::path& path);

}  // namespace replayeval
