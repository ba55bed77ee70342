#include "hobbit-threads.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

void hobbit_on_threads(int n, const std::function<void()> & work) {
    std::mutex mutex;
    std::exception_ptr error;
    const auto guarded = [&] {
        try {
            work();
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex);
            error = error ? error : std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    try {
        threads.reserve(n);
        for (int i = 1; i < n; ++i) {
            threads.emplace_back(guarded);
        }
    } catch (const std::exception &) { // no thread, no memory
        // those that have started share the work
    }
    guarded();
    for (std::thread & t : threads) {
        t.join();
    }
    if (error) {
        std::rethrow_exception(error);
    }
}
