// simulate.h - the engine without weights: what it loads and gives up for a recorded routing.
//
// It is the engine of a real run, with a loader that has no threads and storage that holds nothing, so rule, records,
// budget, policies and plans are the same code. The routing is played one token at a time, as in generation.

#pragma once

#include "clairvoyant.h"
#include "engine.h"

namespace hob {

// An engine to be played with. slots: [group][copy], or null: as params divide a budget. Throws std::runtime_error.
std::unique_ptr<engine> make_simulated_engine(model_layout layout, const hobbit_params & params, const int32_t * slots);

// Plays the rows of a trace (trace.h) through such an engine.
class replay {
  public:
    explicit replay(engine & e) : engine_(e), known_(e.layout()) {}

    // From now on evict by what these rows will ask for; they must be played next, in that order, with the thresholds
    // in force now.
    std::string foresee(const char * rows, int64_t n_rows, int n_used);

    // Rows must hold whole tokens, a token's layers one after another, rising. Returns "" or what is wrong; what comes
    // before the wrong row has been played then.
    std::string run(const char * rows, int64_t n_rows, int n_used);

  private:
    std::string read(const char * at, int64_t row, int n_used); // into row_

    engine &  engine_;
    future    known_;
    bool      foreseen_ = false;
    int64_t   step_     = 0;
    trace_row row_;
    int       n_here_   = 0; // experts in row_
    std::vector<int32_t> high_, low_; // where the engine writes slots
};

} // namespace hob
