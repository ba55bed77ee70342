// The bytes of a trace file: .npy version 1.0 (docs/trace.md).

#include "check.h"
#include "trace.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sys/stat.h>
#include <unistd.h>

using namespace hob;

namespace {

struct temp_dir {
    std::string path;
    temp_dir() {
        const char * dir = getenv("TMPDIR");
        path = std::string(dir ? dir : "/tmp") + "/hobbit-core-test-XXXXXX";
        CHECK(mkdtemp(&path[0]) != nullptr);
    }
    ~temp_dir() { CHECK_EQ(rmdir(path.c_str()), 0); } // nothing may be left in it
};

std::string contents(const std::string & path) {
    std::ifstream f(path, std::ios::binary);
    return { std::istreambuf_iterator<char>(f), {} };
}

// Two layers of one group, to be found behind the rows.
model_layout two_layers() {
    model_layout m;
    m.groups.resize(1);
    m.groups[0].n_layers = 2;
    m.groups[0].n_expert = 16;
    m.groups[0].n_used   = 3;
    m.groups[0].n_proj   = 2;
    m.groups[0].proj_bytes[COPY_HIGH][0] = 100;
    m.groups[0].proj_bytes[COPY_HIGH][1] = 200;
    m.groups[0].proj_bytes[COPY_LOW][0]  = 30;
    m.groups[0].proj_bytes[COPY_LOW][1]  = 60;
    for (int i = 0; i < 2; ++i) {
        layer_layout l;
        l.block    = 3 + i;
        l.group    = 0;
        l.in_group = i;
        l.n_expert = 16;
        l.n_used   = 3;
        m.layers.push_back(l);
    }
    return m;
}

constexpr size_t LAYER_BYTES = 256 + 2 * sizeof(hobbit_layer); // the second array

bool exists(const std::string & path) { return access(path.c_str(), F_OK) == 0; }

} // namespace

TEST(trace_bytes) {
    temp_dir dir;
    const std::string path = dir.path + "/t.npy";
    trace t;
    CHECK(!t.on());
    CHECK_EQ(t.start(path, 3, two_layers()), "");
    CHECK(t.on());
    CHECK(!t.start(path, 3, two_layers()).empty()); // one at a time
    const int32_t experts[4] = { 7, 8, 9, 10 };
    const float   weights[4] = { 0.5f, 0.25f, 0.25f, 0.0f };
    t.add(1, 20, 3, experts, weights, 2); // fewer than the file has room for
    t.add(4, 50, 6, experts, weights, 4); // more (a warm-up run)
    CHECK(!exists(path)); // appears when it is complete
    CHECK_EQ(t.stop(), "");
    CHECK(!t.on());
    CHECK(!t.stop().empty());

    const std::string f = contents(path);
    CHECK_EQ(trace_row_bytes(3), 26u);
    CHECK_EQ(f.size(), 256u + 2 * 26 + LAYER_BYTES);
    CHECK_EQ(f.substr(0, 10), std::string("\x93NUMPY\x01\x00\xf6\x00", 10)); // 246 bytes of header follow
    const std::string dict = f.substr(10, 246);
    CHECK_EQ(dict.find("{'descr': [('seq', '<i2'), ('pos', '<i4'), ('layer', '<i2'), ('expert', '<i2', (3,)), ('weight', '<f4', (3,))], "
                       "'fortran_order': False, 'shape': (2,), }"), 0u);
    CHECK_EQ(dict.back(), '\n');
    const unsigned char first[14] = { 1, 0, 20, 0, 0, 0, 3, 0, 7, 0, 8, 0, 0xff, 0xff };
    CHECK(memcmp(f.data() + 256, first, sizeof(first)) == 0);
    const float expected_w[3] = { 0.5f, 0.25f, 0.0f };
    CHECK(memcmp(f.data() + 256 + 14, expected_w, sizeof(expected_w)) == 0);
    trace_row row;
    row.read(f.data() + 256 + 26, 3);
    CHECK_EQ(row.seq, 4);
    CHECK_EQ(row.pos, 50);
    CHECK_EQ(row.layer, 6);
    CHECK(row.experts == std::vector<int32_t>({ 7, 8, 9 }));
    CHECK(row.weights == std::vector<float>({ 0.5f, 0.25f, 0.25f }));

    const std::string second = f.substr(256 + 2 * 26);
    CHECK_EQ(second.find("{'descr': [('block', '<i4'), ('group', '<i4'), ('n_expert', '<i4'), ('n_expert_used', '<i4'), "
                         "('high_bytes', '<u8', (3,)), ('low_bytes', '<u8', (3,))], 'fortran_order': False, 'shape': (2,), }"), 10u);
    hobbit_layer layer;
    memcpy(&layer, second.data() + 256 + sizeof(layer), sizeof(layer));
    CHECK_EQ(layer.block, 4);
    CHECK_EQ(layer.n_expert, 16);
    CHECK_EQ(layer.high_bytes[1], 200u);
    CHECK_EQ(layer.low_bytes[2], 0u);
    unlink(path.c_str());
}

TEST(trace_is_completed_by_the_destructor) {
    temp_dir dir;
    const std::string path = dir.path + "/t.npy";
    {
        trace t;
        CHECK_EQ(t.start(path, 1, two_layers()), "");
    }
    CHECK_EQ(contents(path).size(), 256u + LAYER_BYTES); // no rows is a trace, too
    unlink(path.c_str());
}

TEST(trace_where_nothing_can_be_written) {
    trace t;
    const std::string err = t.start("/nonexistent-folder/t.npy", 2, two_layers());
    CHECK(err.find("/nonexistent-folder/") != std::string::npos);
    CHECK(!t.on());
    {
        temp_dir dir;
        // the name is taken by a folder that is not empty: the rename fails
        const std::string path = dir.path + "/t.npy";
        CHECK_EQ(mkdir(path.c_str(), 0700) | mkdir((path + "/x").c_str(), 0700), 0);
        CHECK_EQ(t.start(path, 2, two_layers()), "");
        CHECK(!t.stop().empty());
        CHECK_EQ(rmdir((path + "/x").c_str()) | rmdir(path.c_str()), 0);
    }
}
