#include "loader.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <system_error>

namespace hob {

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

loader::loader(storage & files, int n_threads, size_t max_piece) : files_(files), max_piece_(max_piece) {
    try {
        for (int i = 0; i < n_threads; ++i) {
            scratch_.push_back(std::make_unique<aligned_buffer>(storage::scratch_bytes(max_piece_)));
            threads_.emplace_back([this, scratch = scratch_.back()->data()] { run(scratch); });
        }
    } catch (const std::system_error & e) { // those that have started would be waited for without end
        stop();
        throw std::runtime_error("cannot start " + std::to_string(n_threads) + " threads to load experts (" + e.what() +
                                 "): raise the limits on threads and memory, or give a smaller n_io_threads");
    } catch (...) {
        stop();
        throw;
    }
}

loader::~loader() { stop(); }

void loader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (std::thread & t : threads_) {
        t.join();
    }
}

// The pieces of one projection of a load.
void loader::add_part(const load_request & r, int proj, bool by_link, std::vector<load_piece> & pieces) const {
    group_layout & g = *r.group;
    const slab & s = r.layer->src[r.copy][proj];
    const bool late = proj + 1 == g.n_proj;
    bank & to = g.banks[r.copy][proj];
    const uint64_t first = r.expert * s.bytes;
    const size_t   slot  = r.slot * to.stride;
    size_t before = 0; // bytes of the projections before
    for (int p = 0; p < proj; ++p) {
        before += g.proj_bytes[r.copy][p];
    }
    const uint8_t * host = s.host ? s.host + first : r.host ? r.host + before : nullptr;
    load_piece x = { host, s.file, s.offset + first, (size_t) s.bytes, &to, slot, late ? PART_LATE : PART_EARLY, r.state };
    x.stage = host || !r.stage ? nullptr : r.stage + before;
    x.busy  = s.host ? nullptr : r.host_busy;
    if (r.units > 0 && late) { // the first columns of every row
        const size_t row = g.row_bytes[r.copy][proj];
        x.n      = row / g.n_units * r.units;
        x.rows   = s.bytes / row;
        x.stride = row;
        pieces.push_back(x);
        return;
    }
    const int parts = r.units > 0 ? g.n_parts[proj] : 1;
    for (int i = 0; i < parts; ++i) {
        const uint64_t begin = s.bytes / parts * i;
        const uint64_t bytes = r.units > 0 ? s.bytes / parts / g.n_units * r.units : s.bytes;
        const uint64_t step  = by_link ? bytes : host ? LINK_CHUNK : max_piece_;
        for (uint64_t at = 0; at < bytes; at += step) {
            load_piece y = x;
            y.host      = x.host ? x.host + begin + at : nullptr;
            y.stage     = x.stage ? x.stage + begin + at : nullptr;
            y.offset    = x.offset + begin + at;
            y.to_offset = x.to_offset + begin + at;
            y.n         = (size_t) std::min<uint64_t>(step, bytes - at);
            pieces.push_back(y);
        }
    }
}

void loader::submit(load_priority priority, const std::vector<load_request> & loads) {
    if (threads_.empty()) {
        for (const load_request & r : loads) {
            r.state->failed.store(false, std::memory_order_relaxed);
        }
        return;
    }
    try {
        queue(priority, loads);
    } catch (...) {
        refuse(loads);
        throw;
    }
}

void loader::refuse(const std::vector<load_request> & loads) {
    for (const load_request & r : loads) {
        for (load_state * state : { r.state, r.host_busy }) {
            for (int part = 0; state && part < N_PARTS; ++part) {
                state->failed.store(true, std::memory_order_relaxed);
                state->pending[part].store(0, std::memory_order_relaxed);
            }
        }
    }
}

