// hobbit-threads.h - work of a load that threads share.

#pragma once

#include <functional>

// Runs work on this thread and on up to n - 1 others, as many as the system starts (limits on threads and memory), until all
// have returned. It divides what there is to do by itself. The first exception of any of them is thrown here.
void hobbit_on_threads(int n, const std::function<void()> & work);
