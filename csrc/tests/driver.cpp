#include "driver.h"

#include "check.h"
#include "refuse.h"

#include <algorithm>
#include <cmath>
#include <limits>

using namespace hob;

driver::driver(fake_model & m, const hobbit_params & p, std::unique_ptr<host_cache> host, const budget * b) : model(m), params(p) {
    auto f = std::make_unique<fake_storage>(m);
    files  = f.get();
    engine = std::make_unique<hob::engine>(m.layout, p, b ? *b : measure(m.layout, p, 0), std::move(f), std::move(host));
    hobbit_hooks hooks = {};
    hooks.event    = on_event;
    hooks.prefetch = on_prefetch;
    hooks.user     = this;
    engine->set_hooks(hooks, nullptr);
}

void driver::on_event(void * user, int32_t kind, int32_t layer, int32_t expert, int32_t precision, int32_t slot) {
    driver & d = *(driver *) user;
    const refused none(0); // only the engine's own allocations
    std::lock_guard<std::mutex> lock(d.mutex_);
    const int copy = precision == HOBBIT_HIGH ? COPY_HIGH : COPY_LOW;
    const auto key = std::make_tuple((int) layer, (int) expert, copy);
    const auto it  = d.resident_.find(key);
    const int group = d.model.layout.layers[layer].group;
    switch (kind) {
        case HOBBIT_EVENT_HIT:
            // with force_miss, layer() takes the chosen ones out before the engine does, which cannot wait for a load when the pass is to end
            CHECK((d.params.force_miss && d.engine->decode_error()[0]) || (it != d.resident_.end() && it->second == slot));
            break;
        case HOBBIT_EVENT_EVICT:
            // with force_miss, layer() takes the chosen ones out before the engine does: another thread may come between, or the end
            CHECK((d.params.force_miss && (d.settings_change || d.refused_)) || (it != d.resident_.end() && it->second == slot));
            if (layer == d.running_ && !d.engine->decode_error()[0]) {
                const auto needed = d.step_.find(expert);
                CHECK(needed == d.step_.end() || needed->second.copy != copy || d.computed_.count(expert));
            }
            d.resident_.erase(key);
            d.seen.evictions++;
            return;
        case HOBBIT_EVENT_LOAD:
        case HOBBIT_EVENT_PREFETCH: {
            const size_t bytes = d.model.layout.groups[group].expert_bytes(copy);
            CHECK(slot >= 0 && slot < d.model.layout.groups[group].n_slots[copy]);
            if (!d.may_fail && !d.params.force_miss) { // a failed load gives its slot back without an event
                CHECK(it == d.resident_.end());
                for (const auto & [k, s] : d.resident_) { // the slot has no other owner
                    CHECK(s != slot || std::get<2>(k) != copy || d.model.layout.layers[std::get<0>(k)].group != group);
                }
                if (copy == COPY_LOW) { // a high copy would do
                    CHECK(!d.resident_.count({ layer, expert, COPY_HIGH }));
                }
            }
            d.resident_[key] = slot;
            d.seen.bytes_read += bytes;
            if (kind == HOBBIT_EVENT_PREFETCH) {
                d.seen.prefetches++;
                d.seen.bytes_prefetch += bytes;
                return;
            }
            (copy == COPY_HIGH ? d.seen.loads_high : d.seen.loads_low)++;
            break;
        }
        case HOBBIT_EVENT_SKIP:
            CHECK_EQ(precision, HOBBIT_SKIP);
            break;
        default:
            CHECK(!"unknown event");
    }
    CHECK_EQ(layer, d.running_);
    CHECK(d.step_.emplace(expert, served{ kind, kind == HOBBIT_EVENT_SKIP ? -1 : copy, slot }).second); // one a step
}

void driver::on_prefetch(void * user, hobbit *, int32_t layer, int32_t, int32_t, const int32_t *, const float *) {
    driver & d = *(driver *) user;
    const refused none(0);
    if (d.prefetch) {
        d.prefetch(layer);
    }
}

void driver::begin() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running_ = -1; // what a graph that failed had planned is needed no more, and its error is forgotten now
    }
    engine->begin_graph();
    incomplete_ = left_ = false;
}

bool driver::end() {
    last_error = engine->end_graph();
    CHECK(engine->consistent());
    seen.graphs++;
    if (last_error.empty()) {
        CHECK(left_ || !incomplete_); // results that lack something must not pass for good
        n_failed += left_;
        return !left_;
    }
    CHECK(may_fail);
    n_failed++;
    return false;
}

