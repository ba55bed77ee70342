// free_memory.h - how much memory this process can still take.

#pragma once

#include <cstdint>
#include <string>

namespace hob {

// Bytes that could be taken now without anything being killed or swapped: the least of what the system has available and
// of what each level of this process's control group (v1 or v2) leaves, page cache counted as free. 0: unknown.
// The rule of hobbit_cpp/memory.py; root is another machine's for tests, with a / at its end.
uint64_t available_memory(const std::string & root = "/");

} // namespace hob
