#include "engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace hob {

// Ubatches of at least this many tokens are prompt processing: they want nearly every expert once.
static constexpr int BULK_TOKENS = 32;

// Waves of a batch whose experts would all fit at once: enough to load while computing. For a few tokens
// that pays where their experts take longer to load than a wave's extra nodes to run.
static constexpr int    BULK_WAVES     = 4;
static constexpr int    PIPELINE_WAVES = 3;
static constexpr size_t PIPELINE_BYTES = 8u << 20;

engine::engine(model_layout layout, const hobbit_params & params, const budget & b, std::unique_ptr<storage> files)
    : layout_(std::move(layout)), params_(params), budget_(b), files_(std::move(files)), records_(layout_),
      policy_(make_policy(params.policy)), stats_(layout_.layers.size()),
      loader_(*files_, params.n_io_threads, layout_.piece_bytes()) {
    if (!policy_) {
        throw std::runtime_error("policy " + std::to_string(params.policy) + " is unknown");
    }
    for (size_t g = 0; g < layout_.groups.size(); ++g) {
        for (int c = 0; c < N_COPIES; ++c) {
            pools_.emplace_back(layout_, (int) g, c);
        }
    }
}

engine::~engine() = default;

// Batches that fit at once still go in waves where that lets loads and computing overlap. Others must: a
// wave may use at most half of the high pool, so that the next one has slots to load into. Then
// ceil(experts/half) waves always suffice: wave 0 holds the hits and has room for min(half, slots - hits)
// misses.
int engine::waves(int layer, int n_tokens, int n_used) const {
    const layer_layout & l = layout_.layers[layer];
    const group_layout & g = layout_.groups[l.group];
    const int slots    = g.n_slots[COPY_HIGH];
    const int distinct = (int) std::min<int64_t>(l.n_expert, (int64_t) n_tokens * n_used);
    const int half     = std::max(1, slots / 2);
    const int needed   = distinct <= slots ? 1 : (distinct + half - 1) / half;
    const int wished   = n_tokens >= BULK_TOKENS ? BULK_WAVES : distinct * g.expert_bytes(COPY_HIGH) >= PIPELINE_BYTES ? PIPELINE_WAVES : 1;
    // what the CPU computes starts when wave 0 has been handed out: that one must not wait for loads
    return std::max(has_cpu_part(n_tokens) ? std::max(needed, 2) : needed, std::min(wished, distinct));
}

void engine::begin_graph() {
    graph_mutex_.lock();
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    error_.clear();
    loader_.clear_error();
    pass_++;
    graph_t0_ = now_us();
}

std::string engine::end_graph() {
    std::string err;
    {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        finish_step();
        graphs_++;
        graph_us_ += now_us() - graph_t0_;
        err = error_;
    }
    graph_mutex_.unlock();
    return err;
}

void engine::fail(const std::string & why) {
    if (error_.empty()) {
        error_ = why;
    }
}

void engine::event(int kind, int layer, int expert, int copy, int slot) {
    if (hooks_.event) {
        hooks_.event(hooks_.user, kind, layer, expert, copy < 0 ? HOBBIT_SKIP : copy == COPY_HIGH ? HOBBIT_HIGH : HOBBIT_LOW, slot);
    }
}

policy_context engine::context_for(int group) const {
    const group_layout & g = layout_.groups[group];
    policy_context ctx;
    ctx.rec      = &records_;
    ctx.layer    = layer_;
    ctx.n_layers = (int) layout_.layers.size();
    ctx.pass     = pass_;
    ctx.cost_low = (float) ((double) g.expert_bytes(COPY_LOW) / (double) g.expert_bytes(COPY_HIGH));
    std::copy(std::begin(params_.policy_weights), std::end(params_.policy_weights), ctx.weights);
    return ctx;
}

void engine::route(const route_request & req, int wave, const route_result & out) {
    const int64_t t0 = now_us();
    hobbit_hooks hooks; // called without the lock: other threads may set others meanwhile
    hobbit * handle;
    {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        hooks  = hooks_;
        handle = handle_;
        if (wave == 0) {
            finish_step();
            if (req.first) {
                records_.begin(req.context, req.seq, req.pos, req.n_tokens);
            }
            plan(req);
        } else {
            finish_wave(wave - 1);
        }
        if (error_.empty() && issue(wave, true)) {
            if (wave + 1 < n_waves_) {
                issue(wave + 1, false);
            } else if (bulk_) {
                load_next_layer();
            }
        }
        if (wave + 1 == n_waves_ && error_.empty()) {
            for (const expert_plan & p : plans_) {
                if (p.cpu && pool_of(layer_, p.copy).has_free()) {
                    prefetch(layer_, p.expert, p.copy);
                }
            }
        }
        stats_[layer_].plan_us += now_us() - t0;
    }
    if (wave == 0 && hooks.prefetch && error_.empty()) {
        hooks.prefetch(hooks.user, handle, layer_, n_tokens_, n_used_, experts_.data(), weights_.data());
    }
    wait(wave, PART_EARLY);
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    fill(wave, out);
}

