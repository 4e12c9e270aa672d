#include "harness/command_line.h"

int main(int argc, char** argv) { return replayeval::run_command_line(argc, argv); }
