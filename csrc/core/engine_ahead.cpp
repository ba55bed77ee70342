// engine_ahead.cpp - the next layers' experts, for a few tokens: predicted by their routers, loaded when the storage is idle, held
// until their layer has been served.
//
// A prediction is worth what a miss is worth: the rule decides on its copy. What is resident already is held as well, so that nothing
// loaded for a farther layer pushes it out. The nearest prediction of a layer counts: what a farther one queued and it does not
// repeat is given up, and so is what turned out to be wrong. Last, the bonus of residents when a router chooses.

#include "engine.h"

#include <algorithm>

namespace hob {

void usefulness::observe(int ahead, double bytes, bool right) {
    sum & s = sums_[ahead - 1];
    s.right = s.right * KEEP + (right ? bytes : 0.0);
    s.wrong = s.wrong * KEEP + (right ? 0.0 : bytes);
}

int usefulness::depth() const {
    int d = 0;
    while (d < MAX_AHEAD && sums_[d].right > 0.0 && sums_[d].right >= 8.0 * sums_[d].wrong) {
        d++;
    }
    return d;
}

bool engine::predicts(int n_tokens) const {
    return params_.prefetch != 0 && n_tokens <= PREDICT_TOKENS && !params_.force_miss;
}

// Called without the lock, while the running layer's loads are on their way: the products take their time.
void engine::predict(next_routers & routers) {
    const int64_t t0 = now_us();
    const int depth = params_.prefetch == HOBBIT_PREFETCH_AUTO ? MAX_AHEAD : params_.prefetch;
    for (int ahead = 1; ahead <= depth && layer_ + ahead < (int) layout_.layers.size(); ++ahead) {
        const int next = layer_ + ahead;
        const layer_layout & l = layout_.layers[next];
        if (whole_[l.group]) {
            continue;
        }
        next_experts_.resize((size_t) n_tokens_ * l.n_used);
        next_weights_.resize(next_experts_.size());
        if (routers.choose(next, next_experts_.data(), next_weights_.data())) {
            std::lock_guard<std::recursive_mutex> lock(mutex_);
            follow_up(next, ahead);
        }
    }
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    stats_[layer_].plan_us += now_us() - t0;
}

// next_experts_ are what layer next is predicted to use: hold what is there, queue what is not.
void engine::follow_up(int next, int ahead) {
    const layer_layout & l = layout_.layers[next];
    const group_layout & g = layout_.groups[l.group];
    struct wish { int expert; int32_t wanted; float weight; bool first; };
    std::vector<wish> wishes;
    std::vector<float>   share(l.n_used);
    std::vector<int32_t> wanted(l.n_used);
    for (int t = 0; t < n_tokens_; ++t) {
        const int32_t * experts = &next_experts_[(size_t) t * l.n_used];
        select_token(&next_weights_[(size_t) t * l.n_used], l.n_used, params_.t1, params_.t2, share.data(), wanted.data());
        for (int r = 0; r < l.n_used; ++r) {
            const int heavier = (int) std::count_if(share.begin(), share.end(), [&](float w) { return w > share[r]; });
            const wish w = { experts[r], wanted[r], share[r], params_.prefetch_ranks == 0 || heavier < params_.prefetch_ranks };
            const auto same = std::find_if(wishes.begin(), wishes.end(), [&](const wish & x) { return x.expert == w.expert; });
            if (same == wishes.end()) {
                wishes.push_back(w);
                continue;
            }
            same->wanted = std::max(same->wanted, w.wanted);
            same->weight = std::max(same->weight, w.weight);
            same->first  = same->first || w.first;
        }
    }
    std::vector<guess> & guesses = guesses_[next];
    guesses.reserve(guesses.size() + wishes.size()); // what gets a slot or is held is noted
    for (guess & old : guesses) {
        if (std::none_of(wishes.begin(), wishes.end(), [&](const wish & w) { return w.expert == old.expert; })) {
            give_up(next, old);
        }
    }
    const auto copy_for = [&](const wish & w) {
        const int32_t wish = holds_all(next) || (w.wanted == HOBBIT_LOW && !uses_low(next, n_tokens_, l.n_used)) ? HOBBIT_HIGH : w.wanted;
        switch (params_.prefetch_copy) {
            case HOBBIT_PREFETCH_HIGH: return wish == HOBBIT_SKIP ? -1 : (int) COPY_HIGH;
            case HOBBIT_PREFETCH_LOW:  return wish == HOBBIT_LOW ? (int) COPY_LOW : -1;
            default:                   return wish == HOBBIT_SKIP ? -1 : wish == HOBBIT_LOW ? (int) COPY_LOW : (int) COPY_HIGH;
        }
    };
    std::stable_sort(wishes.begin(), wishes.end(), [&](const wish & a, const wish & b) { // low copies first, then the heaviest
        return std::make_pair(-copy_for(a), -a.weight) < std::make_pair(-copy_for(b), -b.weight);
    });
    const bool load = params_.prefetch != HOBBIT_PREFETCH_AUTO || ahead <= usefulness_.depth();
    int left[N_COPIES];
    for (int c = 0; c < N_COPIES; ++c) {
        left[c] = room(pool_of(next, c), next, (int) wishes.size());
    }
    std::vector<load_request> by_link;
    by_link.reserve(wishes.size());
    for (const wish & w : wishes) {
        guesses.push_back({ ahead, w.expert, copy_for(w) });
        guess & x = guesses.back();
        const int high = pool_of(next, COPY_HIGH).find(next, w.expert);
        const int low  = pool_of(next, COPY_LOW).find(next, w.expert);
        const bool there = high >= 0 || x.copy < 0 || (low >= 0 && x.copy == COPY_LOW);
        if (there) {
            x.copy = high >= 0 ? COPY_HIGH : low >= 0 ? COPY_LOW : -1;
            x.slot = high >= 0 ? high : low;
            hold(next, x, left);
        }
        if (w.first && x.copy >= 0 && (!there || pool_of(next, x.copy).at(x.slot).guessed)) {
            x.bytes = g.expert_bytes(x.copy);
            if (!there && load) {
                load_guess(next, x, left, by_link);
            }
        }
    }
    submit_ahead(by_link);
}

// Slots that can be set aside, most or fewer. So many stay as a layer can need whatever was predicted.
int engine::room(const pool & pl, int layer, int most) const {
    const layer_layout & l = layout_.layers[layer];
    const int need = (int) std::min<int64_t>(l.n_expert, (int64_t) n_tokens_ * l.n_used) - (pl.copy() == COPY_LOW); // rank 0 is always high
    return pl.n_idle(need + most, true) - need;
}

void engine::hold(int layer, const guess & x, int * left) {
    slot * s = slot_of(layer, x);
    if (s && !s->held && !s->load.failed && left[x.copy] > 0) {
        s->held = true;
        left[x.copy]--;
    }
}

void engine::load_guess(int layer, guess & x, int * left, std::vector<load_request> & by_link) {
    pool & pl = pool_of(layer, x.copy);
    const int s = left[x.copy] > 0 ? find_victim(pl, layer, x.copy, false) : -1;
    if (s < 0) {
        return;
    }
    left[x.copy]--;
    slot & to = queue_ahead(PRIORITY_GUESS, pl, s, layer, x.expert, by_link);
    to.guessed = to.held = true;
    x.slot   = s;
    x.loaded = true;
    stats_[layer].predicted_loads++;
    stats_[layer].bytes_predicted += x.bytes;
}

// The slot of a guess that is still its own; null: it has none, or it went to another expert.
slot * engine::slot_of(int layer, const guess & x) {
    slot * s = x.slot >= 0 ? &pool_of(layer, x.copy).at(x.slot) : nullptr;
    return s && s->layer == layer && s->expert == x.expert ? s : nullptr;
}

// A load ahead that came to nothing.
void engine::release_failed(pool & pl, int s) {
    const slot & x = pl.at(s);
    stats_[x.layer].evictions++;
    event(HOBBIT_EVENT_EVICT, x.layer, x.expert, pl.copy(), s);
    pl.release(s);
}

// The slot is like any other again; what is queued for it and was not begun is not read.
void engine::give_up(int layer, guess & x) {
    slot * s = slot_of(layer, x);
    if (!s) {
        return;
    }
    s->held = false;
    pool_of(layer, x.copy).forget_order();
    if (!x.loaded || !s->guessed) {
        return;
    }
    const loader::dropped d = loader_.drop(s->load);
    hobbit_stats & st = stats_[layer];
    const auto less = [](uint64_t & n, uint64_t by) { n -= std::min(n, by); }; // the counters may have been reset meanwhile
    less(st.bytes_read, d.bytes);
    less(st.bytes_prefetch, d.bytes);
    less(st.bytes_predicted, d.bytes);
    less(st.bytes_storage, d.file);
    x.bytes -= d.bytes;
    if (s->load.failed && s->load.done()) {
        release_failed(pool_of(layer, x.copy), x.slot);
    }
}

// The layer's router has chosen (plans_), or, at the end of a pass that failed, never will: its predictions are judged.
void engine::settle(int layer, bool served) {
    hobbit_stats & st = stats_[layer];
    uint64_t * const predicted[MAX_AHEAD] = { &st.predicted_1, &st.predicted_2, &st.predicted_3 };
    uint64_t * const correct[MAX_AHEAD]   = { &st.correct_1, &st.correct_2, &st.correct_3 };
    if (guesses_[layer].empty()) {
        return;
    }
    for (guess & x : guesses_[layer]) {
        const bool right = served && plan_of_[x.expert] >= 0;
        const int32_t wanted = right ? plans_[plan_of_[x.expert]].wanted : HOBBIT_SKIP;
        const bool good = x.copy == COPY_HIGH ? wanted != HOBBIT_SKIP : wanted == HOBBIT_LOW;
        if (served) {
            ++*predicted[x.ahead - 1];
            *correct[x.ahead - 1] += right;
            if (x.bytes > 0) {
                usefulness_.observe(x.ahead, (double) x.bytes, good);
            }
        }
        slot * s = slot_of(layer, x);
        if (s && !x.loaded) {
            s->held = false;
        }
        if (!x.loaded) {
            continue;
        }
        if (s && s->guessed && good && !s->load.failed) {
            st.useful++;
            st.late += !s->load.done();
            s->held = s->guessed = false;
            continue;
        }
        give_up(layer, x);
        st.bytes_wasted += x.bytes;
        if (slot_of(layer, x)) {
            s->guessed = false;
        }
    }
    guesses_[layer].clear();
    for (int c = 0; c < N_COPIES; ++c) {
        pool_of(layer, c).forget_order();
    }
}

// All that is left to take was predicted: the farthest layer gives one up. -1 if there is none.
int engine::take_held(pool & p) {
    int found = -1;
    for (int s = 0; s < p.n_slots(); ++s) {
        const slot & x = p.at(s);
        if (x.held && x.pins == 0 && (found < 0 || x.layer > p.at(found).layer)) {
            found = s;
        }
    }
    if (found < 0) {
        return -1;
    }
    slot & x = p.at(found);
    const int layer = x.layer; // whose slot it is may end
    for (guess & g : guesses_[layer]) {
        if (g.slot == found && g.copy == p.copy()) {
            give_up(layer, g);
        }
    }
    if (x.free()) {
        return found;
    }
    x.held = false;
    return loader_.wait_done(x.load, give_up_) ? found : -1;
}

// Only a high copy serves every request.
void engine::lean(int layer, const float * logits, float * bonus) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const int n = layout_.layers[layer].n_expert;
    const float b = (float) (params_.lean * leaning_.spread(layer, logits, n));
    pool & pl = pool_of(layer, COPY_HIGH);
    for (int e = 0; e < n; ++e) {
        const int s = pl.find(layer, e);
        bonus[e] = s >= 0 && !pl.at(s).load.failed ? b : 0.0f;
    }
}

void engine::leaned(int layer, int changed) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    stats_[layer].leaned += changed;
}

} // namespace hob
