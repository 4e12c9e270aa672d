// SHA-256 of bytes and files, and the stream number that a document or item draws its random bits from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace replayeval {

/// Lower-case hexadecimal SHA-256 of the bytes.
std::string sha256_hex(std::string_view bytes);

/// Lower-case hexadecimal SHA-256 of a file's bytes. Throws std::runtime_error when it cannot be read.
std::string sha256_file(const std::filesystem::path& path);

/// Low 30 bits of the first 4 bytes (big-endian) of SHA-256 of `id` (UTF-8): DESIGN.md section 1, `stream`.
uint32_t stream_of(std::string_view id);

}  // namespace replayeval