void driver::check_wave(int layer, int n, const std::vector<int32_t> & experts, const std::vector<int32_t> & high,
                        const std::vector<int32_t> & low, int first_proj, int end_proj) {
    std::set<int> done;
    for (int i = 0; i < n; ++i) {
        CHECK(high[i] < 0 || low[i] < 0);
        const int copy = high[i] >= 0 ? COPY_HIGH : COPY_LOW;
        const int slot = high[i] >= 0 ? high[i] : low[i];
        if (slot < 0 || !done.insert(experts[i]).second) {
            continue;
        }
        for (int p = first_proj; p < end_proj; ++p) {
            CHECK(model.holds(layer, experts[i], copy, slot, p));
        }
    }
}

void driver::route(const route_request & req, int wave, const route_result & out) {
    const refused one(refuse);
    refused_ = refused_ || refuse > 0;
    engine->route(req, wave, out);
    refuse = refused::left();
}

void driver::layer(int layer, int n_tokens, int n_used, const std::vector<int32_t> & experts, const std::vector<float> & weights,
                   const std::vector<int32_t> & seq, const std::vector<int32_t> & pos, bool first, const void * context) {
    const int n = n_tokens * n_used;
    const layer_layout & l = model.layout.layers[layer];
    const int n_proj  = model.layout.groups[l.group].n_proj;
    const int n_waves = engine->waves(layer, n_tokens, n_used);
    CHECK(n_waves >= 1);
    hobbit_stats counted = {};
    engine->layer_stats(layer, counted);
    const uint64_t tokens_before = counted.tokens;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running_ = layer;
        step_.clear();
        computed_.clear();
        if (params.force_miss) { // all of the chosen are thrown out before
            for (int i = 0; i < n; ++i) {
                resident_.erase({ layer, experts[i], COPY_HIGH });
                resident_.erase({ layer, experts[i], COPY_LOW });
            }
        }
    }

    std::vector<int32_t> high(n), low(n), kept(n), high2(n), low2(n), kept0;
    std::vector<int> times(n, 0), copy_of(n, -1);
    std::vector<int> wave_of(l.n_expert, -1);
    for (int wave = 0; wave < n_waves; ++wave) {
        route_request req = {};
        req.layer    = layer;
        req.n_tokens = n_tokens;
        req.n_used   = n_used;
        req.n_waves  = n_waves;
        if (wave == 0) {
            req.experts = experts.data();
            req.weights = weights.data();
            req.context = context ? context : this;
            req.seq     = seq.data();
            req.pos     = pos.data();
            req.first   = first;
            req.next    = engine->predicts(n_tokens) ? next : nullptr;
        }
        std::fill(high.begin(), high.end(), -99);
        low = kept = high2 = low2 = high;
        if (n_tokens >= 32) { // the other form of the answer, as on a device
            std::vector<int32_t> of_expert[3] = { std::vector<int32_t>(l.n_expert, -99), std::vector<int32_t>(l.n_expert, -99),
                                                  std::vector<int32_t>(l.n_expert, -99) };
            route_result tables = { of_expert[0].data(), of_expert[1].data(), of_expert[2].data() };
            tables.by_expert = true;
            route(req, wave, tables);
            for (int i = 0; i < n; ++i) {
                high[i] = of_expert[0][experts[i]];
                low[i]  = of_expert[1][experts[i]];
                kept[i] = of_expert[2][experts[i]];
            }
        } else {
            route(req, wave, { high.data(), low.data(), kept.data() });
        }
        if (wave == leave_at) {
            left_ = true;
            break;
        }
        if (engine->at_once(layer, n_tokens, n_used)) {
            engine->arrive(wave, nullptr);
        }
        check_wave(layer, n, experts, high, low, 0, n_proj - 1);
        if (computing) {
            computing(); // gate and up
        }
        engine->wait_late(wave, high.data(), low.data(), high2.data(), low2.data(), n);
        check_wave(layer, n, experts, high2, low2, n_proj - 1, n_proj);
        if (computing) {
            computing(); // down
        }
        check_wave(layer, n, experts, high, low, 0, n_proj - 1); // nothing moved meanwhile
        check_wave(layer, n, experts, high2, low2, n_proj - 1, n_proj);
        if (wave == 0) {
            kept0 = kept;
        }
        for (int i = 0; i < n; ++i) {
            CHECK(high[i] >= -1 && low[i] >= -1 && kept[i] >= -1);
            CHECK(high2[i] == high[i] || high2[i] == -1);
            CHECK(low2[i] == low[i] || low2[i] == -1);
            if (high2[i] >= 0 || low2[i] >= 0) {
                times[i]++;
                copy_of[i] = high2[i] >= 0 ? COPY_HIGH : COPY_LOW;
                CHECK(wave_of[experts[i]] < 0 || wave_of[experts[i]] == wave); // an expert is in one wave
                wave_of[experts[i]] = wave;
            }
        }
        std::lock_guard<std::mutex> lock(mutex_);
        for (int i = 0; i < n; ++i) {
            if (wave_of[experts[i]] >= 0) {
                computed_.insert(experts[i]);
            }
        }
    }
    leave_at = -1;

    const bool failed = left_ || engine->decode_error()[0] != '\0';
    engine->layer_stats(layer, counted);
    if (counted.tokens == tokens_before) { // no memory for a plan
        CHECK(failed);
        incomplete_ = true;
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    seen.tokens   += n_tokens;
    seen.requests += n;
    std::vector<int32_t> wanted(n, -1), most(l.n_expert, -1);
    for (int t = 0; t < n_tokens && !settings_change; ++t) {
        const std::vector<int32_t> w = rule_of_token(&weights[t * n_used], n_used, params.t1, params.t2);
        for (int r = 0; r < n_used; ++r) {
            wanted[t * n_used + r] = w[r];
            most[experts[t * n_used + r]] = std::max(most[experts[t * n_used + r]], w[r]);
        }
    }
    for (int i = 0; i < n; ++i) {
        const int e = experts[i];
        if (!settings_change) {
            (wanted[i] == HOBBIT_HIGH ? seen.wanted_high : wanted[i] == HOBBIT_LOW ? seen.wanted_low : seen.wanted_skip)++;
        }
        if (failed) {
            incomplete_ = true;
            continue;
        }
        const auto it = step_.find(e);
        CHECK(it != step_.end());
        if (it == step_.end()) {
            continue;
        }
        const served & s = it->second;
        CHECK_EQ(times[i], s.kind == HOBBIT_EVENT_SKIP ? 0 : 1);
        CHECK_EQ(kept0[i], s.kind == HOBBIT_EVENT_SKIP ? -1 : e);
        CHECK_EQ(copy_of[i], s.copy);
        if (s.kind == HOBBIT_EVENT_SKIP) {
            seen.skips++;
        } else if (s.kind == HOBBIT_EVENT_HIT) {
            (s.copy == COPY_HIGH ? seen.hits_high : seen.hits_low)++;
        } else {
            (s.copy == COPY_HIGH ? seen.misses_high : seen.misses_low)++;
        }
        if (settings_change) {
            continue;
        }
        if (most[e] == HOBBIT_HIGH || (s.copy >= 0 && !engine->uses_low(layer, n_tokens, n_used))) {
            CHECK_EQ(s.copy, (int) COPY_HIGH);
        } else if (most[e] == HOBBIT_LOW) {
            CHECK(s.copy >= 0);
            if (s.kind == HOBBIT_EVENT_LOAD && n_tokens == 1 && n_used <= l.n_used) {
                CHECK_EQ(s.copy, (int) COPY_LOW);
            }
        } else {
            CHECK(s.kind != HOBBIT_EVENT_LOAD);
        }
        if (s.kind == HOBBIT_EVENT_HIT) {
            seen.upgrades += (s.copy == COPY_HIGH ? HOBBIT_HIGH : HOBBIT_LOW) > wanted[i];
        }
        if (n_tokens == 1 && i == std::max_element(weights.begin(), weights.end()) - weights.begin() && std::isfinite(weights[i])) {
            CHECK_EQ(s.copy, (int) COPY_HIGH); // rank 0
        }
    }
    CHECK(failed || step_.size() == std::set<int>(experts.begin(), experts.begin() + n).size());
}

