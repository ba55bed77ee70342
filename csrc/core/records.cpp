#include "records.h"

#include <algorithm>

namespace hob {

records::records(const model_layout & layout) {
    size_t n = 0;
    for (const layer_layout & l : layout.layers) {
        offset_.push_back(n);
        n += l.n_expert;
    }
    offset_.push_back(n);
}

void records::begin(const void * context, const int32_t * seq, const int32_t * pos, int n_tokens) {
    ++pass_;
    active_.clear();
    token_.clear();
    for (int t = 0; t < n_tokens; ++t) {
        sequence_records & s = sequences_[{ context, seq[t] }];
        if (s.experts.empty()) {
            s.experts.resize(offset_.back());
        }
        if (pos[t] == 0) {
            s.tokens = 0;
            std::fill(s.experts.begin(), s.experts.end(), use_record());
        }
        s.last_pass = pass_;
        s.tokens++;
        token_.emplace_back(&s, s.tokens);
        if (std::find(active_.begin(), active_.end(), &s) == active_.end()) {
            active_.push_back(&s);
        }
    }
    while (sequences_.size() > MAX_SEQUENCES) {
        auto oldest = sequences_.end();
        for (auto it = sequences_.begin(); it != sequences_.end(); ++it) {
            if (it->second.last_pass < pass_ && (oldest == sequences_.end() || it->second.last_pass < oldest->second.last_pass)) {
                oldest = it;
            }
        }
        if (oldest == sequences_.end()) {
            break; // all of them are in this ubatch
        }
        sequences_.erase(oldest);
    }
}

void records::use(int layer, int token, int expert, int32_t wanted) {
    auto & [s, number] = token_[token];
    use_record & r = s->experts[offset_[layer] + expert];
    r.last = number;
    r.uses++;
    r.high += wanted == HOBBIT_HIGH;
    r.low  += wanted == HOBBIT_LOW;
}

size_t records::bytes() const {
    return MAX_SEQUENCES * (offset_.back() * sizeof(use_record) + sizeof(sequence_records) + 64);
}

} // namespace hob
