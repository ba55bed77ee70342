#include "engine.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace hob {

// Waves of a batch whose experts would all fit at once: enough to load while computing. For a few tokens
// that pays where their experts take longer to load than a wave's extra nodes to run.
static constexpr int    BULK_WAVES     = 4;
static constexpr int    PIPELINE_WAVES = 3;
static constexpr size_t PIPELINE_BYTES = 8u << 20;

// The same where a link brings them. Small waves of a large batch need few slots, but each goes over all rows. For a
// few tokens: hits in a wave of their own.
static constexpr int    LINK_WAVES       = 8;
static constexpr int    LONG_ROWS        = 8192;
static constexpr int    LINK_WAVES_LONG  = 4;
static constexpr size_t HITS_FIRST_BYTES = 32u << 20;

// What a link should have before it, or it runs dry while a wave computes.
static constexpr size_t LINK_AHEAD_BYTES = 384u << 20;

engine::engine(model_layout layout, const hobbit_params & params, const budget & b, std::unique_ptr<storage> files, std::unique_ptr<host_cache> host)
    : layout_(std::move(layout)), params_(params), budget_(b), files_(std::move(files)), records_(layout_, records::learns(params.policy)),
      policy_(make_policy(params.policy)), host_(std::move(host)), stats_(layout_.layers.size()), n_tokens_of_(layout_.layers.size(), INT_MAX),
      speeds_(b.link_speed, b.cpu_speed), leaning_(layout_.layers.size()), guesses_(layout_.layers.size()), whole_(layout_.groups.size(), false), waited_(layout_.groups.size(), 0),
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
    if (at_once(layer, n_tokens, n_used)) {
        return g.expert_bytes(COPY_HIGH) >= HITS_FIRST_BYTES ? 2 : 1;
    }
    const int needed   = distinct <= slots ? 1 : (distinct + half - 1) / half;
    const int wished   = n_tokens >= BULK_TOKENS ? (!g.has_link() ? BULK_WAVES : n_tokens * n_used < LONG_ROWS ? LINK_WAVES : LINK_WAVES_LONG) : distinct * g.expert_bytes(COPY_HIGH) >= PIPELINE_BYTES ? PIPELINE_WAVES : 1;
    // what the CPU computes starts when wave 0 has been handed out: that one must not wait for loads
    return std::max(has_cpu_part(layer, n_tokens) ? std::max(needed, 2) : needed, std::min(wished, distinct));
}

bool engine::at_once(int layer, int n_tokens, int n_used) const {
    const layer_layout & l = layout_.layers[layer];
    const group_layout & g = layout_.groups[l.group];
    return g.has_link() && n_tokens < BULK_TOKENS && std::min<int64_t>(l.n_expert, (int64_t) n_tokens * n_used) <= g.n_slots[COPY_HIGH];
}

bool engine::uses_low(int layer, int n_tokens, int n_used) const {
    const layer_layout & l = layout_.layers[layer];
    const bool few = !layout_.groups[l.group].has_link() || n_tokens < BULK_TOKENS || (int64_t) n_tokens * n_used < 4 * l.n_expert;
    return few && !holds_all(layer);
}

bool engine::holds_all(int layer) const {
    const group_layout & g = layout_.groups[layout_.layers[layer].group];
    return g.n_slots[COPY_HIGH] >= g.n_experts_total() && !params_.force_miss;
}

void engine::fill_whole_groups() {
    for (size_t gi = 0; gi < layout_.groups.size(); ++gi) {
        group_layout & g = layout_.groups[gi];
        pool & pl = pools_[gi * N_COPIES + COPY_HIGH];
        const bool wanted = params_.preload == HOBBIT_PRELOAD_ON || (params_.preload == HOBBIT_PRELOAD_AUTO && g.on_device);
        if (!wanted || params_.force_miss || pl.n_slots() < g.n_experts_total()) {
            continue;
        }
        std::vector<load_request> loads;
        for (const layer_layout & l : layout_.layers) {
            for (int e = 0; l.group == (int) gi && e < l.n_expert; ++e) {
                const int s = l.in_group * g.n_expert + e; // the place resident() promises
                pl.assign(s, (int) (&l - layout_.layers.data()), e);
                loads.push_back({ &l, &g, COPY_HIGH, e, s, &pl.at(s).load });
            }
        }
        loader_.submit(PRIORITY_DEMAND, loads);
        for (const load_request & r : loads) {
            if (!loader_.wait(*r.state, PART_EARLY) || !loader_.wait(*r.state, PART_LATE)) {
                throw std::runtime_error(loader_.error());
            }
        }
        if (g.has_link()) {
            g.banks[COPY_HIGH][0].link->wait(g.banks[COPY_HIGH][0].link->mark());
        }
        whole_[gi] = true;
    }
}

