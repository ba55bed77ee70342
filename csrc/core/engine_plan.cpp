// engine_plan.cpp - what each expert of the running layer gets: the wish of the tokens, what is resident, who
// serves a miss, and in which wave.

#include "engine.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace hob {

void engine::plan(const route_request & req) {
    layer_    = req.layer;
    n_tokens_ = req.n_tokens;
    n_used_   = req.n_used;
    n_waves_  = req.n_waves;
    bulk_     = req.n_tokens >= BULK_TOKENS;
    if (req.first) {
        pass_tokens_ = n_tokens_;
    }
    if (pass_tokens_ >= BULK_TOKENS) {
        n_tokens_of_[layer_] = n_tokens_;
    }
    behind_ahead_ = queued_ahead_;
    queued_ahead_ = false;
    issued_us_    = 0;
    at_once_  = at_once(layer_, n_tokens_, n_used_);
    clock_++;
    select(req);
    settle(layer_, true);
    look_up();
    for (pool & p : pools_) {
        p.begin(*policy_, context_for(p.group()));
    }
    if (has_cpu_part(layer_, n_tokens_)) {
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
        if (req.normalised) {
            std::copy_n(req.weights + at, n_used_, &weights_[at]);
            select_normalised(&weights_[at], n_used_, params_.t1, params_.t2, &wanted_[at]);
        } else {
            select_token(req.weights + at, n_used_, params_.t1, params_.t2, &weights_[at], &wanted_[at]);
        }
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
        const int token = (int) (i / n_used_);
        records_.use(layer_, req.tokens ? req.tokens[token] : token, experts_[i], wanted_[i]);
        int & p = plan_of_[experts_[i]];
        if (p < 0) {
            p = (int) plans_.size();
            plans_.push_back({ experts_[i], wanted_[i] });
        } else {
            plans_[p].wanted = std::max(plans_[p].wanted, wanted_[i]);
        }
    }
    records_.served(layer_, experts_.data(), n_tokens_, n_used_);
    if (params_.skip_mass < 1.0f) {
        bound_skips();
    }
    if (!uses_low(layer_, n_tokens_, n_used_)) {
        const bool all = holds_all(layer_);
        for (expert_plan & p : plans_) {
            p.wanted = p.wanted == HOBBIT_LOW || all ? HOBBIT_HIGH : p.wanted;
        }
    }
}

// Of what is beyond t2 and not there, each token skips its lightest experts, up to skip_mass of its gate weights in this
// layer; the others are loaded at low precision.
void engine::bound_skips() {
    const bool low = uses_low(layer_, n_tokens_, n_used_);
    const auto is_there = [&](int expert) {
        for (int c = 0; c < (low ? N_COPIES : COPY_LOW); ++c) {
            pool & pl = pool_of(layer_, c);
            const int s = pl.find(layer_, expert);
            if (s >= 0 && !pl.at(s).load.failed) {
                return true;
            }
        }
        return false;
    };
    std::vector<size_t> light; // of a token: what it would skip
    for (int t = 0; t < n_tokens_; ++t) {
        light.clear();
        for (size_t i = (size_t) t * n_used_; i < (size_t) (t + 1) * n_used_; ++i) {
            if (plans_[plan_of_[experts_[i]]].wanted == HOBBIT_SKIP && !is_there(experts_[i])) {
                light.push_back(i);
            }
        }
        std::stable_sort(light.begin(), light.end(), [&](size_t a, size_t b) { return weights_[a] < weights_[b]; });
        double mass = 0.0;
        for (size_t i : light) {
            mass += weights_[i];
            if (mass > params_.skip_mass) {
                plans_[plan_of_[experts_[i]]].wanted = HOBBIT_LOW;
            }
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
                    if (loader_.wait_done(pl.at(s).load, give_up_)) {
                        pl.release(s);
                    }
                }
            }
        }
    }
    for (expert_plan & p : plans_) {
        for (int c = 0; c < N_COPIES && p.copy < 0; ++c) {
            if (c == COPY_LOW && (p.wanted == HOBBIT_HIGH || !uses_low(layer_, n_tokens_, n_used_))) {
                break;
            }
            pool & pl = pool_of(layer_, c);
            const int s = pl.find(layer_, p.expert);
            if (s < 0) {
                continue;
            }
            slot & x = pl.at(s);
            if (x.load.failed) {
                if (loader_.wait_done(x.load, give_up_)) {
                    release_failed(pl, s);
                }
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
                p.ahead = bulk_ && c == COPY_HIGH;
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
            p.load = true;
            p.copy = p.wanted == HOBBIT_HIGH ? COPY_HIGH : COPY_LOW;
        } else if (p.copy < 0) {
            event(HOBBIT_EVENT_SKIP, layer_, p.expert, -1, -1);
        }
    }
}

