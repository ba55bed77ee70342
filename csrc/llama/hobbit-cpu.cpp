#include "hobbit-cpu.h"

#include "hobbit-route.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

namespace {

constexpr size_t PIECE_MIN = 8u << 10; // bytes of weights that a thread takes at once
constexpr size_t PIECE_MAX = 256u << 10;
constexpr int    PIECES_PER_THREAD = 6;

// Weights are asked for so far ahead of their use: processors stop at the end of a page, and a core alone then draws half
// of what it could (measured: 15 cores 76 GB/s without, 111 with; 1 to 8 KiB are alike within 10 %).
constexpr size_t PREFETCH_BYTES = 2048;
constexpr size_t CACHE_LINE     = 64;

// One expert in one projection and copy: rows of its weights, and the rows of x that it is multiplied with.
struct job {
    const ggml_tensor * bank;
    int     copy;
    int     expert;
    int     proj;
    int64_t begin;   // of the tail: row of every part of the inner width, or column
    int64_t n_rows;  // of weights
    int64_t piece;   // rows of weights
    int     first;   // of its pieces
    int     use;     // the first: token*n_used + rank
};

// A thread's own: jobs, and the rows of x in the types that the weights' products want. Kept for the next operation.
struct scratch {
    std::vector<job>     jobs;
    std::vector<int>     next_use; // of the same expert, -1: none
    std::vector<uint8_t> rows;
    std::vector<char>    ready; // [copy][row of x]
};

struct operands {
    const hobbit_cpu_op & op;
    const ggml_tensor * dst;
    const ggml_tensor * x;
    const ggml_tensor * route;
    int n_used;
    int n_tokens;

