// hobbit-sidecar.h - reading a sidecar (docs/format.md): where every copy of every expert is.

#pragma once

#include "layout.h"

#include "ggml.h"

#include <string>
#include <vector>

// One expert tensor of the model, in both precisions.
struct hobbit_expert_tensor {
    std::string name;            // as in the source: blk.N.ffn_up_exps.weight
    int64_t     ne[3];           // n_in, n_out, n_expert
    ggml_type   type[hob::N_COPIES];
    int         file[hob::N_COPIES];
    uint64_t    offset[hob::N_COPIES];
    std::vector<uint32_t> crc[hob::N_COPIES]; // checksum.h; empty: the file has none
    int         layer;           // index into hobbit_sidecar::layers
    int         proj;
};

struct hobbit_sidecar_layer {
    int block;               // N of blk.N
    int tensors[hob::MAX_PROJ]; // indices into hobbit_sidecar::tensors
    int n_proj;
};

struct hobbit_sidecar {
    std::string path;
    std::string pair_id;
    std::vector<std::string> files; // [0] is the sidecar itself
    uint32_t crc_chunk = 0;         // bytes that one checksum covers at most; 0: the file has none
    std::vector<hobbit_expert_tensor> tensors;
    std::vector<hobbit_sidecar_layer> layers;
};

// Throws std::runtime_error with one sentence. Every offset and size is checked against the files before
// anything is read from them.
hobbit_sidecar hobbit_read_sidecar(const std::string & path);

// What gguf_init_from_file() does not tell when it gives nothing: the file cannot be opened or read, or it is no GGUF.
std::string hobbit_why_not_gguf(const std::string & path);

// FNV-1a of the first n bytes of a file.
uint64_t hobbit_header_fnv(const std::string & path, uint64_t n);
