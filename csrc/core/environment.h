// environment.h - load settings from variables of the environment, for programs that know nothing of this one.

#pragma once

#include "hobbit.h"

#include <cstdint>
#include <string>
#include <vector>

namespace hob {

// Bytes of "8GiB", "8 GB", "512MiB", "1.5G" or "4096"; false for anything else. KiB, MiB, GiB, TiB and the bare letters
// are powers of 1024, KB, MB, GB, TB powers of 1000; case and blanks do not matter (hobbit_cpp/memory.py, parse_bytes).
bool parse_bytes(const std::string & text, uint64_t & out);

// Settings from variables HOBBIT_NAME=VALUE, written over p: names and values are those of hobbit serve (docs/tools.md).
//   variables  "NAME=VALUE", null at the end, as environ has them
//   used       out: the variables that were taken, as they are
//   unknown    out: names that begin with HOBBIT_ and say nothing to any part of this project
// Returns what is wrong in one sentence, "" if nothing.
std::string from_environment(const char * const * variables, hobbit_params & p, std::vector<std::string> & used, std::vector<std::string> & unknown);

} // namespace hob