void loader::queue(load_priority priority, const std::vector<load_request> & loads) {
    std::vector<load_piece> pieces[N_PARTS];
    std::vector<load_piece> linked[N_PARTS];
    device_link * link = nullptr;
    for (const load_request & r : loads) {
        bool by_link = priority == PRIORITY_DEMAND;
        for (int p = 0; p < r.group->n_proj; ++p) {
            by_link = by_link && r.layer->src[r.copy][p].host && r.group->banks[r.copy][p].link;
        }
        size_t before[N_PARTS];
        for (int part = 0; part < N_PARTS; ++part) {
            before[part] = pieces[part].size();
        }
        for (int p = 0; p < r.group->n_proj; ++p) {
            const load_part part = p + 1 < r.group->n_proj ? PART_EARLY : PART_LATE;
            add_part(r, p, by_link, (by_link ? linked : pieces)[part]);
        }
        if (by_link) {
            link = r.group->banks[r.copy][0].link;
        }
        r.state->ticket = 0;
        r.state->failed.store(false, std::memory_order_relaxed);
        for (int part = 0; part < N_PARTS; ++part) {
            const int n = (int) (pieces[part].size() - before[part]);
            r.state->pending[part].store(n, std::memory_order_relaxed);
            if (r.host_busy) {
                r.host_busy->pending[part].store(n, std::memory_order_relaxed);
            }
        }
        if (r.host_busy) {
            r.host_busy->failed.store(false, std::memory_order_relaxed);
        }
    }
    if (link) {
        for (auto & part : linked) {
            for (const load_piece & x : part) {
                link->copy(*x.to, x.to_offset, x.host, x.n, x.rows, x.stride, x.stride);
            }
        }
        const uint64_t ticket = link->mark();
        for (auto & part : linked) {
            for (const load_piece & x : part) {
                x.state->ticket = ticket;
            }
        }
    }
    std::vector<load_piece> & all = pieces[PART_EARLY];
    all.insert(all.end(), pieces[PART_LATE].begin(), pieces[PART_LATE].end());
    if (all.empty()) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_[priority].insert(queue_[priority].end(), all.begin(), all.end()); // all of them or none
    }
    work_.notify_all();
}

void loader::promote(load_state & state) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto mine = [&](const load_piece & p) { return p.state == &state; };
    std::vector<load_piece> moved;
    for (load_priority q : { PRIORITY_PREFETCH, PRIORITY_GUESS }) {
        std::copy_if(queue_[q].begin(), queue_[q].end(), std::back_inserter(moved), mine);
    }
    queue_[PRIORITY_DEMAND].insert(queue_[PRIORITY_DEMAND].end(), moved.begin(), moved.end()); // all of them or none
    for (load_priority q : { PRIORITY_PREFETCH, PRIORITY_GUESS }) {
        queue_[q].erase(std::remove_if(queue_[q].begin(), queue_[q].end(), mine), queue_[q].end());
    }
    work_.notify_all(); // threads may have left guesses alone
}

loader::dropped loader::drop(load_state & state) {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped sum;
    auto & from = queue_[PRIORITY_GUESS];
    const auto mine = [&](const load_piece & p) { return p.state == &state; };
    for (const load_piece & p : from) {
        if (!mine(p)) {
            continue;
        }
        sum.bytes += p.n * p.rows;
        sum.file  += p.host ? 0 : p.n * p.rows;
        state.failed.store(true, std::memory_order_release);
        if (p.busy) {
            if (p.stage) { // else it is read from there, and stays as it is
                p.busy->failed.store(true, std::memory_order_release);
            }
            p.busy->pending[p.part].fetch_sub(1, std::memory_order_acq_rel);
        }
        state.pending[p.part].fetch_sub(1, std::memory_order_acq_rel);
    }
    from.erase(std::remove_if(from.begin(), from.end(), mine), from.end());
    done_.notify_all();
    return sum;
}