    int at(int plane, int use) const { return ((const int32_t *) route->data)[(size_t) plane * n_used * n_tokens + use]; }
    int matrix(int copy, int use) const { return at(op.plane + copy, use); }
    int tail(int use) const { return op.inner > 0 ? at(PLANE_TAIL, use) : 0; }
    int x_row(int use) const { return op.x_rows == 1 ? use / n_used : use; }
    int n_x_rows() const { return (int) (op.x_rows * n_tokens); }
    const float * x_at(int row, int64_t n_in) const {
        return (const float *) x->data + row / op.x_rows * op.x_stride + row % op.x_rows * n_in;
    }
    float * y_at(int use, int proj) const {
        return (float *) ((char *) dst->data + use % n_used * dst->nb[1] + use / n_used * dst->nb[2] + proj * dst->nb[3]);
    }
};

// The jobs of all threads, the same for each; returns the number of pieces.
int list_jobs(const operands & o, int n_threads, scratch & s) {
    std::vector<job> & jobs = s.jobs;
    jobs.clear();
    s.next_use.assign((size_t) o.n_used * o.n_tokens, -1);
    size_t bytes = 0;
    for (int c = 0; c < hob::N_COPIES; ++c) {
        for (int use = 0; use < o.n_used * o.n_tokens; ++use) {
            const int e = o.matrix(c, use);
            if (e < 0) {
                continue;
            }
            const auto same = std::find_if(jobs.begin(), jobs.end(), [&](const job & j) { return j.copy == c && j.expert == e; });
            if (same != jobs.end()) {
                s.next_use[use]       = s.next_use[same->use];
                s.next_use[same->use] = use;
                continue;
            }
            for (int p = 0; p < o.op.n_proj; ++p) {
                const ggml_tensor * bank = o.op.bank[p][c];
                const int64_t begin = o.tail(use);
                const int64_t rows  = o.op.down || begin == 0 ? bank->ne[1] : bank->ne[1] / o.op.inner * (o.op.inner - begin);
                jobs.push_back({ bank, c, e, p, begin, rows, 0, 0, use });
                bytes += rows * bank->nb[1] - (o.op.down ? rows * ggml_row_size(bank->type, begin) : 0);
            }
        }
    }
    const size_t piece = std::min(std::max(bytes / (n_threads * PIECES_PER_THREAD), PIECE_MIN), PIECE_MAX);
    int n = 0;
    for (job & j : jobs) {
        const size_t row = j.bank->nb[1] - (o.op.down ? ggml_row_size(j.bank->type, j.begin) : 0);
        j.piece = std::max<int64_t>(1, (int64_t) (piece / row));
        j.first = n;
        n += (int) ((j.n_rows + j.piece - 1) / j.piece);
    }
    return n;
}

// What no job writes.
void clear(const operands & o, int ith, int nth) {
    for (int use = ith; use < o.n_used * o.n_tokens; use += nth) {
        const bool mine = o.matrix(hob::COPY_HIGH, use) >= 0 || o.matrix(hob::COPY_LOW, use) >= 0;
        const int64_t begin = mine && !o.op.down ? o.tail(use) : 0;
        for (int p = 0; p < o.op.n_proj; ++p) {
            float * y = o.y_at(use, p);
            if (!mine && !o.dst->view_src) {
                std::fill_n(y, o.dst->ne[0], 0.0f);
            }
            for (int64_t r = 0; begin > 0 && r < o.dst->ne[0]; r += o.op.inner) {
                std::fill_n(y + r, begin, 0.0f);
            }
        }
    }
}

void prefetch(const char * from, const char * to) {
    for (; from < to; from += CACHE_LINE) {
        __builtin_prefetch(from);
    }
}

void multiply(const operands & o, const job & j, int64_t from, int64_t to, scratch & s) {
    const ggml_type_traits_cpu * traits = hobbit_cpu_traits(j.bank->type);
    const ggml_type x_type = traits->vec_dot_type;
    const int64_t n_in  = j.bank->ne[0];
    const int64_t begin = o.op.down ? j.begin : 0;
    const size_t room   = n_in * sizeof(float); // of a row in any type
    const int64_t tail  = !o.op.down && j.begin > 0 ? o.op.inner - j.begin : j.bank->ne[1]; // consecutive rows

    const auto x_of = [&](int use) -> const uint8_t * {
        const int r = o.x_row(use);
        if (x_type == GGML_TYPE_F32) {
            return (const uint8_t *) o.x_at(r, n_in) + ggml_row_size(x_type, begin);
        }
        uint8_t * to_row = s.rows.data() + ((size_t) j.copy * o.n_x_rows() + r) * room;
        char & ready = s.ready[(size_t) j.copy * o.n_x_rows() + r];
        if (!ready) {
            hobbit_cpu_traits(x_type)->from_float(o.x_at(r, n_in) + begin, to_row + ggml_row_size(x_type, begin), n_in - begin);
            ready = true;
        }
        return to_row + ggml_row_size(x_type, begin);
    };

    const char * expert = (const char *) j.bank->data + j.expert * j.bank->nb[2] + ggml_row_size(j.bank->type, begin);
    const size_t nb1 = j.bank->nb[1];
    const char * const end = (const char *) j.bank->data + (j.expert + 1) * j.bank->nb[2];
    for (int use = j.use; use >= 0; use = s.next_use[use]) { // the rows of a piece stay in the core's cache
        const uint8_t * x = x_of(use);
        float * y = o.y_at(use, j.proj);
        for (int64_t i = from; i < to; ++i) {
            const int64_t r = tail == j.bank->ne[1] ? i : i / tail * o.op.inner + j.begin + i % tail;
            if (use == j.use) {
                prefetch(expert + r * nb1 + PREFETCH_BYTES, std::min(expert + (r + 1) * nb1 + PREFETCH_BYTES, end));
            }
            traits->vec_dot((int) (n_in - begin), y + r, 0, expert + r * nb1, 0, x, 0, 1);
        }
    }
}

int prepare(const operands & o, int n_threads, scratch & s) {
    const int n_pieces = list_jobs(o, n_threads, s);
    s.ready.assign((size_t) hob::N_COPIES * o.n_x_rows(), false);
    if (!s.jobs.empty()) {
        s.rows.resize(std::max(s.rows.size(), s.ready.size() * s.jobs[0].bank->ne[0] * sizeof(float)));
    }
    return n_pieces;
}

void compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    hobbit_cpu_op & op = *(hobbit_cpu_op *) userdata;
    static thread_local scratch s;
    ggml_tensor ** args = dst->src + (dst->view_src ? 1 : 0);
    const operands o = { op, dst, args[0], args[1], (int) dst->ne[1], (int) dst->ne[2] };
    if (ith == 0 && !op.down && op.timed) {
        op.engine->cpu_begins();
        op.engine->rank_ahead();
    }
    clear(o, ith, nth);
    int n_pieces = 0;
    try {
        n_pieces = prepare(o, nth, s);
    } catch (const std::exception & e) { // must not pass through ggml
        op.engine->fail(e);
    }
    for (int k = op.next++; k < n_pieces; k = op.next++) {
        const job & j = *(std::upper_bound(s.jobs.begin(), s.jobs.end(), k, [](int piece, const job & x) { return piece < x.first; }) - 1);
        const int64_t from = (k - j.first) * j.piece;
        multiply(o, j, from, std::min(from + j.piece, j.n_rows), s);
    }
    if (++op.finished == nth) { // the last one
        op.next     = 0;
        op.finished = 0;
        if (op.down && op.timed) {
            op.engine->cpu_done();
        }
    }
}

} // namespace

const ggml_type_traits_cpu * hobbit_cpu_traits(ggml_type type) {
    using getter = const ggml_type_traits_cpu * (*)(ggml_type);
    static const getter get = (getter) ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CPU"), "ggml_get_type_traits_cpu");
    return get(type);
}

ggml_tensor * hobbit_cpu_product(ggml_context * ctx, hobbit_cpu_op & op, ggml_tensor * x, ggml_tensor * route, ggml_tensor * onto) {
    ggml_tensor * args[2] = { x, route };
    if (onto) {
        return ggml_custom_inplace(ctx, onto, args, 2, compute, GGML_N_TASKS_MAX, &op);
    }
    return ggml_custom_4d(ctx, GGML_TYPE_F32, op.bank[0][hob::COPY_HIGH]->ne[1], route->ne[0], route->ne[1], op.n_proj, args, 2, compute, GGML_N_TASKS_MAX, &op);
}