// The link's and the CPU's part of the misses (share.h).
void engine::share_with_cpu() {
    const group_layout & g = layout_.groups[layout_.layers[layer_].group];
    std::vector<missed> misses;
    std::vector<expert_plan *> whose;
    for (expert_plan & p : plans_) {
        if (p.miss) {
            const double bytes = (double) g.expert_bytes(p.copy);
            misses.push_back({ bytes / speeds_.link(), bytes / speeds_.cpu(p.copy), g.n_units });
            whose.push_back(&p);
        }
    }
    if (budget_.miss == HOBBIT_MISS_AUTO) {
        share(misses, speeds_.cpu_start());
    }
    for (size_t i = 0; i < misses.size(); ++i) {
        const missed & m = misses[i];
        expert_plan & p = *whose[i];
        p.load  = m.link > 0;
        p.cpu   = m.link < m.units;
        p.units = p.cpu ? m.link : 0;
        stats_[layer_].bytes_cpu += cpu_bytes(p);
        if (p.cpu) {
            event(HOBBIT_EVENT_CPU, layer_, p.expert, p.copy, -1);
        }
    }
}

// Bytes of it that the CPU computes.
uint64_t engine::cpu_bytes(const expert_plan & p) const {
    return !p.cpu ? 0 : layout_.groups[layout_.layers[layer_].group].expert_bytes(p.copy) - (p.load ? part_bytes(p) : 0);
}

// Bytes that are loaded for it.
uint64_t engine::part_bytes(const expert_plan & p) const {
    const group_layout & g = layout_.groups[layout_.layers[layer_].group];
    return p.units > 0 ? g.expert_bytes(p.copy) / g.n_units * p.units : g.expert_bytes(p.copy);
}

// Hits are in wave 0, and misses stay out of it if the other waves can take them: hits compute while
// they load. Misses are spread evenly, high copies first, so that the smallest loads come last and least
// is left to compute when the last byte is there. What was loaded ahead goes before them where slots allow: it may
// be on its way, and wave after wave its slots become free for other loads. Low ones beyond what the low pool can
// hold in turn are fetched high instead; divided ones, the CPU computes whole.
void engine::divide_into_waves() {
    int hits[N_COPIES]   = { 0, 0 };
    int misses[N_COPIES] = { 0, 0 };
    int ahead = 0;
    for (const expert_plan & p : plans_) {
        if (p.copy >= 0 && (p.load || !p.miss)) {
            (p.load ? misses : hits)[p.copy]++;
            ahead += p.ahead;
        }
    }
    const int high_slots = pool_of(layer_, COPY_HIGH).n_slots();
    const bool spread = high_slots - hits[COPY_HIGH] >= high_slots / 2; // a wave of misses has room whatever hits hold
    std::vector<int> room[N_COPIES]; // left in each wave
    for (int c = 0; c < N_COPIES; ++c) {
        const int slots = pool_of(layer_, c).n_slots();
        room[c].assign(n_waves_, n_waves_ == 1 ? slots : std::max(std::min(slots, 1), slots / 2));
        room[c][0] = std::max(0, std::min(room[c][0], slots - hits[c]));
        if (at_once_) { // all waves hold their slots together
            std::fill(room[c].begin(), room[c].end(), 0);
            room[c].back() = slots - hits[c];
        }
    }
    int surplus = misses[COPY_LOW] - std::accumulate(room[COPY_LOW].begin(), room[COPY_LOW].end(), 0);
    for (auto p = plans_.rbegin(); p != plans_.rend() && surplus > 0; ++p) {
        if (p->load && !p->cpu && p->copy == COPY_LOW) {
            p->copy = COPY_HIGH;
            misses[COPY_LOW]--;
            misses[COPY_HIGH]++;
            surplus--;
        }
    }
    for (auto p = plans_.rbegin(); p != plans_.rend() && surplus > 0; ++p) {
        if (p->load && p->cpu && p->copy == COPY_LOW) {
            stats_[layer_].bytes_cpu += part_bytes(*p);
            p->load  = false;
            p->units = 0;
            misses[COPY_LOW]--;
            surplus--;
        }
    }
    const int first  = n_waves_ > 1 && (hits[COPY_HIGH] + hits[COPY_LOW] > 0 || has_cpu_part(layer_, n_tokens_)) ? 1 : 0;
    const int target = (misses[COPY_HIGH] + misses[COPY_LOW] + (spread ? ahead : 0) + n_waves_ - first - 1) / (n_waves_ - first);
    std::vector<int> count(n_waves_, 0);
    for (expert_plan & p : plans_) {
        if (p.ahead && spread) {
            p.wave = first;
            while (count[p.wave] >= target) {
                p.wave++;
            }
            count[p.wave]++;
        }
    }
    for (int c = 0; c < N_COPIES; ++c) {
        for (expert_plan & p : plans_) {
            if (!p.load || p.copy != c) {
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

} // namespace hob
