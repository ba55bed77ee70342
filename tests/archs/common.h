// What test-llama-archs.cpp uses of llama.cpp's common library, so that it need not be built: the fixtures run without it.
#pragma once

#include "llama.h"
#include "llama-cpp.h"

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

struct common_batch { // only its backend tests make batches
    explicit common_batch(llama_context *) {}
    void add(llama_token, llama_pos, llama_seq_id, bool) { abort(); }
    void clear() { abort(); }
    llama_batch_ext * get() { abort(); }
};

inline void common_init() {}
