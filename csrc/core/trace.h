// trace.h - recording the routing to a NumPy .npy file (docs/trace.md).

#pragma once

#include "layout.h"

#include <cstdio>
#include <string>

namespace hob {

class trace {
  public:
    trace() = default;
    ~trace() { stop(); }
    trace(const trace &) = delete;
    trace & operator=(const trace &) = delete;

    bool on() const { return file_ != nullptr; }

    // Returns "" or what went wrong. Rows have room for n_used ranks.
    std::string start(const std::string & path, int n_used);

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
};

} // namespace hob
