#include "records.h"

#include <algorithm>

namespace hob {

records::records(const model_layout & layout, bool learn) : succession_(learn ? std::make_unique<succession>(layout) : nullptr) {
    size_t n = 0;
    for (const layer_layout & l : layout.layers) {
        offset_.push_back(n);
        n += l.n_expert;
        share_used_.push_back((double) l.n_used / l.n_expert);
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
            if (succession_) {
                succession_->start(s.succession);
            }
            s.experts.resize(offset_.back()); // last: it says that the sequence is known
        }
        if (pos[t] == 0) {
            s.tokens = 0;
            std::fill(s.experts.begin(), s.experts.end(), use_record());
            if (succession_) {
                succession_->start(s.succession);
            }
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
    if (succession_) {
        running_.clear();
        for (const auto & [s, number] : token_) {
            running_.push_back({ &s->succession, number });
        }
        succession_->begin(running_);
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

void records::served(int layer, const int32_t * experts, int n_tokens, int n_used) {
    if (succession_) {
        succession_->serve(layer, experts, n_tokens, n_used);
    }
}

uint64_t records::bytes(const model_layout & layout, int32_t policy) {
    uint64_t n = 0;
    for (const layer_layout & l : layout.layers) {
        n += l.n_expert;
    }
    return MAX_SEQUENCES * (n * sizeof(use_record) + sizeof(sequence_records) + 64) + (learns(policy) ? succession::bytes(layout, MAX_SEQUENCES) : 0);
}

} // namespace hob
