#include "succession.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hob {

// Weights that are moved together. Written out: loops of this kind compilers leave alone.
typedef int16_t lanes __attribute__((vector_size(succession::LANES * sizeof(int16_t))));
typedef int32_t wide_lanes __attribute__((vector_size(succession::LANES * sizeof(int32_t))));

static lanes load(const int16_t * from) {
    lanes x;
    memcpy(&x, from, sizeof(x));
    return x;
}

// Experts of a layer, to whole lanes.
static int width(int n_expert) { return (n_expert + succession::LANES - 1) / succession::LANES * succession::LANES; }

uint64_t succession::table_bytes(const model_layout & layout, int age) {
    const int n = (int) layout.layers.size();
    uint64_t bytes = 0;
    for (int l = 0; l < n; ++l) {
        bytes += (uint64_t) layout.layers[(l - age + n) % n].n_expert * width(layout.layers[l].n_expert) * sizeof(int16_t);
    }
    return bytes;
}

// All of them in a shallow model; in a deep one 1, 2 and 4 layers back. As many as fit, the nearest first.
succession::ages succession::choose(const model_layout & layout) {
    const int n = (int) layout.layers.size();
    uint64_t left = 0;
    for (const group_layout & g : layout.groups) {
        left += (uint64_t) g.n_experts_total() * g.expert_bytes(COPY_HIGH);
    }
    left = std::max(left / SHARE, SMALL);
    ages out;
    for (int a = 0; a < n && a < 8; ++a) {
        if (n > 8 && (a > 4 || a == 3)) {
            continue;
        }
        for (std::vector<int> * list : { &out.same, &out.before }) {
            const uint64_t bytes = table_bytes(layout, a);
            if (list == &out.same && a == 0) {
                continue;
            }
            if (bytes > left) {
                left = 0;
                continue;
            }
            left -= bytes;
            list->push_back(a);
        }
    }
    std::reverse(out.same.begin(), out.same.end());
    return out;
}

uint64_t succession::bytes(const model_layout & layout, size_t n_states) {
    const ages a = choose(layout);
    uint64_t experts = 0;
    int n_used = 0;
    for (const layer_layout & l : layout.layers) {
        experts += width(l.n_expert);
        n_used = std::max(n_used, l.n_used);
    }
    const uint64_t ranks = layout.layers.size() * n_used;
    uint64_t n = experts * sizeof(int32_t) + n_states * (2 * ranks * sizeof(int16_t) + experts * sizeof(int32_t)) + MOST * ranks * sizeof(int16_t);
    n += PLACES * (sizeof(double) + sizeof(int16_t)) + layout.layers.size() * sizeof(int32_t);
    for (const std::vector<int> * list : { &a.same, &a.before }) {
        for (int age : *list) {
            n += table_bytes(layout, age);
        }
    }
    return n;
}

succession::succession(const model_layout & layout) : ages_(choose(layout)), batch_(layout.layers.size()) {
    size_t n = 0;
    for (const layer_layout & l : layout.layers) {
        offset_.push_back(n);
        n_expert_.push_back(l.n_expert);
        n_used_ = std::max(n_used_, l.n_used);
        width_.push_back(width(l.n_expert));
        n += width_.back();
        sum_.resize(std::max<size_t>(sum_.size(), width_.back()));
    }
    error_.resize(sum_.size());
    limit_ = (int16_t) (32767 / n_used_ - RATE);
    bias_.resize(n);
    stay_.resize(n_layers());
    for (int l = 0; l < n_layers(); ++l) { // before anything was seen
        const double p = std::min((double) layout.layers[l].n_used / n_expert_[l], 0.99);
        std::fill_n(bias_.begin() + offset_[l], n_expert_[l], (int32_t) std::lround(ONE * std::log(p / (1.0 - p))));
    }
    for (auto & [list, tables] : { std::pair(&ages_.same, &same_), std::pair(&ages_.before, &before_) }) {
        for (int age : *list) {
            tables->emplace_back();
            for (int l = 0; l < n_layers(); ++l) {
                tables->back().emplace_back((size_t) n_expert_[back(l, age)] * width_[l]);
            }
        }
    }
    for (int i = 0; i < PLACES; ++i) {
        const double p = 1.0 / (1.0 + std::exp(-((i + 0.5) * 16.0 / PLACES - 8.0)));
        chance_.push_back(p);
        step_.push_back((int16_t) std::lround(RATE * p));
    }
}

void succession::start(succession_state & s) const {
    for (int i = 0; i < 2; ++i) {
        s.chosen[i].assign((size_t) n_layers() * n_used_, -1);
        s.number[i] = 0;
    }
    s.sums = bias_;
}

void succession::begin(const std::vector<succession_token> & all) {
    n_tokens_ = all.size();
    const size_t skip = all.size() > MOST ? all.size() - MOST : 0;
    tokens_.clear();
    for (size_t i = skip; i < all.size(); ++i) {
        int before = (int) tokens_.size() - 1;
        while (before >= 0 && tokens_[before].state != all[i].state) {
            before--;
        }
        if (before >= 0) {
            tokens_[before].last = tokens_[before].alone = false;
        }
        tokens_.push_back({ all[i].state, all[i].number, before, before < 0, true });
    }
    for (const token & t : tokens_) {
        if (t.last) {
            std::fill(t.state->chosen[t.number % 2].begin(), t.state->chosen[t.number % 2].end(), (int16_t) -1);
            t.state->number[t.number % 2] = t.number;
        }
    }
    for (std::vector<int16_t> & b : batch_) {
        b.clear();
    }
}

