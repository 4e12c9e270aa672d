// Whole files on disk: read at once, or replaced atomically with everything synced, with the
// system's reason in one line when that fails.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace replayeval {

/// What a run folder has of its run beside the parts.
inline constexpr const char* kManifest = "run.json";

/// The bytes of a file, none when it does not exist. Throws std::runtime_error when it cannot be
/// read.
std::optional<std::vector<std::byte>> read_file(const std::filesystem::path& path);

/// Writes `bytes` under a temporary name in the same folder, syncs file and folder, and renames to
/// `path`. Throws std::runtime_error ("<path>: cannot be written: No space left on device (...)");
/// the temporary file is removed and `path` is as before. A link is followed; what exists and is no
/// file (a device, a pipe) is written to instead.
void replace_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

/// As replace_file, but only if `path` does not exist; returns whether it was created. Of several
/// processes one succeeds.
bool create_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

/// Creates the folder and its parents, and checks that files can be created in it. Throws
/// std::runtime_error.
void make_writable_folder(const std::filesystem::path& path);

/// A name in the folder of `path` that no other call or process of any machine uses.
std::filesystem::path temporary_name(const std::filesystem::path& path);

/// Removes temporary files in `folder` that killed processes left: of this machine's dead
/// processes, and any not changed for a day.
void remove_stale_temporaries(const std::filesystem::path& folder);

/// Names this machine as far as process ids are comparable: host name, boot, process-id namespace.
const std::string& machine_name();

/// Start time of a process of this machine in clock ticks since boot, 0 when there is no such
/// process. Distinguishes a process from a later one with the same id.
unsigned long long process_start(int pid);

std::span<const std::byte> as_byte_span(const std::string& text);
std::string as_text(std::span<const std::byte> bytes);

}  // namespace replayeval
