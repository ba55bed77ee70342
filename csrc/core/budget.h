// budget.h - from a number of bytes to numbers of slots.

#pragma once

#include "layout.h"

#include <string>

namespace hob {

struct budget {
    uint64_t total   = 0; // in force
    uint64_t floor   = 0; // the smallest legal one
    uint64_t slots   = 0; // of the total, in slots
    uint64_t staging = 0;
    uint64_t records = 0;
    uint64_t high    = 0; // all experts at high precision
    uint64_t low     = 0;

    // how misses are served
    int      miss       = HOBBIT_MISS_FETCH;
    uint64_t host       = 0;   // bytes of copies in host memory
    bool     host_pinned = false;
    bool     unified     = false; // slots are host memory that a device computes with
    uint64_t slots_on_host  = 0;     // bytes of them that are host memory
    bool     slots_hold_all = false; // every expert gets a slot on a device and stays: there is nothing to fetch
    double   link_speed = 0.0; // bytes/s
    double   cpu_speed  = 0.0;
};

// Largest number of low copies that one token can need: rank 0 is always high.
inline int low_floor(const group_layout & g) { return g.n_used > 1 ? g.n_used - 1 : 0; }

// Sizes and the floor of a layout; total stays 0. record_bytes: what the bookkeeping takes.
budget measure(const model_layout & layout, const hobbit_params & params, uint64_t record_bytes);

// Fill in n_slots of every group and the rest of b; with HOBBIT_BUDGET_DEVICE, b.total is given. Every group gets
// its floor (the experts of one token, all high; and all but rank 0 low); what is left is divided in proportion to
// the groups' bytes, low_fraction of it for low copies. Returns "" or why the budget is refused.
std::string divide(model_layout & layout, const hobbit_params & params, budget & b);

} // namespace hob
