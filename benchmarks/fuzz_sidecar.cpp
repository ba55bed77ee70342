// The reader of sidecars on arbitrary bytes: it throws std::runtime_error or gives slabs that lie in their files.
//
// With libFuzzer this is its target. With any other compiler, compiled with -DHOBBIT_FUZZ_MAIN:
//
//   fuzz-sidecar [--runs N] [--seed N] FILE...       every file as it is, and N mutations of each
//
// The input is a header; tensor data is a hole behind it, so that small inputs can say large tensors. A linked sidecar
// finds its source as source.gguf in the working folder.

#include "checksum.h"
#include "hobbit-sidecar.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr size_t HOLE = 1u << 20;

[[noreturn]] void broken(const char * what) {
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

void check(const hobbit_sidecar & sc) {
    if (sc.tensors.empty() || sc.layers.empty() || sc.pair_id.empty()) {
        broken("something is empty");
    }
    for (const hobbit_sidecar_layer & l : sc.layers) {
        if (l.n_proj < 2 || l.n_proj > hob::MAX_PROJ) {
            broken("projections of a layer");
        }
        for (int p = 0; p < l.n_proj; ++p) {
            const hobbit_expert_tensor & t = sc.tensors.at((size_t) l.tensors[p]);
            if (t.proj != p || t.ne[2] < 1 || t.ne[2] > UINT16_MAX || t.ne[0] < 1 || t.ne[1] < 1) {
                broken("a tensor's place or shape");
            }
            for (int c = 0; c < hob::N_COPIES; ++c) {
                struct stat st;
                if (stat(sc.files.at((size_t) t.file[c]).c_str(), &st) != 0) {
                    broken("a file that is not there");
                }
                const unsigned __int128 bytes = (unsigned __int128) (t.ne[0] / ggml_blck_size(t.type[c])) * ggml_type_size(t.type[c]) * (uint64_t) t.ne[1] * (uint64_t) t.ne[2];
                if (bytes == 0 || t.offset[c] + bytes > (unsigned __int128) st.st_size) {
                    broken("a slab beyond the file");
                }
                if (!t.crc[c].empty() && t.crc[c].size() != hob::chunks_of((uint64_t) (bytes / t.ne[2])) * (uint64_t) t.ne[2]) {
                    broken("checksums of another number");
                }
            }
        }
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static const std::string path = "fuzzed-" + std::to_string(getpid()) + "-00001-of-00002.gguf";
    static const bool quiet = [] { ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); atexit([] { unlink(path.c_str()); }); return true; }();
    (void) quiet;
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t) size || ftruncate(fd, (off_t) (size + HOLE)) != 0) {
        broken("no place for the file");
    }
    close(fd);
    try {
        check(hobbit_read_sidecar(path));
    } catch (const std::runtime_error & e) {
        if (!*e.what() || strchr(e.what(), '\n')) {
            broken("an error that is no sentence");
        }
        return 0;
    }
    return 0;
}

#ifdef HOBBIT_FUZZ_MAIN

namespace {

std::vector<uint8_t> mutate(std::vector<uint8_t> x, std::mt19937 & rng) {
    static const uint64_t SPECIAL[] = { 0, 1, 2, 31, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, INT64_MAX, 1ull << 63, UINT64_MAX };
    for (int n = 1 + (int) (rng() % 4); n > 0 && !x.empty(); --n) {
        const size_t at = rng() % x.size();
        switch (rng() % 6) {
            case 0: x[at] ^= (uint8_t) (1u << rng() % 8); break;
            case 1: x[at] = (uint8_t) rng(); break;
            case 2:
            case 3: { // a number
                const uint64_t v = SPECIAL[rng() % (sizeof(SPECIAL) / sizeof(*SPECIAL))];
                memcpy(&x[at], &v, std::min<size_t>(x.size() - at, rng() % 2 ? 8 : 4));
                break;
            }
            case 4: x.resize(at); break;
            default: { // a piece again, elsewhere
                const size_t from = rng() % x.size(), len = std::min<size_t>(1 + rng() % 64, x.size() - from);
                const std::vector<uint8_t> piece(x.begin() + (ptrdiff_t) from, x.begin() + (ptrdiff_t) (from + len));
                x.insert(x.begin() + (ptrdiff_t) at, piece.begin(), piece.end());
            }
        }
    }
    return x;
}

} // namespace

int main(int argc, char ** argv) {
    unsigned long runs = 0, seed = 1, done = 0;
    for (int i = 1; i < argc; ++i) {
        if (i + 1 < argc && strcmp(argv[i], "--runs") == 0) {
            runs = strtoul(argv[++i], nullptr, 10);
        } else if (i + 1 < argc && strcmp(argv[i], "--seed") == 0) {
            seed = strtoul(argv[++i], nullptr, 10);
        } else {
            std::ifstream f(argv[i], std::ios::binary);
            const std::vector<uint8_t> bytes{ std::istreambuf_iterator<char>(f), {} };
            LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
            std::mt19937 rng((uint32_t) seed);
            for (unsigned long k = 0; k < runs; ++k) {
                const std::vector<uint8_t> x = mutate(bytes, rng);
                LLVMFuzzerTestOneInput(x.data(), x.size());
            }
            done += 1 + runs;
        }
    }
    printf("%lu inputs\n", done);
    return 0;
}

#endif
