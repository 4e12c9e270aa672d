// Text as printf writes it.
#pragma once

#include <cstdio>
#include <string>

namespace replayeval {

/// At most 255 characters of it.
template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

}  // namespace replayeval