void engine::wait_late(int wave, const int32_t * high_in, const int32_t * low_in, int32_t * high, int32_t * low, int n) {
    if (wait(wave, PART_LATE)) {
        memcpy(high, high_in, n * sizeof(int32_t));
        memcpy(low, low_in, n * sizeof(int32_t));
    } else {
        std::fill(high, high + n, -1);
        std::fill(low, low + n, -1);
    }
}

void engine::plan(const route_request & req) {
    layer_    = req.layer;
    n_tokens_ = req.n_tokens;
    n_used_   = req.n_used;
    n_waves_  = req.n_waves;
    bulk_     = req.n_tokens >= BULK_TOKENS;
    clock_++;
    select(req);
    look_up();
    if (has_cpu_part(n_tokens_)) {
        share_with_cpu();
    }
    divide_into_waves();
    count(req);
}

// The rule for every token; of the tokens that want an expert, the most demanding one decides.
void engine::select(const route_request & req) {
    const layer_layout & l = layout_.layers[layer_];
    const size_t n = (size_t) n_tokens_ * n_used_;
    experts_.assign(req.experts, req.experts + n);
    weights_.resize(n);
    wanted_.resize(n);
    for (int32_t & e : experts_) {
        if (e < 0 || e >= l.n_expert) {
            fail("layer " + std::to_string(l.block) + ": the router chose expert " + std::to_string(e) + " of " + std::to_string(l.n_expert));
            e = 0;
        }
    }
    for (int t = 0; t < n_tokens_; ++t) {
        const size_t at = (size_t) t * n_used_;
        select_token(req.weights + at, n_used_, params_.t1, params_.t2, &weights_[at], &wanted_[at]);
        if (trace_.on()) {
            trace_.add(req.seq[t], req.pos[t], layer_, &experts_[at], &weights_[at], n_used_);
        }
    }
    if (hooks_.select) {
        hooks_.select(hooks_.user, layer_, n_tokens_, n_used_, experts_.data(), weights_.data(), wanted_.data());
        for (int32_t & w : wanted_) {
            w = std::min<int32_t>(std::max<int32_t>(w, HOBBIT_SKIP), HOBBIT_HIGH);
        }
    }
    plan_of_.assign(l.n_expert, -1);
    plans_.clear();
    for (size_t i = 0; i < n; ++i) {
        records_.use(layer_, (int) (i / n_used_), experts_[i], wanted_[i]);
        int & p = plan_of_[experts_[i]];
        if (p < 0) {
            p = (int) plans_.size();
            plans_.push_back({ experts_[i], wanted_[i] });
        } else {
            plans_[p].wanted = std::max(plans_[p].wanted, wanted_[i]);
        }
    }
}

// A resident copy at least as good as wanted serves as it is; a skip also takes a low one.
void engine::look_up() {
    if (params_.force_miss) {
        for (const expert_plan & p : plans_) {
            for (int c = 0; c < N_COPIES; ++c) {
                pool & pl = pool_of(layer_, c);
                const int s = pl.find(layer_, p.expert);
                if (s >= 0) {
                    loader_.wait_done(pl.at(s).load);
                    pl.release(s);
                }
            }
        }
    }
    for (expert_plan & p : plans_) {
        for (int c = 0; c < N_COPIES && p.copy < 0; ++c) {
            if (c == COPY_LOW && p.wanted == HOBBIT_HIGH) {
                break;
            }
            pool & pl = pool_of(layer_, c);
            const int s = pl.find(layer_, p.expert);
            if (s < 0) {
                continue;
            }
            slot & x = pl.at(s);
            if (x.load.failed) {
                loader_.wait_done(x.load);
                pl.release(s); // a prefetch that came to nothing
                continue;
            }
            if (!x.load.done()) {
                loader_.promote(x.load);
            }
            p.copy = c;
            p.slot = s;
            p.pins = 1;
            x.pins++;
            x.last_clock = clock_;
            x.last_pass  = pass_;
            if (x.prefetched) {
                x.prefetched = false;
                stats_[layer_].prefetch_hits++;
            }
            if (!bulk_) {
                pl.set_streamed(s, false);
            }
            event(HOBBIT_EVENT_HIT, layer_, p.expert, c, s);
        }
        if (p.copy < 0 && p.wanted != HOBBIT_SKIP) {
            p.miss = true;
            p.copy = p.wanted == HOBBIT_HIGH ? COPY_HIGH : COPY_LOW;
        } else if (p.copy < 0) {
            event(HOBBIT_EVENT_SKIP, layer_, p.expert, -1, -1);
        }
    }
}