bool engine::resident(int layer) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return whole_[layout_.layers[layer].group] && !trace_.on() && !hooks_.select && !hooks_.prefetch && !hooks_.event;
}

// No choice is made where everything is there: all requests count as wanted and served at high precision.
void engine::count_resident(int layer, int n_tokens, int n_used) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    hobbit_stats & st = stats_[layer];
    const uint64_t n = (uint64_t) n_tokens * n_used;
    st.tokens      += n_tokens;
    st.requests    += n;
    st.wanted_high += n;
    st.hits_high   += n;
}

void engine::begin_graph() {
    graph_mutex_.lock();
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    error_.clear();
    lost_ = false;
    loader_.clear_error();
    aborted_ = false;
    pass_++;
    for (pool & p : pools_) { // a policy may look at the number, and loads may be asked for before the first route()
        p.reorder();
    }
    graph_t0_ = now_us();
}

std::string engine::end_graph() {
    std::string err;
    {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        finish_step();
        for (size_t l = 0; l < guesses_.size(); ++l) {
            settle((int) l, false);
        }
        for (size_t gi = 0; gi < layout_.groups.size(); ++gi) {
            if (layout_.groups[gi].has_link()) { // nothing of a graph that failed may still be under way
                device_link & link = *layout_.groups[gi].banks[COPY_HIGH][0].link;
                waited_[gi] = link.mark();
                link.wait(waited_[gi]);
            }
        }
        graphs_++;
        graph_us_ += now_us() - graph_t0_;
        err = error_;
    }
    graph_mutex_.unlock();
    return err;
}

void engine::fail(const std::string & why) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (error_.empty()) {
        error_ = why;
    }
}

void engine::fail(const std::exception & e) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    fail(reason(e));
    lost_ = true;
}

bool engine::aborted(bool ask_now) {
    const int64_t now = now_us();
    if (aborted_ || !abort_ || (!ask_now && now - asked_us_ < ASK_US)) {
        return aborted_;
    }
    asked_us_ = now;
    if (abort_(abort_user_)) {
        aborted_ = true;
        fail("the forward pass was aborted");
    }
    return aborted_;
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
    try {
        if (lost_) { // plan and layer_ may be those of another step
            fill_none(req, out);
        } else {
            serve(req, wave, out);
        }
    } catch (const std::exception & e) {
        fail(e);
        fill_none(req, out);
    }
}

void engine::serve(const route_request & req, int wave, const route_result & out) {
    const int64_t t0 = now_us();
    hobbit_hooks hooks; // called without the lock: other threads may set others meanwhile
    hobbit * handle;
    {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        hooks  = hooks_;
        handle = handle_;
    }
    aborted(hooks.select || hooks.prefetch || hooks.event);
    {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (wave == 0) {
            finish_step();
            if (req.first) {
                records_.begin(req.context, req.seq, req.pos, req.n_tokens);
                for (pool & p : pools_) {
                    p.reorder();
                }
            }
            plan(req);
        } else if (!at_once_) {
            finish_wave(wave - 1);
        }
        if (at_once_ && wave == 0 && error_.empty()) {
            for (int w = 0; w < n_waves_; ++w) {
                issue(w, true);
            }
        } else if (!at_once_ && error_.empty()) {
            int w = wave; // the first whose loads are not all queued
            while (w < n_waves_ && issue(w, w == wave)) {
                w++;
            }
            if (w == n_waves_ && bulk_ && params_.prefetch_prompts) {
                look_ahead();
            }
        }
        if (wave + 1 == n_waves_ && error_.empty()) {
            admit();
        }
        stats_[layer_].plan_us += now_us() - t0;
    }
    if (wave == 0 && hooks.prefetch && error_.empty()) {
        hooks.prefetch(hooks.user, handle, layer_, n_tokens_, n_used_, experts_.data(), weights_.data());
    }
    if (wave == 0 && req.next && error_.empty()) {
        predict(*req.next);
    }
    wait(wave, PART_EARLY);
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!at_once_) {
        before(wave, req.compute);
    }
    if (error_.empty()) {
        fill(wave, out);
    } else {
        fill_none(req, out);
    }
}