void driver::check_stats() {
    const hobbit_stats st = engine->stats();
    CHECK_EQ(st.tokens, seen.tokens);
    CHECK_EQ(st.requests, seen.requests);
    CHECK_EQ(st.requests, st.wanted_high + st.wanted_low + st.wanted_skip);
    CHECK_EQ(st.requests, st.hits_high + st.hits_low + st.misses_high + st.misses_low + st.skips);
    CHECK_EQ(st.graphs, seen.graphs);
    CHECK_EQ(st.evictions, seen.evictions);
    CHECK_EQ(st.loads_high, seen.loads_high);
    CHECK_EQ(st.loads_low, seen.loads_low);
    CHECK_EQ(st.prefetches, seen.prefetches);
    CHECK(st.prefetch_hits <= st.prefetches);
    CHECK(next ? st.bytes_read <= seen.bytes_read : st.bytes_read == seen.bytes_read);
    CHECK_EQ(seen.bytes_prefetch - st.bytes_prefetch, seen.bytes_read - st.bytes_read);
    CHECK(st.late <= st.useful && st.useful <= st.predicted_loads && st.predicted_loads <= st.prefetches);
    CHECK(st.bytes_wasted <= st.bytes_predicted && st.bytes_predicted <= st.bytes_prefetch);
    CHECK(st.correct_1 <= st.predicted_1 && st.correct_2 <= st.predicted_2 && st.correct_3 <= st.predicted_3);
    CHECK(files->n_bytes <= st.bytes_read);
    CHECK(st.wait_us >= 0 && st.plan_us >= 0 && st.compute_us >= 0 && st.read_us >= 0);
    if (!settings_change) {
        CHECK_EQ(st.wanted_high, seen.wanted_high);
        CHECK_EQ(st.wanted_low, seen.wanted_low);
        CHECK_EQ(st.wanted_skip, seen.wanted_skip);
    }
    if (n_failed == 0) {
        CHECK_EQ(st.hits_high, seen.hits_high);
        CHECK_EQ(st.hits_low, seen.hits_low);
        CHECK_EQ(st.misses_high, seen.misses_high);
        CHECK_EQ(st.misses_low, seen.misses_low);
        CHECK_EQ(st.skips, seen.skips);
        if (!settings_change) {
            CHECK_EQ(st.upgrades, seen.upgrades);
        }
    }
    hobbit_stats sum = {};
    for (int l = 0; l < (int) model.layout.layers.size(); ++l) {
        hobbit_stats one = {};
        CHECK(engine->layer_stats(l, one));
        sum.requests   += one.requests;
        sum.bytes_read += one.bytes_read;
        sum.evictions  += one.evictions;
    }
    CHECK_EQ(sum.requests, st.requests);
    CHECK_EQ(sum.bytes_read, st.bytes_read);
    CHECK_EQ(sum.evictions, st.evictions);
}