// Who serves each miss: the largest first, each by the one that would be done with it sooner (longest
// processing time first). A miss that the CPU computes takes no slot; it is also brought into one while slots
// are free, so that the cache fills.
void engine::share_with_cpu() {
    const group_layout & g = layout_.groups[layout_.layers[layer_].group];
    std::vector<expert_plan *> misses;
    for (expert_plan & p : plans_) {
        if (p.miss) {
            misses.push_back(&p);
        }
    }
    std::stable_sort(misses.begin(), misses.end(), [](const expert_plan * a, const expert_plan * b) { return a->copy < b->copy; });
    double link_s = 0.0;
    double cpu_s  = 0.0;
    for (expert_plan * p : misses) {
        const double bytes = (double) g.expert_bytes(p->copy);
        const double by_link = link_s + bytes / budget_.link_speed;
        const double by_cpu  = cpu_s + bytes / budget_.cpu_speed;
        p->cpu = budget_.miss == HOBBIT_MISS_CPU || by_cpu <= by_link;
        (p->cpu ? cpu_s : link_s) = p->cpu ? by_cpu : by_link;
        if (p->cpu) {
            stats_[layer_].bytes_cpu += g.expert_bytes(p->copy);
        }
    }
}

// Hits are all in wave 0, and misses stay out of it if the other waves can take them: hits compute while
// they load. Misses are spread evenly, high copies first, so that the smallest loads come last and least
// is left to compute when the last byte is there. Low ones beyond what the low pool can hold in turn are
// fetched high instead.
void engine::divide_into_waves() {
    int hits[N_COPIES]   = { 0, 0 };
    int misses[N_COPIES] = { 0, 0 };
    for (const expert_plan & p : plans_) {
        if (p.copy >= 0 && !p.cpu) {
            (p.miss ? misses : hits)[p.copy]++;
        }
    }
    std::vector<int> room[N_COPIES]; // left in each wave
    for (int c = 0; c < N_COPIES; ++c) {
        const int slots = pool_of(layer_, c).n_slots();
        room[c].assign(n_waves_, n_waves_ == 1 ? slots : std::max(std::min(slots, 1), slots / 2));
        room[c][0] = std::max(0, std::min(room[c][0], slots - hits[c]));
    }
    int surplus = misses[COPY_LOW] - std::accumulate(room[COPY_LOW].begin(), room[COPY_LOW].end(), 0);
    for (auto p = plans_.rbegin(); p != plans_.rend() && surplus > 0; ++p) {
        if (p->miss && !p->cpu && p->copy == COPY_LOW) {
            p->copy = COPY_HIGH;
            misses[COPY_LOW]--;
            misses[COPY_HIGH]++;
            surplus--;
        }
    }
    const int first  = n_waves_ > 1 && (hits[COPY_HIGH] + hits[COPY_LOW] > 0 || has_cpu_part(n_tokens_)) ? 1 : 0;
    const int target = (misses[COPY_HIGH] + misses[COPY_LOW] + n_waves_ - first - 1) / (n_waves_ - first);
    std::vector<int> count(n_waves_, 0);
    for (int c = 0; c < N_COPIES; ++c) {
        for (expert_plan & p : plans_) {
            if (!p.miss || p.cpu || p.copy != c) {
                continue;
            }
            // evenly; else wherever there is room, wave 0 last
            int w = first;
            while (w < n_waves_ && (room[c][w] == 0 || count[w] >= target)) {
                w++;
            }
            if (w == n_waves_) {
                w = n_waves_ - 1;
                while (w > 0 && room[c][w] == 0) {
                    w--;
                }
            }
            p.wave = w;
            room[c][w]--;
            count[w]++;
        }
    }
}