// Compute waits for what the link brings for that wave, hits whose load was queued ahead included.
void engine::before(int wave, void * compute) {
    if (lost_) {
        return;
    }
    const int gi = layout_.layers[layer_].group;
    if (!layout_.groups[gi].has_link()) {
        return;
    }
    uint64_t ticket = 0;
    for (const expert_plan & p : plans_) {
        if (p.slot >= 0 && p.wave == wave) {
            ticket = std::max(ticket, pool_of(layer_, p.copy).at(p.slot).load.ticket);
        }
    }
    if (ticket > waited_[gi]) {
        layout_.groups[gi].banks[COPY_HIGH][0].link->before(compute, ticket);
        waited_[gi] = ticket;
    }
}

void engine::arrive(int wave, void * compute) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    before(wave, compute);
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

// Has the running large batch all the slots that it may take from smaller ones? What is streamed through these is
// loaded by every batch, so a link, which is seldom too slow to begin, gets as few as keep it busy: for one wave that
// computes and one that loads.
bool engine::window_is_full(const pool & p) const {
    if (!bulk_) {
        return false;
    }
    const group_layout & g = layout_.groups[p.group()];
    int window = std::max(2, p.n_slots() / BULK_WAVES);
    if (g.has_link()) {
        const int waves = std::max(n_waves_, 1); // between steps: 0
        const int wave  = (g.n_expert + waves - 1) / waves;
        const int ahead = (int) std::min<size_t>(LINK_AHEAD_BYTES / g.expert_bytes(COPY_HIGH) + 1, window);
        window = std::min(std::max(2 * wave, ahead), std::max(2, p.n_slots() - g.n_used));
    }
    return p.n_streamed() >= window;
}

// A large batch fills no layer with more than its share: the next layers' experts stay as well.
bool engine::has_share(const pool & p, int layer) const {
    const group_layout & g = layout_.groups[p.group()];
    return !bulk_ || (p.n_kept(layer) + 1) * g.n_layers <= p.n_slots();
}

int engine::find_victim(pool & p, int layer, int copy, bool must) {
    const policy_context ctx = context_for(p.group());
    const bool full = window_is_full(p);
    int s = full && !has_share(p, layer) ? p.weakest(*policy_, ctx, true) : p.victim(*policy_, ctx, full);
    if (s < 0 && full && must) {
        s = p.victim(*policy_, ctx, false);
    }
    if (s < 0 && must) {
        s = take_held(p);
    }
    if (s < 0 && must) {
        // everything that is not pinned is being loaded ahead: wait for one of those
        for (int i = 0; i < p.n_slots() && s < 0 && !aborted_; ++i) {
            if (!p.at(i).free() && p.at(i).pins == 0 && loader_.wait_done(p.at(i).load, give_up_)) {
                s = i;
            }
        }
        if (s < 0 && !aborted_) {
            fail("internal error: no slot for a copy of precision " + std::to_string(copy) + " in layer " + std::to_string(layer_));
        }
    }
    return s;
}

// The slot is this expert's from now on. What a large batch loads beyond its layer's share is streamed. Until the load has been
// submitted the slot counts as one whose load failed: an exception before that leaves nobody's bytes under this expert's name.
slot & engine::occupy(pool & p, int s, int layer, int expert, int copy) {
    slot & x = p.at(s);
    const bool streamed = bulk_ && (!x.free() || !has_share(p, layer));
    if (!x.free()) {
        stats_[x.layer].evictions++;
        event(HOBBIT_EVENT_EVICT, x.layer, x.expert, copy, s);
    }
    p.assign(s, layer, expert);
    p.set_streamed(s, streamed);
    x.load.failed.store(true, std::memory_order_relaxed);
    x.last_clock = clock_;
    x.last_pass  = pass_;
    return x;
}

