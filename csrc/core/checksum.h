// checksum.h - what is read, against the checksums that were written when the file was made (docs/format.md).

#pragma once

#include "storage.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hob {

// CRC-32 as zlib, gzip and PNG have it (reflected, polynomial 0xEDB88320). It finds accidents, not forgeries.
uint32_t crc32(const uint8_t * data, size_t n);

// One copy of one expert tensor: experts of `bytes` each, one behind the other, each in chunks of IO_CHUNK bytes, the
// last one shorter. One value per chunk.
struct checked_range {
    std::string           name; // for people
    int                   file   = -1;
    uint64_t              offset = 0;
    uint64_t              bytes  = 0;
    std::vector<uint32_t> values;
};

inline uint64_t chunks_of(uint64_t bytes) { return (bytes + IO_CHUNK - 1) / IO_CHUNK; }

// Reads through `files` and compares; a difference is an error of the read. Only whole chunks of the ranges can be read.
std::unique_ptr<storage> check_reads(std::unique_ptr<storage> files, const std::vector<std::string> & paths, std::vector<checked_range> ranges);

} // namespace hob