void engine::count(const route_request & req) {
    hobbit_stats & st = stats_[layer_];
    st.tokens   += req.n_tokens;
    st.requests += wanted_.size();
    for (size_t i = 0; i < wanted_.size(); ++i) {
        const expert_plan & p = plans_[plan_of_[experts_[i]]];
        (wanted_[i] == HOBBIT_HIGH ? st.wanted_high : wanted_[i] == HOBBIT_LOW ? st.wanted_low : st.wanted_skip)++;
        if (p.copy < 0) {
            st.skips++;
        } else if (p.miss) {
            (p.copy == COPY_HIGH ? st.misses_high : st.misses_low)++;
            st.cpu_high += p.cpu && p.copy == COPY_HIGH;
            st.cpu_low  += p.cpu && p.copy == COPY_LOW;
        } else {
            (p.copy == COPY_HIGH ? st.hits_high : st.hits_low)++;
            st.upgrades += (p.copy == COPY_HIGH ? HOBBIT_HIGH : HOBBIT_LOW) > wanted_[i];
        }
    }
}

// A planned miss that was loaded ahead before its turn came.
void engine::count_as_hit(const expert_plan & p) {
    hobbit_stats & st = stats_[layer_];
    const bool high = p.copy == COPY_HIGH;
    for (size_t i = 0; i < experts_.size(); ++i) {
        if (experts_[i] == p.expert) {
            (high ? st.misses_high : st.misses_low)--;
            (high ? st.hits_high : st.hits_low)++;
            st.upgrades += (high ? HOBBIT_HIGH : HOBBIT_LOW) > wanted_[i];
        }
    }
}

// Has the running large batch all the slots that it may take from smaller ones?
bool engine::window_is_full(const pool & p) const { return bulk_ && p.n_streamed() >= std::max(2, p.n_slots() / BULK_WAVES); }

int engine::find_victim(pool & p, int copy, bool must) {
    const policy_context ctx = context_for(layout_.layers[layer_].group);
    const bool full = window_is_full(p);
    int s = p.victim(*policy_, ctx, full);
    if (s < 0 && full && must) {
        s = p.victim(*policy_, ctx, false);
    }
    if (s < 0 && must) {
        // everything that is not pinned is being loaded ahead: wait for one of those
        for (int i = 0; i < p.n_slots() && s < 0; ++i) {
            if (!p.at(i).free() && p.at(i).pins == 0) {
                loader_.wait_done(p.at(i).load);
                s = i;
            }
        }
        if (s < 0) {
            fail("internal error: no slot for a copy of precision " + std::to_string(copy) + " in layer " + std::to_string(layer_));
        }
    }
    return s;
}

// Queue the loads of a wave. Without must, stops at the first copy that finds no slot; the rest is queued
// when the wave's turn has come.
bool engine::issue(int wave, bool must) {
    std::vector<load_request> loads;
    const layer_layout & l = layout_.layers[layer_];
    hobbit_stats & st = stats_[layer_];
    bool ok = true;
    for (expert_plan & p : plans_) {
        if (!p.miss || p.cpu || p.wave != wave || p.slot >= 0) {
            continue;
        }
        pool & pl = pool_of(layer_, p.copy);
        int s = pl.find(layer_, p.expert);
        if (s >= 0 && !pl.at(s).load.failed) {
            // loaded ahead since this layer was planned
            slot & x = pl.at(s);
            loader_.promote(x.load);
            x.pins++;
            x.last_clock = clock_;
            x.last_pass  = pass_;
            p.slot = s;
            p.pins = 1;
            x.prefetched = false;
            st.prefetch_hits++;
            count_as_hit(p);
            event(HOBBIT_EVENT_HIT, layer_, p.expert, p.copy, s);
            continue;
        }
        if (s >= 0) {
            loader_.wait_done(pl.at(s).load);
            pl.release(s);
        }
        s = find_victim(pl, p.copy, must);
        if (s < 0) {
            ok = false;
            break;
        }
        slot & x = pl.at(s);
        const bool taken = !x.free();
        if (taken) {
            st.evictions++;
            event(HOBBIT_EVENT_EVICT, x.layer, x.expert, p.copy, s);
        }
        pl.assign(s, layer_, p.expert);
        pl.set_streamed(s, bulk_ && taken);
        x.last_clock = clock_;
        x.last_pass  = pass_;
        x.pins = 1;
        p.slot = s;
        p.pins = 1;
        group_layout & g = layout_.groups[l.group];
        loads.push_back({ &l, &g, p.copy, p.expert, s, &x.load });
        (p.copy == COPY_HIGH ? st.loads_high : st.loads_low)++;
        st.bytes_read += g.expert_bytes(p.copy);
        event(HOBBIT_EVENT_LOAD, layer_, p.expert, p.copy, s);
    }
    loader_.submit(PRIORITY_DEMAND, loads);
    return ok;
}