std::vector<int32_t> rule_of_token(const float * weights, int n_used, float t1, float t2) {
    double sum = 0;
    for (int i = 0; i < n_used; ++i) {
        sum += weights[i];
    }
    std::vector<int32_t> wanted(n_used, HOBBIT_HIGH);
    if (!(sum > 0) || !std::isfinite(sum) || t1 >= 1) {
        return wanted;
    }
    std::vector<float> g(n_used);
    for (int i = 0; i < n_used; ++i) {
        g[i] = (float) (weights[i] / sum);
    }
    std::vector<bool> taken(n_used, false);
    double s = 0;
    for (int rank = 0; rank < n_used; ++rank) {
        int best = -1;
        for (int i = 0; i < n_used; ++i) {
            if (!taken[i] && (best < 0 || g[i] > g[best])) {
                best = i;
            }
        }
        taken[best] = true;
        if (rank > 0 && s > t1) {
            wanted[best] = s <= t2 || t2 >= 1 ? HOBBIT_LOW : HOBBIT_SKIP;
        }
        s += g[best];
    }
    return wanted;
}

void random_router::token(int layer, int n_expert, int n_used, int32_t * experts, float * weights) {
    std::vector<bool> taken(n_expert, false);
    for (int r = 0; r < n_used; ++r) {
        int e = std::min({ below(n_expert), below(n_expert), below(n_expert) }); // low numbers more often
        e = (e * 7 + layer * 3) % n_expert;
        while (taken[e]) {
            e = (e + 1) % n_expert;
        }
        taken[e]   = true;
        experts[r] = e;
        weights[r] = std::exp((float) below(3000) / 1000.0f);
    }
    if (odd_weights) {
        switch (below(20)) {
            case 0: std::fill(weights, weights + n_used, 0.125f); break; // ties
            case 1: weights[below(n_used)] = std::numeric_limits<float>::quiet_NaN(); break;
            case 2: weights[below(n_used)] = 0.0f; break;
        }
    } else {
        std::sort(weights, weights + n_used, std::greater<float>());
    }
}
