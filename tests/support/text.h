// What tests ask of texts and messages.
#pragma once

#include <exception>
#include <string>

namespace replayeval::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Message of the exception that `call` throws; empty when it throws none.
template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace replayeval::test
