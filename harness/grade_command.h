// `replayeval grade`: grades answers of other engines into a report, and grades stored answers
// again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace replayeval {

struct GradeOptions {
  std::string run;                   // grade again: a run folder or report.h5
  std::vector<std::string> imports;  // or: files of answers,
  std::vector<std::string> states;   // and for each the name of the state that gave them
  std::vector<std::string> tasks;    // files or names of tasks; one for an import
  std::string data;                  // path of the task's data, instead of the task's own
  std::string model;     // folder, for its chat template and tokenizer where the task uses them
  std::string label;     // what the report calls the model of imported answers
  std::string baseline;  // name of the state others are compared with; the first unless given
  uint64_t seed = 1;     // of option orders
  bool allow_prompts = false;  // import answers to other prompts than the task's
  std::string out;             // the report to write
};

/// With `imports`: reads each file (reports/samples.h), finds its items in the task by id, and by
/// prompt where the file states a hash, grades the answers and writes the report `out`, with one
/// state a file and the items that any file answers; tells the accuracies. With `run`: grades
/// stored answers again by the task files as they are now, tells which verdicts changed, and
/// writes `out` if given. Returns what to print. Throws std::invalid_argument for a wrong request
/// (among it unknown and repeated ids, and prompts that are not the task's, with their counts), and
/// std::runtime_error for files that cannot be read or written.
std::string grade_answers(const GradeOptions& options);

}  // namespace replayeval