bool loader::wait(load_state & state, load_part part, const give_up_fn & give_up) {
    while (!state.ready(part)) {
        if (give_up && give_up()) { // without the lock: it may take its time
            return false;
        }
        const auto there = [&] { return state.ready(part); };
        std::unique_lock<std::mutex> lock(mutex_);
        if (give_up) {
            done_.wait_for(lock, ASK_EVERY, there);
        } else {
            done_.wait(lock, there);
        }
    }
    return !state.failed.load(std::memory_order_acquire);
}

bool loader::wait_done(load_state & state, const give_up_fn & give_up) {
    wait(state, PART_EARLY, give_up);
    wait(state, PART_LATE, give_up);
    return state.done();
}

std::string loader::error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

void loader::clear_error() {
    std::lock_guard<std::mutex> lock(mutex_);
    error_.clear();
}

int64_t loader::busy_us() {
    std::lock_guard<std::mutex> lock(mutex_);
    return busy_us_ + (in_flight_ > 0 ? now_us() - busy_since_ : 0);
}

// scratch: for unaligned reads
void loader::run(uint8_t * scratch) {
    std::unique_ptr<aligned_buffer> landing; // for memory the CPU cannot write

    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        if (stop_) {
            return;
        }
        int q = 0;
        while (q < N_PRIORITIES && (queue_[q].empty() || (q == PRIORITY_GUESS && guesses_in_flight_ >= std::max<int>(1, (int) threads_.size() / 2)))) {
            q++;
        }
        if (q == N_PRIORITIES) {
            work_.wait(lock);
            continue;
        }
        const load_piece piece = queue_[q].front();
        queue_[q].pop_front();
        guesses_in_flight_ += q == PRIORITY_GUESS;
        if (in_flight_++ == 0) {
            busy_since_ = now_us();
        }
        lock.unlock();

        std::string err;
        if (!piece.state->failed.load(std::memory_order_relaxed)) {
            try {
                if (piece.host && piece.to->base) {
                    for (size_t i = 0; i < piece.rows; ++i) {
                        memcpy(piece.to->base + piece.to_offset + i * piece.stride, piece.host + i * piece.stride, piece.n);
                    }
                } else if (piece.host) {
                    piece.to->write(piece.to_offset, piece.host, piece.n);
                } else if (piece.stage) {
                    err = files_.read(piece.file, piece.offset, piece.n, piece.stage, scratch);
                    if (err.empty() && piece.to->base) {
                        memcpy(piece.to->base + piece.to_offset, piece.stage, piece.n);
                    } else if (err.empty()) {
                        piece.to->write(piece.to_offset, piece.stage, piece.n);
                    }
                } else if (piece.to->base) {
                    err = files_.read(piece.file, piece.offset, piece.n, piece.to->base + piece.to_offset, scratch);
                } else {
                    if (!landing) {
                        landing = std::make_unique<aligned_buffer>(max_piece_);
                    }
                    err = files_.read(piece.file, piece.offset, piece.n, landing->data(), scratch);
                    if (err.empty()) {
                        piece.to->write(piece.to_offset, landing->data(), piece.n);
                    }
                }
            } catch (const std::exception & e) {
                err = e.what();
            }
        }

        lock.lock();
        guesses_in_flight_ -= q == PRIORITY_GUESS;
        if (!err.empty()) {
            piece.state->failed.store(true, std::memory_order_release);
            if (error_.empty()) {
                error_ = std::move(err);
            }
        }
        if (--in_flight_ == 0) {
            busy_us_ += now_us() - busy_since_;
        }
        if (piece.busy) {
            // a failed load skips the rest of its pieces: what they would have read is not there
            if (piece.stage && piece.state->failed.load(std::memory_order_relaxed)) {
                piece.busy->failed.store(true, std::memory_order_release);
            }
            piece.busy->pending[piece.part].fetch_sub(1, std::memory_order_acq_rel);
        }
        // counted down under the lock: a waiter that sees zero may reuse the state at once
        if (piece.state->pending[piece.part].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            done_.notify_all();
        }
    }
}

} // namespace hob
