#include "loader.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>

namespace hob {

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

loader::loader(storage & files, int n_threads, size_t max_piece) : files_(files), max_piece_(max_piece) {
    for (int i = 0; i < n_threads; ++i) {
        threads_.emplace_back([this] { run(); });
    }
}

loader::~loader() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (std::thread & t : threads_) {
        t.join();
    }
}

void loader::submit(load_priority priority, const std::vector<load_request> & loads) {
    std::vector<load_piece> pieces[N_PARTS];
    for (const load_request & r : loads) {
        int pending[N_PARTS] = { 0, 0 };
        for (int p = 0; p < r.group->n_proj; ++p) {
            const slab & s = r.layer->src[r.copy][p];
            const load_part part = p + 1 < r.group->n_proj ? PART_EARLY : PART_LATE;
            bank & to = r.group->banks[r.copy][p];
            const uint64_t first = r.expert * s.bytes;
            const uint64_t step  = s.host ? LINK_CHUNK : max_piece_;
            for (uint64_t at = 0; at < s.bytes; at += step) {
                pieces[part].push_back({ s.host ? s.host + first + at : nullptr, s.file, s.offset + first + at,
                                         (size_t) std::min<uint64_t>(step, s.bytes - at), &to, r.slot * to.stride + (size_t) at, part, r.state });
                pending[part]++;
            }
        }
        r.state->failed.store(false, std::memory_order_relaxed);
        for (int part = 0; part < N_PARTS; ++part) {
            r.state->pending[part].store(pending[part], std::memory_order_relaxed);
        }
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto & part : pieces) {
            queue_[priority].insert(queue_[priority].end(), part.begin(), part.end());
        }
    }
    work_.notify_all();
}

void loader::promote(load_state & state) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto & from = queue_[PRIORITY_PREFETCH];
    const auto mine = [&](const load_piece & p) { return p.state == &state; };
    std::copy_if(from.begin(), from.end(), std::back_inserter(queue_[PRIORITY_DEMAND]), mine);
    from.erase(std::remove_if(from.begin(), from.end(), mine), from.end());
}

bool loader::wait(load_state & state, load_part part) {
    if (!state.ready(part)) {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return state.ready(part); });
    }
    return !state.failed.load(std::memory_order_acquire);
}

void loader::wait_done(load_state & state) {
    wait(state, PART_EARLY);
    wait(state, PART_LATE);
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

void loader::run() {
    // scratch for unaligned reads, landing place for memory the CPU cannot write
    aligned_buffer scratch(storage::scratch_bytes(max_piece_));
    std::unique_ptr<aligned_buffer> landing;

    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        auto * q = !queue_[PRIORITY_DEMAND].empty() ? &queue_[PRIORITY_DEMAND] : &queue_[PRIORITY_PREFETCH];
        if (stop_) {
            return;
        }
        if (q->empty()) {
            work_.wait(lock);
            continue;
        }
        const load_piece piece = q->front();
        q->pop_front();
        if (in_flight_++ == 0) {
            busy_since_ = now_us();
        }
        lock.unlock();

        std::string err;
        if (!piece.state->failed.load(std::memory_order_relaxed)) {
            try {
                if (piece.host && piece.to->base) {
                    memcpy(piece.to->base + piece.to_offset, piece.host, piece.n);
                } else if (piece.host) {
                    piece.to->write(piece.to_offset, piece.host, piece.n);
                } else if (piece.to->base) {
                    err = files_.read(piece.file, piece.offset, piece.n, piece.to->base + piece.to_offset, scratch.data());
                } else {
                    if (!landing) {
                        landing = std::make_unique<aligned_buffer>(max_piece_);
                    }
                    err = files_.read(piece.file, piece.offset, piece.n, landing->data(), scratch.data());
                    if (err.empty()) {
                        piece.to->write(piece.to_offset, landing->data(), piece.n);
                    }
                }
            } catch (const std::exception & e) {
                err = e.what();
            }
        }

        lock.lock();
        if (!err.empty()) {
            piece.state->failed.store(true, std::memory_order_release);
            if (error_.empty()) {
                error_ = err;
            }
        }
        if (--in_flight_ == 0) {
            busy_us_ += now_us() - busy_since_;
        }
        // counted down under the lock: a waiter that sees zero may reuse the state at once
        if (piece.state->pending[piece.part].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            done_.notify_all();
        }
    }
}

} // namespace hob
