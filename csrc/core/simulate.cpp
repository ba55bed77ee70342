#include "simulate.h"

#include <algorithm>
#include <stdexcept>

namespace hob {

namespace {
class no_storage : public storage {
    std::string read(int, uint64_t, size_t, uint8_t *, uint8_t *) override { return "a simulation has no weights"; }
    bool direct() const override { return false; }
};
} // namespace

std::unique_ptr<engine> make_simulated_engine(model_layout layout, const hobbit_params & params, const int32_t * slots) {
    budget b = measure(layout, params, records::bytes(layout, params.policy));
    if (slots) {
        for (size_t i = 0; i < layout.groups.size(); ++i) {
            group_layout & g = layout.groups[i];
            const int least[N_COPIES] = { g.n_used, low_floor(g) };
            for (int c = 0; c < N_COPIES; ++c) {
                g.n_slots[c] = slots[i * N_COPIES + c];
                if (g.n_slots[c] < least[c] || g.n_slots[c] > g.n_experts_total()) {
                    throw std::runtime_error("group " + std::to_string(i) + " has " + std::to_string(g.n_slots[c]) + (c == COPY_HIGH ? " high" : " low") +
                                             " slots: give " + std::to_string(least[c]) + " to " + std::to_string(g.n_experts_total()));
                }
                b.slots += (uint64_t) g.n_slots[c] * g.expert_bytes(c);
            }
        }
        b.total = b.slots + b.staging + b.records;
    } else {
        const std::string err = divide(layout, params, b);
        if (!err.empty()) {
            throw std::runtime_error(err);
        }
    }
    hobbit_params p = params;
    p.n_io_threads = 0;
    return std::make_unique<engine>(std::move(layout), p, b, std::make_unique<no_storage>());
}

std::string replay::read(const char * at, int64_t row, int n_used) {
    row_.read(at, n_used);
    const std::string where = "row " + std::to_string(row) + " of the trace: ";
    const auto & layers = engine_.layout().layers;
    if (row_.layer < 0 || row_.layer >= (int) layers.size()) {
        return where + "layer " + std::to_string(row_.layer) + ", but the model has " + std::to_string(layers.size());
    }
    const layer_layout & l = layers[row_.layer];
    n_here_ = (int) (std::find(row_.experts.begin(), row_.experts.end(), -1) - row_.experts.begin());
    if (n_here_ < 1 || n_here_ > l.n_used) {
        return where + std::to_string(n_here_) + " experts, but the layer uses " + std::to_string(l.n_used);
    }
    for (int i = 0; i < n_here_; ++i) {
        const int32_t e = row_.experts[i];
        if (e < 0 || e >= l.n_expert || std::find(row_.experts.begin(), row_.experts.begin() + i, e) != row_.experts.begin() + i) {
            return where + "expert " + std::to_string(e) + " is not one of " + std::to_string(l.n_expert) + ", or is there twice";
        }
    }
    return "";
}

std::string replay::foresee(const char * rows, int64_t n_rows, int n_used) {
    if (foreseen_) {
        return "the rows to come are known already";
    }
    const hobbit_params p = engine_.params();
    std::vector<int32_t> wanted(n_used);
    for (int64_t i = 0; i < n_rows; ++i) { // all of them, before anything is kept
        const std::string err = read(rows + i * trace_row_bytes(n_used), i, n_used);
        if (!err.empty()) {
            return err;
        }
    }
    for (int64_t i = 0; i < n_rows; ++i) {
        read(rows + i * trace_row_bytes(n_used), i, n_used);
        select_normalised(row_.weights.data(), n_here_, p.t1, p.t2, wanted.data());
        for (int r = 0; r < n_here_; ++r) {
            known_.add(row_.layer, row_.experts[r], step_ + i + 1, wanted[r]);
        }
    }
    foreseen_ = true;
    engine_.set_policy(make_policy_clairvoyant(known_));
    return "";
}

std::string replay::run(const char * rows, int64_t n_rows, int n_used) {
    high_.resize(n_used);
    low_.resize(n_used);
    std::string err;
    trace_row before = { -1, -1, -1, {}, {} };
    for (int64_t i = 0; i < n_rows && err.empty(); ++i) {
        err = read(rows + i * trace_row_bytes(n_used), i, n_used);
        if (!err.empty()) {
            break;
        }
        const bool first = i == 0 || row_.layer <= before.layer || row_.seq != before.seq || row_.pos != before.pos;
        if (first && i > 0) {
            err = engine_.end_graph();
        }
        if (first) {
            engine_.begin_graph();
        }
        step_++;
        for (int r = 0; foreseen_ && r < n_here_; ++r) {
            known_.pass(row_.layer, row_.experts[r], step_);
        }
        route_request req = {};
        req.layer      = row_.layer;
        req.n_tokens   = 1;
        req.n_used     = n_here_;
        req.n_waves    = engine_.waves(row_.layer, 1, n_here_);
        req.experts    = row_.experts.data();
        req.weights    = row_.weights.data();
        req.context    = this;
        req.seq        = &row_.seq;
        req.pos        = &row_.pos;
        req.first      = first;
        req.normalised = true;
        before.seq   = row_.seq;
        before.pos   = row_.pos;
        before.layer = row_.layer;
        for (int w = 0; w < req.n_waves; ++w) {
            engine_.route(req, w, { high_.data(), low_.data(), nullptr });
        }
    }
    if (before.layer >= 0) {
        const std::string failed = engine_.end_graph();
        err = err.empty() ? failed : err;
    }
    return err;
}

} // namespace hob