// What the router chose for that token, or the one before it, in a layer; null if that is not known.
const int16_t * succession::chosen(int i, int layer, bool before) const {
    const token & t = tokens_[i];
    const int at = before ? t.before : i;
    if (at >= 0) {
        return layer <= layer_ && !batch_[layer].empty() ? &batch_[layer][(size_t) at * n_used_] : nullptr;
    }
    const int k = (t.number - 1) % 2;
    return t.alone && t.number > 1 && t.state->number[k] == t.number - 1 ? &t.state->chosen[k][(size_t) layer * n_used_] : nullptr;
}

void succession::serve(int layer, const int32_t * experts, int n_tokens, int n_used) {
    if ((size_t) n_tokens != n_tokens_) {
        return; // some of the tokens only: which, is not known
    }
    layer_ = layer;
    const size_t n = tokens_.size();
    experts += (n_tokens - n) * n_used;
    std::vector<int16_t> & here = batch_[layer];
    here.assign(n * n_used_, -1);
    for (size_t i = 0; i < n; ++i) {
        std::copy_n(experts + i * n_used, std::min(n_used, n_used_), &here[i * n_used_]);
        if (tokens_[i].last) {
            std::copy_n(&here[i * n_used_], n_used_, &tokens_[i].state->chosen[tokens_[i].number % 2][(size_t) layer * n_used_]);
        }
    }
    for (size_t i = 0; i < n; ++i) {
        learn(layer, (int) i, &here[i * n_used_]);
    }
    for (size_t i = 0; i < n; ++i) {
        if (tokens_[i].last) {
            forecast(layer, (int) i);
        }
    }
}

// Move the weights in rows_ from first on by the error of the sum.
void succession::correct(int layer, size_t first, const int16_t * used) {
    const int n = width_[layer];
    int16_t * e = error_.data();
    for (int x = 0; x < n; ++x) {
        e[x] = (int16_t) -step_[place(sum_[x])];
    }
    for (int r = 0; r < n_used_ && used[r] >= 0; ++r) {
        e[used[r]] += RATE;
    }
    const lanes most  = lanes{} + limit_;
    const lanes least = -most;
    int16_t * const * rows = rows_.data();
    const size_t n_rows = rows_.size();
    for (int x = 0; x < n; x += LANES) {
        const lanes by = load(e + x);
        for (size_t r = first; r < n_rows; ++r) {
            lanes w = load(rows[r] + x) + by;
            w = w > most ? most : w;
            w = w < least ? least : w;
            memcpy(rows[r] + x, &w, sizeof(w));
        }
    }
}

// Add the rows of these experts to the sums of the layer's. The limit of the weights lets 16 bits hold what one table
// gives.
void succession::add(const table & t, int layer, const int16_t * from, int32_t * sums, bool keep) {
    const size_t first = keep ? rows_.size() : (rows_.clear(), 0);
    for (int r = 0; from && r < n_used_ && from[r] >= 0; ++r) {
        rows_.push_back(weights(t, layer, from[r]));
    }
    const size_t n_rows = rows_.size() - first;
    int16_t * const * rows = rows_.data() + first;
    for (int x = 0; n_rows > 0 && x < width_[layer]; x += LANES) {
        lanes part = load(rows[0] + x);
        for (size_t r = 1; r < n_rows; ++r) {
            part += load(rows[r] + x);
        }
        wide_lanes sum;
        memcpy(&sum, sums + x, sizeof(sum));
        sum += __builtin_convertvector(part, wide_lanes);
        memcpy(sums + x, &sum, sizeof(sum));
    }
}

void succession::add_stay(int layer, const int16_t * from, int32_t * sums) const {
    for (int r = 0; from && r < n_used_ && from[r] >= 0; ++r) {
        sums[from[r]] += stay_[layer];
    }
}

void succession::learn(int layer, int token, const int16_t * used) {
    const int n = width_[layer];
    int32_t * sum = sum_.data();
    rows_.clear();
    int32_t * bias = &bias_[offset_[layer]];
    std::copy_n(bias, n, sum);
    const int16_t * before = chosen(token, layer, true);
    add_stay(layer, before, sum);
    for (size_t a = 0; a < ages_.before.size(); ++a) {
        if (ages_.before[a] <= layer) {
            add(before_[a], layer, chosen(token, layer - ages_.before[a], true), sum, true);
        }
    }
    correct(layer, 0, used);
    for (int x = 0; x < n; ++x) {
        bias[x] += error_[x];
    }
    for (int r = 0; before && r < n_used_ && before[r] >= 0; ++r) {
        stay_[layer] += error_[before[r]];
    }
    for (size_t a = 0; a < ages_.same.size(); ++a) {
        const int age = ages_.same[a];
        const size_t first = rows_.size();
        add(same_[a], layer, chosen(token, back(layer, age), age > layer), sum, true);
        if (rows_.size() > first) {
            correct(layer, first, used);
        }
    }
}

// What this layer's experts say of the layers to come, and of its own next time.
void succession::forecast(int layer, int token) {
    std::vector<int32_t> & sums = tokens_[token].state->sums;
    std::copy_n(&bias_[offset_[layer]], width_[layer], &sums[offset_[layer]]);
    add_stay(layer, chosen(token, layer, false), &sums[offset_[layer]]);
    for (size_t a = 0; a < ages_.before.size(); ++a) {
        if (ages_.before[a] <= layer) {
            add(before_[a], layer, chosen(token, layer - ages_.before[a], false), &sums[offset_[layer]], false);
        }
    }
    for (size_t a = 0; a < ages_.same.size(); ++a) {
        const int to = (layer + ages_.same[a]) % n_layers();
        add(same_[a], to, chosen(token, layer, false), &sums[offset_[to]], false);
    }
}

} // namespace hob
