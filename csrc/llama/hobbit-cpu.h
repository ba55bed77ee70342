// hobbit-cpu.h - products of a few tokens with experts in host memory: the CPU's part of a layer, or slots there.
//
// One operation for all projections of one input and both copies, instead of a product for each: with a few tokens
// an operation takes tens of microseconds, and every barrier between operations is a good part of that. So nothing is
// shared between threads: each quantizes the rows that it needs, and takes pieces of weights until none is left.

#pragma once

#include "engine.h"

#include "ggml.h"

#include <atomic>

struct ggml_context;
struct ggml_tensor;
struct ggml_type_traits_cpu;

// Found by name: the CPU back end may be a module of its own, the one of several that suits this processor.
const ggml_type_traits_cpu * hobbit_cpu_traits(ggml_type type);

struct hobbit_cpu_op {
    hob::engine * engine;
    bool    timed;      // the engine is told when the first operation of a layer begins and when down is done
    const ggml_tensor * bank[hob::MAX_PROJ][hob::N_COPIES]; // [n_in, n_out, n_matrices], all projections of one shape; null: no such copy
    int     plane;      // of route: matrices of the high copies, -1: none; the next one: of the low
    int     n_proj;
    bool    down;       // the layer's last projection: divided experts have a tail of columns; before it, of rows
    int64_t inner;      // divided experts' inner width; rows of every part (gate, up) of it. 0: none is divided
    int64_t x_rows;     // of x for one token: 1, or one for each of its experts, one after another
    int64_t x_stride;   // values between tokens
    std::atomic<int> next{ 0 };     // piece
    std::atomic<int> finished{ 0 }; // threads
};

// x: F32; route: planes (hobbit-route.h). Returns F32 [n_out, n_used, n_tokens, n_proj]: rows without a matrix, and what is not a
// divided expert's tail, are zero; or as onto has them, and the result is a view of it.
ggml_tensor * hobbit_cpu_product(ggml_context * ctx, hobbit_cpu_op & op, ggml_tensor * x, ggml_tensor * route, ggml_tensor * onto);
