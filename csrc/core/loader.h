// loader.h - the queue of loads and the threads that carry them out.
//
// A load brings one copy of one expert into one slot. It is cut into pieces (layout.h: IO_CHUNK) that
// the threads take in order: on-demand pieces before prefetch pieces; of the loads queued together, the
// parts needed first before the rest. So several loads and several parts of one are in flight at once. At most half of the
// threads carry out guesses: an on-demand load finds a thread at once, and shares the storage with at most so many of their pieces.

#pragma once

#include "storage.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hob {

// Parts of a load: what the layer needs first (gate, up), and what it needs last (down).
enum load_part { PART_EARLY = 0, PART_LATE = 1, N_PARTS = 2 };

enum load_priority { PRIORITY_DEMAND = 0, PRIORITY_PREFETCH = 1, PRIORITY_GUESS = 2, N_PRIORITIES = 3 };

// Progress of one load. The slot owns it; the loader only counts down.
struct load_state {
    std::atomic<int>  pending[N_PARTS] = { { 0 }, { 0 } }; // pieces that are not there yet
    std::atomic<bool> failed{ false };
    uint64_t          ticket = 0; // of the bank's link, if that brings it: nothing is pending then, the device waits

    bool ready(load_part part) const { return pending[part].load(std::memory_order_acquire) == 0; }
    bool done() const { return ready(PART_EARLY) && ready(PART_LATE); }
};

struct load_piece {
    const uint8_t * host; // or null: read from the file
    int        file;
    uint64_t   offset;
    size_t     n;
    bank *     to;
    size_t     to_offset;
    load_part  part;
    load_state * state;
    size_t     rows   = 1; // from host memory: so many pieces of n bytes
    size_t     stride = 0; // from one to the next, on both sides
    uint8_t *    stage = nullptr; // read from the file to here first
    load_state * busy  = nullptr; // also counted down: of the host memory that is read or written
};

struct load_request {
    const layer_layout * layer;
    group_layout *       group;
    int          copy;
    int          expert;
    int          slot;
    load_state * state; // set up by submit(), must live until it is done
    int          units = 0; // only the first units of the inner width; 0: all. Copies in host memory only

    // Filled in by a second level (host_cache.h); host and stage hold an expert's projections one after another.
    int             layer_index = -1;
    const uint8_t * host        = nullptr; // take it from here
    uint8_t *       stage       = nullptr; // read it to here on its way
    load_state *    host_busy   = nullptr; // counts the pieces there that are under way
};

class loader {
  public:
    // max_piece: as model_layout::piece_bytes(). Without threads nothing is read, and a load is done when it is
    // submitted: for a simulation. Throws std::runtime_error or std::bad_alloc.
    loader(storage & files, int n_threads, size_t max_piece);
    ~loader(); // finishes the pieces in flight, drops the others

    // Queue loads that are needed at the same time. On-demand copies from host memory to a bank with a link are
    // queued there at once; the others go through the threads. Throws std::bad_alloc: then all of them have failed.
    void submit(load_priority priority, const std::vector<load_request> & loads);

    // Loads that nobody submits any more have failed.
    static void refuse(const std::vector<load_request> & loads);

    // Move what is left of a queued prefetch to the on-demand queue.
    void promote(load_state & state);

    // Give up what is left of a queued guess: the load has failed then. Bytes that are not read because of that; file: of them, from files.
    struct dropped { uint64_t bytes = 0; uint64_t file = 0; };
    dropped drop(load_state & state);

    // Asked while something is waited for, every ASK_EVERY at least; true ends the waiting.
    using give_up_fn = std::function<bool()>;
    static constexpr std::chrono::milliseconds ASK_EVERY{ 50 };

    // Block until that part of the load has arrived. False if the load failed, and error() says why, or if it was given up.
    bool wait(load_state & state, load_part part, const give_up_fn & give_up = nullptr);

    // Block until the load has stopped touching its slot. False if it was given up before.
    bool wait_done(load_state & state, const give_up_fn & give_up = nullptr);

    std::string error();
    void clear_error();

    int64_t  busy_us(); // wall time with at least one read in flight

  private:
    void run(uint8_t * scratch);
    void queue(load_priority priority, const std::vector<load_request> & loads);
    void stop(); // waits for the pieces in flight
    void add_part(const load_request & r, int proj, bool by_link, std::vector<load_piece> & pieces) const;

    storage & files_;
    const size_t max_piece_;
    std::vector<std::unique_ptr<aligned_buffer>> scratch_; // of each thread
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable work_;  // something was queued, or stop
    std::condition_variable done_;  // a part arrived
    std::deque<load_piece> queue_[N_PRIORITIES];
    bool stop_ = false;
    std::string error_;
    int     guesses_in_flight_ = 0;
    int     in_flight_  = 0;
    int64_t busy_since_ = 0;
    int64_t busy_us_    = 0;
};

int64_t now_us();

} // namespace hob
