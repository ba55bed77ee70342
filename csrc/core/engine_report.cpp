// engine_report.cpp - settings, statistics, traces: the engine's side that does not serve a token.

#include "engine.h"

#include <algorithm>
#include <cstring>

namespace hob {

void engine::set_thresholds(float t1, float t2) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    params_.t1 = t1;
    params_.t2 = t2;
}

void engine::set_policy(int32_t kind, const float * weights) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    policy_ = make_policy(kind);
    for (pool & p : pools_) {
        p.reorder();
    }
    params_.policy = kind;
    if (weights) {
        std::copy(weights, weights + 4, params_.policy_weights);
    }
}

void engine::set_policy(std::unique_ptr<policy> own) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    policy_ = std::move(own);
    for (pool & p : pools_) {
        p.reorder();
    }
}

void engine::set_hooks(const hobbit_hooks & hooks, hobbit * handle) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    hooks_  = hooks;
    handle_ = handle;
}

void engine::set_abort(hobbit_abort_fn ask, void * user) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    abort_      = ask;
    abort_user_ = user;
}

hobbit_params engine::params() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return params_;
}

hobbit_info engine::info() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    hobbit_info i = {};
    i.budget_bytes  = budget_.total;
    i.floor_bytes   = budget_.floor;
    i.slot_bytes    = budget_.slots;
    i.staging_bytes = budget_.staging;
    i.record_bytes  = budget_.records;
    i.high_bytes    = budget_.high;
    i.low_bytes     = budget_.low;
    i.n_layers      = (int32_t) layout_.layers.size();
    i.n_groups      = (int32_t) layout_.groups.size();
    i.direct_io     = files_->direct();
    i.miss          = budget_.miss;
    i.host_bytes    = budget_.host;
    i.host_pinned   = budget_.host_pinned;
    i.unified       = budget_.unified;
    if (budget_.cpu_speed > 0.0) {
        i.link_speed = budget_.link_speed > 0.0 ? speeds_.link() : 0.0;
        i.cpu_speed  = speeds_.cpu(COPY_HIGH);
    }
    for (const group_layout & g : layout_.groups) {
        i.n_expert      = std::max(i.n_expert, g.n_expert);
        i.n_expert_used = std::max(i.n_expert_used, g.n_used);
    }
    return i;
}

bool engine::group_info(int group, hobbit_group_info & out) {
    if (group < 0 || group >= (int) layout_.groups.size()) {
        return false;
    }
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const group_layout & g = layout_.groups[group];
    out = {};
    out.high_expert_bytes = g.expert_bytes(COPY_HIGH);
    out.low_expert_bytes  = g.expert_bytes(COPY_LOW);
    out.n_layers          = g.n_layers;
    out.n_expert          = g.n_expert;
    out.n_expert_used     = g.n_used;
    out.high_slots        = g.n_slots[COPY_HIGH];
    out.low_slots         = g.n_slots[COPY_LOW];
    out.high_resident     = pools_[group * N_COPIES + COPY_HIGH].n_resident();
    out.low_resident      = pools_[group * N_COPIES + COPY_LOW].n_resident();
    return true;
}

bool engine::layer_stats(int layer, hobbit_stats & out) {
    if (layer < 0 || layer >= (int) stats_.size()) {
        return false;
    }
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    out = stats_[layer];
    return true;
}

hobbit_stats engine::stats() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    hobbit_stats sum = {};
    for (const hobbit_stats & s : stats_) {
        sum.tokens         += s.tokens;
        sum.requests       += s.requests;
        sum.wanted_high    += s.wanted_high;
        sum.wanted_low     += s.wanted_low;
        sum.wanted_skip    += s.wanted_skip;
        sum.hits_high      += s.hits_high;
        sum.hits_low       += s.hits_low;
        sum.misses_high    += s.misses_high;
        sum.misses_low     += s.misses_low;
        sum.cpu_high       += s.cpu_high;
        sum.cpu_low        += s.cpu_low;
        sum.skips          += s.skips;
        sum.upgrades       += s.upgrades;
        sum.loads_high     += s.loads_high;
        sum.loads_low      += s.loads_low;
        sum.evictions      += s.evictions;
        sum.prefetches     += s.prefetches;
        sum.prefetch_hits  += s.prefetch_hits;
        sum.bytes_read     += s.bytes_read;
        sum.bytes_prefetch += s.bytes_prefetch;
        sum.bytes_cpu      += s.bytes_cpu;
        sum.bytes_storage  += s.bytes_storage;
        sum.host_hits      += s.host_hits;
        sum.predicted_1    += s.predicted_1;
        sum.predicted_2    += s.predicted_2;
        sum.predicted_3    += s.predicted_3;
        sum.correct_1      += s.correct_1;
        sum.correct_2      += s.correct_2;
        sum.correct_3      += s.correct_3;
        sum.predicted_loads += s.predicted_loads;
        sum.useful         += s.useful;
        sum.late           += s.late;
        sum.bytes_predicted += s.bytes_predicted;
        sum.bytes_wasted   += s.bytes_wasted;
        sum.leaned         += s.leaned;
        sum.cpu_us         += s.cpu_us;
        sum.wait_us        += s.wait_us;
        sum.plan_us        += s.plan_us;
    }
    sum.graphs     = graphs_;
    sum.compute_us = std::max<int64_t>(0, graph_us_ - sum.wait_us - sum.plan_us);
    sum.read_us    = loader_.busy_us() - read_base_;
    return sum;
}

void engine::reset_stats() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::fill(stats_.begin(), stats_.end(), hobbit_stats());
    graphs_    = 0;
    graph_us_  = 0;
    read_base_ = loader_.busy_us();
}

std::string engine::trace_start(const std::string & path) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return trace_.start(path, info().n_expert_used, layout_);
}

std::string engine::trace_stop() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return trace_.stop();
}

bool engine::consistent() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return std::all_of(pools_.begin(), pools_.end(), [](const pool & p) { return p.consistent(); });
}

} // namespace hob
