// storage.h - reading the files that hold the experts.

#pragma once

#include "layout.h"

#include <memory>
#include <string>
#include <vector>

namespace hob {

// A page-aligned scratch buffer, one per reading thread.
class aligned_buffer {
  public:
    explicit aligned_buffer(size_t size);
    ~aligned_buffer();
    aligned_buffer(const aligned_buffer &) = delete;
    aligned_buffer & operator=(const aligned_buffer &) = delete;
    uint8_t * data() const { return data_; }

  private:
    uint8_t * data_;
};

// Reads byte ranges; thread-safe. Tests put their own in its place.
class storage {
  public:
    virtual ~storage() = default;

    // Scratch that read() needs for a piece of n bytes.
    static constexpr size_t scratch_bytes(size_t n) { return n + 2 * IO_ALIGN; }

    // Read [offset, offset + n) of file into dst. Returns "" or what went wrong.
    virtual std::string read(int file, uint64_t offset, size_t n, uint8_t * dst, uint8_t * scratch) = 0;

    // Is the page cache bypassed for all files?
    virtual bool direct() const = 0;
};

// Files opened for reading. Direct I/O where asked for and possible: aligned pieces go straight to dst,
// others through scratch. A file that turns out to refuse direct reads is read through the page cache from then on.
// A file that was written to since it was opened is refused if its first bytes are others than they were: another model's
// (one that is renamed over it is another file, and does no harm). Throws std::runtime_error if a file cannot be opened.
std::unique_ptr<storage> open_files(const std::vector<std::string> & paths, bool direct_io);

} // namespace hob
