// layout.h - what the engine knows of a model: its layers with routed experts, the groups that share
// pools, and where the bytes of every copy are. Plain data, filled once at load.

#pragma once

#include "hobbit.h"
#include "link.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hob {

static_assert(sizeof(void *) == 8, "files of experts are larger than 32 bits can address");
#ifdef __BYTE_ORDER__
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF files and traces are written and read as they are in memory");
#endif

// Copies of an expert; also the index of the pool that holds them.
enum copy_kind { COPY_HIGH = 0, COPY_LOW = 1, N_COPIES = 2 };

// An expert's matrices in the order they are needed: gate and up (or gate_up, or up alone), down last.
constexpr int MAX_PROJ = 3;

// Direct I/O wants file offset, length and address to be multiples of this.
constexpr size_t IO_ALIGN = 4096;

// Reads are cut into pieces of at most this size, so that one expert's load runs on several threads and an
// on-demand load never waits longer for a prefetch than one piece a thread takes.
constexpr size_t IO_CHUNK = 2u << 20;

// The same for copies from host memory that a thread makes: links are slow with small pieces.
constexpr size_t LINK_CHUNK = 16u << 20;

// Where one projection of a layer lies: expert e is [offset + e*bytes, offset + (e+1)*bytes) of file, and
// [e*bytes, (e+1)*bytes) of host where all copies are held in host memory.
struct slab {
    int             file   = -1;
    uint64_t        offset = 0;
    uint64_t        bytes  = 0; // one expert
    const uint8_t * host   = nullptr;
};

struct layer_layout {
    int  block    = -1; // block number in the model, for people
    int  group    = -1;
    int  in_group = -1; // index among the group's layers
    int  n_expert = 0;
    int  n_used   = 0;
    slab src[N_COPIES][MAX_PROJ];
};

// Slot s of a bank is [s*stride, s*stride + bytes) of its memory.
struct bank {
    uint8_t *     base   = nullptr; // address the CPU can write, or null: use write()
    size_t        stride = 0;
    device_link * link   = nullptr; // for copies from host memory that nobody waits for; may be null
    void *        memory = nullptr; // the link's name for the bank
    std::function<void(size_t offset, const void * data, size_t n)> write;
};

struct group_layout {
    int    n_layers = 0;
    int    n_expert = 0;
    int    n_used   = 0;
    int    n_proj   = 0;
    size_t proj_bytes[N_COPIES][MAX_PROJ] = {};
    int    n_slots[N_COPIES] = {};
    bool   on_device = false; // it computes with the slots, wherever they are
    bank   banks[N_COPIES][MAX_PROJ];

    // How an expert's inner width (rows of gate and up, columns of down) can be divided. n_units 1: not at all.
    int    n_units = 1;
    int    unit    = 0;                         // its rows or columns
    int    n_parts[MAX_PROJ] = { 1, 1, 1 };     // of an early projection: matrices of the inner width in it (gate and up merged: 2)
    size_t row_bytes[N_COPIES][MAX_PROJ] = {};

    size_t expert_bytes(int copy) const {
        size_t n = 0;
        for (int p = 0; p < n_proj; ++p) {
            n += proj_bytes[copy][p];
        }
        return n;
    }
    int  n_experts_total() const { return n_layers * n_expert; }
    bool has_link() const { return banks[COPY_HIGH][0].link != nullptr; }
};

struct model_layout {
    std::vector<layer_layout> layers;
    std::vector<group_layout> groups;
    std::vector<std::string>  files;

    // Size of the largest piece that is read.
    size_t piece_bytes() const {
        size_t n = IO_ALIGN;
        for (const group_layout & g : groups) {
            for (const auto & copy : g.proj_bytes) {
                for (size_t bytes : copy) {
                    n = bytes > n ? bytes : n;
                }
            }
        }
        return n < IO_CHUNK ? n : IO_CHUNK;
    }
};

} // namespace hob
