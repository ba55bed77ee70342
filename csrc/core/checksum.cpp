#include "checksum.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace hob {

namespace {

// Slicing by eight (Kounavis and Berry, 2005): table[k][b] is the CRC of byte b followed by k zeros.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
    std::array<std::array<uint32_t, 256>, 8> t = {};
    for (uint32_t b = 0; b < 256; ++b) {
        uint32_t c = b;
        for (int i = 0; i < 8; ++i) {
            c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        }
        t[0][b] = c;
    }
    for (size_t k = 1; k < 8; ++k) {
        for (size_t b = 0; b < 256; ++b) {
            t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xff];
        }
    }
    return t;
}

constexpr auto TABLES = make_tables();

uint32_t word(const uint8_t * p) { return (uint32_t) p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24; }

class checked_storage : public storage {
  public:
    checked_storage(std::unique_ptr<storage> files, const std::vector<std::string> & paths, std::vector<checked_range> ranges)
        : files_(std::move(files)), paths_(paths) {
        for (checked_range & r : ranges) {
            const std::pair<int, uint64_t> key = { r.file, r.offset };
            ranges_[key] = std::move(r);
        }
    }

    bool direct() const override { return files_->direct(); }

    std::string read(int file, uint64_t offset, size_t n, uint8_t * dst, uint8_t * scratch) override {
        const std::string err = files_->read(file, offset, n, dst, scratch);
        if (!err.empty()) {
            return err;
        }
        auto it = ranges_.upper_bound({ file, offset });
        if (it == ranges_.begin() || (--it)->first.first != file) {
            return unknown(file, offset, n);
        }
        const checked_range & r = it->second;
        const uint64_t expert = (offset - r.offset) / r.bytes;
        const uint64_t at     = (offset - r.offset) % r.bytes;
        const uint64_t index  = expert * chunks_of(r.bytes) + at / IO_CHUNK;
        if (at % IO_CHUNK != 0 || n != std::min<uint64_t>(IO_CHUNK, r.bytes - at) || index >= r.values.size()) {
            return unknown(file, offset, n);
        }
        if (crc32(dst, n) != r.values[index]) {
            return paths_[file] + ": damaged: " + r.name + ", expert " + std::to_string(expert) + ": " + std::to_string(n) + " bytes at offset " +
                   std::to_string(offset) + " do not have the checksum that they had when the file was made";
        }
        return "";
    }

  private:
    // an error, or nobody would notice that something goes unchecked
    std::string unknown(int file, uint64_t offset, size_t n) const {
        return paths_[file] + ": no checksum for the " + std::to_string(n) + " bytes at offset " + std::to_string(offset);
    }

    std::unique_ptr<storage> files_;
    std::vector<std::string> paths_;
    std::map<std::pair<int, uint64_t>, checked_range> ranges_;
};

} // namespace

uint32_t crc32(const uint8_t * data, size_t n) {
    uint32_t c = 0xffffffffu;
    for (; n >= 8; data += 8, n -= 8) {
        const uint32_t a = c ^ word(data), b = word(data + 4);
        c = TABLES[7][a & 0xff] ^ TABLES[6][a >> 8 & 0xff] ^ TABLES[5][a >> 16 & 0xff] ^ TABLES[4][a >> 24] ^
            TABLES[3][b & 0xff] ^ TABLES[2][b >> 8 & 0xff] ^ TABLES[1][b >> 16 & 0xff] ^ TABLES[0][b >> 24];
    }
    for (; n > 0; ++data, --n) {
        c = c >> 8 ^ TABLES[0][(c ^ *data) & 0xff];
    }
    return ~c;
}

std::unique_ptr<storage> check_reads(std::unique_ptr<storage> files, const std::vector<std::string> & paths, std::vector<checked_range> ranges) {
    return std::make_unique<checked_storage>(std::move(files), paths, std::move(ranges));
}

} // namespace hob