bool engine::wait(int wave, load_part part) {
    if (!error_.empty()) {
        return false;
    }
    const int64_t t0 = now_us();
    bool ok = true;
    for (const expert_plan & p : plans_) {
        if (p.wave == wave && p.slot >= 0) {
            ok = loader_.wait(pool_of(layer_, p.copy).at(p.slot).load, part) && ok;
        }
    }
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    stats_[layer_].wait_us += now_us() - t0;
    if (!ok) {
        const std::string why = loader_.error();
        fail(why.empty() ? "a read of expert weights failed" : why);
    }
    return ok;
}

void engine::fill(int wave, const route_result & out) {
    const bool failed = !error_.empty();
    for (size_t i = 0; i < experts_.size(); ++i) {
        const expert_plan & p = plans_[plan_of_[experts_[i]]];
        const bool here = !failed && p.copy >= 0 && !p.cpu && p.wave == wave;
        out.high[i] = here && p.copy == COPY_HIGH ? p.slot : -1;
        out.low[i]  = here && p.copy == COPY_LOW ? p.slot : -1;
        out.kept[i] = !failed && p.copy >= 0 ? experts_[i] : -1;
        for (int c = 0; c < N_COPIES && out.cpu[c]; ++c) {
            out.cpu[c][i] = !failed && p.cpu && p.copy == c ? experts_[i] : -1;
        }
    }
}

void engine::finish_wave(int wave) {
    for (expert_plan & p : plans_) {
        if (p.pins == 0 || p.wave != wave) {
            continue;
        }
        pool & pl = pool_of(layer_, p.copy);
        slot & x  = pl.at(p.slot);
        x.pins--;
        p.pins = 0;
        if (x.load.failed) {
            loader_.wait_done(x.load);
            pl.release(p.slot);
        }
    }
}

void engine::finish_step() {
    for (int w = 0; w < n_waves_; ++w) {
        finish_wave(w);
    }
    plans_.clear();
    n_waves_ = 0;
}

// A large batch wants nearly every expert of the next layer, too: its first wave loads while this layer's
// last one computes.
void engine::load_next_layer() {
    const int next = layer_ + 1;
    if (next >= (int) layout_.layers.size() || n_tokens_ * n_used_ < 2 * layout_.layers[next].n_expert) {
        return;
    }
    const int n_expert = layout_.layers[next].n_expert;
    int left = (n_expert + n_waves_ - 1) / n_waves_;
    for (int e = 0; e < n_expert && left > 0; ++e) {
        if (pool_of(next, COPY_HIGH).find(next, e) < 0) {
            if (load_ahead(next, e, COPY_HIGH) != 1) {
                return;
            }
            left--;
        }
    }
}

int engine::prefetch(int layer, int expert, int copy) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (layer < 0 || layer >= (int) layout_.layers.size() || expert < 0 || expert >= layout_.layers[layer].n_expert || copy < 0 || copy >= N_COPIES) {
        return -1;
    }
    if (records_.active().empty() || pool_of(layer, COPY_HIGH).find(layer, expert) >= 0 || pool_of(layer, copy).find(layer, expert) >= 0) {
        return 0;
    }
    return load_ahead(layer, expert, copy);
}

// 1: queued, 0: no slot to spare.
int engine::load_ahead(int layer, int expert, int copy) {
    // leave the slots that one token can need
    pool & pl = pool_of(layer, copy);
    group_layout & g = layout_.groups[layout_.layers[layer].group];
    int in_flight = 0;
    for (int s = 0; s < pl.n_slots(); ++s) {
        in_flight += pl.at(s).pins > 0 || !pl.at(s).load.done();
    }
    if (in_flight + g.n_used >= pl.n_slots()) {
        return 0;
    }
    const int s = pl.victim(*policy_, context_for(layout_.layers[layer].group), window_is_full(pl));
    if (s < 0 || pl.at(s).layer == layer) {
        return 0; // one expert of that layer for another gains nothing
    }
    slot & x = pl.at(s);
    const bool taken = !x.free();
    if (taken) {
        stats_[layer].evictions++;
        event(HOBBIT_EVENT_EVICT, x.layer, x.expert, copy, s);
    }
    pl.assign(s, layer, expert);
    pl.set_streamed(s, bulk_ && taken);
    x.prefetched = true;
    x.last_clock = clock_;
    x.last_pass  = pass_;
    stats_[layer].prefetches++;
    stats_[layer].bytes_read     += g.expert_bytes(copy);
    stats_[layer].bytes_prefetch += g.expert_bytes(copy);
    event(HOBBIT_EVENT_PREFETCH, layer, expert, copy, s);
    loader_.submit(PRIORITY_PREFETCH, { { &layout_.layers[layer], &g, copy, expert, s, &x.load } });
    return 1;
}

} // namespace hob
