#include "host_cache.h"

#include <algorithm>

namespace hob {

host_cache::host_cache(const model_layout & layout, std::vector<block> blocks) {
    for (const layer_layout & l : layout.layers) {
        in_group_.push_back(l.in_group);
        group_.push_back(l.group);
    }
    parts_.resize(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
        const group_layout & g = layout.groups[i / N_COPIES];
        parts_[i].memory   = blocks[i];
        parts_[i].n_expert = g.n_expert;
        parts_[i].where.assign((size_t) g.n_layers * g.n_expert, -1);
        parts_[i].entries.resize(blocks[i].n);
        for (int e = 0; e < blocks[i].n; ++e) {
            parts_[i].entries[e].age = parts_[i].ages.insert(parts_[i].ages.end(), e);
        }
    }
}

size_t host_cache::entry_bytes(const group_layout & g, int copy) { return (g.expert_bytes(copy) + IO_ALIGN - 1) / IO_ALIGN * IO_ALIGN; }

std::vector<host_cache::block> host_cache::divide(const model_layout & layout, uint64_t bytes, uint64_t & total) {
    const auto least = [](const group_layout & g) { return std::min(g.n_experts_total(), MIN_ENTRIES); };
    double taken = 0.0, more = 0.0; // by the least, and by all others
    for (const group_layout & g : layout.groups) {
        for (int c = 0; c < N_COPIES; ++c) {
            taken += (double) least(g) * (double) entry_bytes(g, c);
            more  += (double) (g.n_experts_total() - least(g)) * (double) entry_bytes(g, c);
        }
    }
    const double share = more > 0.0 ? std::min(1.0, std::max(0.0, (double) bytes - taken) / more) : 0.0;
    std::vector<block> blocks;
    total = 0;
    for (const group_layout & g : layout.groups) {
        for (int c = 0; c < N_COPIES; ++c) {
            block b;
            b.stride = entry_bytes(g, c);
            b.n      = least(g) + (int) (share * (g.n_experts_total() - least(g)));
            total += (uint64_t) b.n * b.stride;
            blocks.push_back(b);
        }
    }
    return blocks;
}

bool host_cache::serve(load_request & r) {
    const int layer = r.layer_index;
    part & p = parts_[group_[layer] * N_COPIES + r.copy];
    int & where = p.where[(size_t) in_group_[layer] * p.n_expert + r.expert];
    if (where >= 0) {
        entry & e = p.entries[where];
        if (!e.busy.done()) {
            return false; // on its way for somebody else: rare, and not worth waiting for
        }
        if (!e.busy.failed) {
            r.host      = p.memory.base + (size_t) where * p.memory.stride;
            take(r, p, e);
            return true;
        }
        e.layer = e.expert = -1;
        where   = -1;
        p.ages.splice(p.ages.begin(), p.ages, e.age);
    }
    const auto oldest = std::find_if(p.ages.begin(), p.ages.end(), [&](int i) { return p.entries[i].busy.done(); });
    if (oldest == p.ages.end()) {
        return false;
    }
    const int best = *oldest;
    entry & e = p.entries[best];
    if (e.layer >= 0) {
        p.where[(size_t) in_group_[e.layer] * p.n_expert + e.expert] = -1;
    }
    e.layer  = layer;
    e.expert = r.expert;
    where    = best;
    r.stage  = p.memory.base + (size_t) best * p.memory.stride;
    take(r, p, e);
    return false;
}

// Busy from now on: other loads are given entries before this one is submitted, which sets the true numbers.
void host_cache::take(load_request & r, part & p, entry & e) {
    r.host_busy = &e.busy;
    p.ages.splice(p.ages.end(), p.ages, e.age);
    e.busy.pending[PART_EARLY].store(1, std::memory_order_relaxed);
}

bool host_cache::consistent() const {
    for (const part & p : parts_) {
        int held = 0;
        for (size_t i = 0; i < p.entries.size(); ++i) {
            const entry & e = p.entries[i];
            if (e.layer >= 0) {
                held++;
                if (p.where[(size_t) in_group_[e.layer] * p.n_expert + e.expert] != (int) i) {
                    return false;
                }
            }
        }
        if (held != std::count_if(p.where.begin(), p.where.end(), [](int w) { return w >= 0; })) {
            return false;
        }
    }
    return true;
}

} // namespace hob
