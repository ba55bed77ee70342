// trace.h - recording the routing to a NumPy .npy file, and reading its rows (docs/trace.md).

#pragma once

#include "layout.h"

#include <cstdio>
#include <string>
#include <vector>

namespace hob {

// A row of the file, packed: seq i2, pos i4, layer i2, expert i2[n_used], weight f4[n_used].
inline size_t trace_row_bytes(int n_used) { return 8 + 6 * (size_t) n_used; }

struct trace_row {
    int32_t seq;
    int32_t pos;
    int32_t layer;
    std::vector<int32_t> experts; // [n_used], -1: none
    std::vector<float>   weights; // [n_used]

    void read(const char * from, int n_used);
};

class trace {
  public:
    trace() = default;
    ~trace() { stop(); }
    trace(const trace &) = delete;
    trace & operator=(const trace &) = delete;

    bool on() const { return file_ != nullptr; }

    // Returns "" or what went wrong. Rows have room for n_used ranks; the layers' shapes follow them in the file.
    std::string start(const std::string & path, int n_used, const model_layout & layout);

    // experts, weights [n_used]; fewer ranks than the file's are filled up with expert -1.
    void add(int32_t seq, int32_t pos, int32_t layer, const int32_t * experts, const float * weights, int n_used);

    // Completes the file and gives it its name.
    std::string stop();

  private:
    std::string header() const;

    FILE *      file_ = nullptr;
    std::string path_;
    std::string temporary_;
    int         n_used_ = 0;
    uint64_t    rows_   = 0;
    bool        bad_    = false;
    std::string row_;
    std::string layers_; // the second array
};

} // namespace hob