// Queue the loads of a wave. Without must, stops at the first copy that finds no slot; the rest is queued
// when the wave's turn has come.
bool engine::issue(int wave, bool must) {
    std::vector<load_request> loads;
    loads.reserve(plans_.size()); // what has got a slot finds room here
    bool ok;
    try {
        ok = place(wave, must, loads);
    } catch (...) {
        loader::refuse(loads);
        throw;
    }
    if (!loads.empty()) {
        issued_us_ = now_us();
        loader_.submit(PRIORITY_DEMAND, loads);
    }
    return ok;
}

// Slots for the loads of a wave.
bool engine::place(int wave, bool must, std::vector<load_request> & loads) {
    const layer_layout & l = layout_.layers[layer_];
    hobbit_stats & st = stats_[layer_];
    for (expert_plan & p : plans_) {
        if (!p.load || p.wave != wave || p.slot >= 0) {
            continue;
        }
        pool & pl = pool_of(layer_, p.copy);
        const int s = find_victim(pl, layer_, p.copy, must);
        if (s < 0) {
            return false;
        }
        slot & x = occupy(pl, s, layer_, p.expert, p.copy);
        x.pins = 1;
        p.slot = s;
        p.pins = 1;
        group_layout & g = layout_.groups[l.group];
        loads.push_back({ &l, &g, p.copy, p.expert, s, &x.load, p.units, layer_ });
        from_host(loads.back());
        st.bytes_read += part_bytes(p);
        if (p.units == 0) {
            (p.copy == COPY_HIGH ? st.loads_high : st.loads_low)++;
            event(HOBBIT_EVENT_LOAD, layer_, p.expert, p.copy, s);
        }
    }
    return true;
}

// Where the bytes of a load come from.
void engine::from_host(load_request & r) {
    hobbit_stats & st = stats_[r.layer_index];
    if (r.layer->src[r.copy][0].host) {
        return;
    }
    if (host_ && host_->serve(r)) {
        st.host_hits++;
    } else {
        st.bytes_storage += r.group->expert_bytes(r.copy);
    }
}

bool engine::wait(int wave, load_part part) {
    if (!error_.empty()) {
        return false;
    }
    const int64_t t0 = now_us();
    bool ok = true;
    for (const expert_plan & p : plans_) {
        if (p.wave == wave && p.slot >= 0) {
            ok = loader_.wait(pool_of(layer_, p.copy).at(p.slot).load, part, give_up_) && ok;
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
    const group_layout & g = layout_.groups[layout_.layers[layer_].group];
    const auto slots = [&](const expert_plan & p, size_t i) {
        const bool here = p.slot >= 0 && p.wave == wave;
        out.high[i] = here && p.copy == COPY_HIGH ? p.slot : -1;
        out.low[i]  = here && p.copy == COPY_LOW ? p.slot : -1;
        if (out.kept) {
            out.kept[i] = p.copy >= 0 ? p.expert : -1;
        }
    };
    if (out.by_expert) {
        for (int e = 0; e < layout_.layers[layer_].n_expert; ++e) {
            slots(plan_of_[e] >= 0 ? plans_[plan_of_[e]] : expert_plan{ e, -1 }, e);
        }
        return;
    }
    for (size_t i = 0; i < experts_.size(); ++i) {
        const expert_plan & p = plans_[plan_of_[experts_[i]]];
        slots(p, i);
        if (!out.units) {
            continue;
        }
        out.units[i] = p.units > 0 ? p.units : g.n_units;
        out.tail[i]  = p.units * g.unit;
        for (int c = 0; c < N_COPIES; ++c) {
            out.cpu[c][i] = p.cpu && p.copy == c ? experts_[i] : -1;
        }
    }
}

// No expert. Whatever the plan is: it may be that of another layer.
void engine::fill_none(const route_request & req, const route_result & out) {
    const size_t n = out.by_expert ? layout_.layers[req.layer].n_expert : (size_t) req.n_tokens * req.n_used;
    for (int32_t * plane : { out.high, out.low, out.kept, out.cpu[COPY_HIGH], out.cpu[COPY_LOW] }) {
        if (plane) {
            std::fill_n(plane, n, -1);
        }
    }
    for (int32_t * plane : { out.units, out.tail }) {
        if (plane) {
            std::fill_n(plane, n, 0);
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
        pl.forget_order();
        if (x.load.failed || p.units > 0) { // the latter: only a part of the expert is there
            x.load.failed = true;
            if (x.load.done()) {
                pl.release(p.slot);
            } // else a read hangs: the slot may go when it ends
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

} // namespace hob
