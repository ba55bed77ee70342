#include "budget.h"

#include "ahead.h"
#include "storage.h"

#include <algorithm>
#include <cmath>

namespace hob {

budget measure(const model_layout & layout, const hobbit_params & params, uint64_t record_bytes) {
    budget b;
    const size_t piece = layout.piece_bytes(); // per thread: scratch, and a landing place for memory the CPU cannot write
    b.staging = params.n_io_threads * (storage::scratch_bytes(piece) + piece);
    b.records = record_bytes;
    b.floor   = b.staging + b.records;
    for (const group_layout & g : layout.groups) {
        b.floor += g.n_used * g.expert_bytes(COPY_HIGH) + low_floor(g) * g.expert_bytes(COPY_LOW);
        b.high  += (uint64_t) g.n_experts_total() * g.expert_bytes(COPY_HIGH);
        b.low   += (uint64_t) g.n_experts_total() * g.expert_bytes(COPY_LOW);
    }
    return b;
}

std::string divide(model_layout & layout, const hobbit_params & params, budget & b) {
    switch (params.budget_kind) {
        case HOBBIT_BUDGET_BYTES:    b.total = params.cache_bytes; break;
        case HOBBIT_BUDGET_AT_LEAST: b.total = std::max(params.cache_bytes, b.floor); break;
        case HOBBIT_BUDGET_FRACTION: b.total = (uint64_t) std::llround(params.cache_fraction * (double) b.high); break;
        case HOBBIT_BUDGET_DEVICE:   break; // the caller knows the devices
        default:                     b.total = b.floor; break;
    }
    if (b.total < b.floor) {
        return "cache_bytes is " + std::to_string(b.total) + ", but one step can need " + std::to_string(b.floor) +
               " bytes (the experts of one token in each group of layers, and the buffers): give at least that";
    }

    uint64_t left = b.total - b.floor;
    const uint64_t spare = left;
    for (group_layout & g : layout.groups) {
        const uint64_t bytes_high = g.expert_bytes(COPY_HIGH);
        const uint64_t bytes_low  = g.expert_bytes(COPY_LOW);
        const uint64_t all   = (uint64_t) g.n_experts_total();
        const double   share = (double) spare * ((double) all * (double) bytes_high / (double) b.high);

        g.n_slots[COPY_HIGH] = g.n_used;
        g.n_slots[COPY_LOW]  = low_floor(g);
        // low copies that are loaded ahead need slots, too
        const int ahead = params.prefetch_copy == HOBBIT_PREFETCH_HIGH || params.t1 >= 1.0f ? 0 : params.prefetch < 0 ? MAX_AHEAD : params.prefetch;
        const uint64_t for_ahead = std::min<uint64_t>((uint64_t) ahead * low_floor(g), (uint64_t) (share / 2.0) / bytes_low);
        const uint64_t more_low  = std::min<uint64_t>(std::max((uint64_t) (share * params.low_fraction) / bytes_low, for_ahead), all - g.n_slots[COPY_LOW]);
        const uint64_t more_high = std::min<uint64_t>((uint64_t) (share - (double) (more_low * bytes_low)) / bytes_high, all - g.n_slots[COPY_HIGH]);
        g.n_slots[COPY_LOW]  += (int) more_low;
        g.n_slots[COPY_HIGH] += (int) more_high;
        left -= more_low * bytes_low + more_high * bytes_high;
    }
    // what rounding left over: one slot at a time to the group with the smallest part of its experts in slots
    for (;;) {
        group_layout * poorest = nullptr;
        for (group_layout & g : layout.groups) {
            if (g.n_slots[COPY_HIGH] < g.n_experts_total() && g.expert_bytes(COPY_HIGH) <= left &&
                (!poorest || (int64_t) g.n_slots[COPY_HIGH] * poorest->n_experts_total() < (int64_t) poorest->n_slots[COPY_HIGH] * g.n_experts_total())) {
                poorest = &g;
            }
        }
        if (!poorest) {
            break;
        }
        poorest->n_slots[COPY_HIGH]++;
        left -= poorest->expert_bytes(COPY_HIGH);
    }
    for (const group_layout & g : layout.groups) {
        for (int c = 0; c < N_COPIES; ++c) {
            b.slots += (uint64_t) g.n_slots[c] * g.expert_bytes(c);
        }
    }
    return "";
}

} // namespace hob
