// Number formats from YAML files: a description becomes a StateFormat. formats/README.md lists the
// keys.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "quant/state_format.h"

namespace replayeval {

/// Reads a format file. `name` is what the format is called in tables; empty: the key `name`, or
/// the file's stem. Files that it names (residual, fixed scales, library) are relative to it.
/// Throws std::invalid_argument, one line that begins with file:line, for a missing or malformed
/// file, an unknown key, and every broken rule.
std::shared_ptr<const StateFormat> load_format_file(const std::filesystem::path& path,
                                                    const std::string& name = "");

/// The same from text; `place` stands for the file's name in messages, `directory` is what relative
/// names start from.
std::shared_ptr<const StateFormat> parse_format(const std::string& text, const std::string& place,
                                                const std::filesystem::path& directory,
                                                const std::string& name = "");

/// A built-in name, or the path of a format file (anything with a '/' or ending in .yaml or .yml).
std::shared_ptr<const StateFormat> find_or_load_format(const std::string& name_or_path);

}  // namespace replayeval
