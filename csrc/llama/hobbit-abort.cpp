#include "hobbit-abort.h"

#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

namespace {

thread_local int      depth = 0;
std::mutex            mutex;
int                   n_scopes = 0; // of all threads
ggml_abort_callback_t before = nullptr;

// ggml calls this on the thread that failed and aborts if it returns. The exception passes through frames of C, which
// compilers give unwind tables on all platforms that we build for; the tests load such files.
void on_abort(const char * message) {
    if (depth > 0) {
        const char * colon = strchr(message, ':');
        const char * name  = message;
        for (const char * p = message; colon && p < colon; ++p) {
            name = *p == '/' ? p + 1 : name;
        }
        throw std::runtime_error(std::string("llama.cpp cannot use this file: ") + name);
    }
    ggml_abort_callback_t other;
    {
        std::lock_guard<std::mutex> lock(mutex);
        other = before;
    }
    if (other) {
        other(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

} // namespace

hobbit_no_abort::hobbit_no_abort() {
    std::lock_guard<std::mutex> lock(mutex);
    if (n_scopes++ == 0) {
        before = ggml_set_abort_callback(on_abort);
    }
    depth++;
}

hobbit_no_abort::~hobbit_no_abort() {
    std::lock_guard<std::mutex> lock(mutex);
    depth--;
    if (--n_scopes == 0) {
        ggml_set_abort_callback(before);
        before = nullptr;
    }
}
