// Which experts follow which.

#include "check.h"
#include "fake_model.h"
#include "succession.h"

using namespace hob;

namespace {

constexpr int N_LAYERS = 3, N_EXPERT = 8;

struct fixture {
    fake_model       model{ { { N_EXPERT, 1, 1, { { 64, 0, 0 }, { 16, 0, 0 } } } }, std::vector<int>(N_LAYERS, 0) };
    succession       learned{ model.layout };
    succession_state a, b;
    uint32_t         number[2] = { 0, 0 }; // tokens of a and b so far

    fixture() {
        learned.start(a);
        learned.start(b);
    }

    // One token of a (or b): the experts of its layers; as many layers as are given.
    void token(const std::vector<int32_t> & experts, bool of_b = false) {
        learned.begin({ { of_b ? &b : &a, ++number[of_b] } });
        for (size_t l = 0; l < experts.size(); ++l) {
            learned.serve((int) l, &experts[l], 1, 1);
        }
    }

    // The same of several tokens of a at once.
    void batch(const std::vector<std::vector<int32_t>> & tokens) {
        std::vector<succession_token> all;
        for (size_t t = 0; t < tokens.size(); ++t) {
            all.push_back({ &a, ++number[0] });
        }
        learned.begin(all);
        for (int l = 0; l < N_LAYERS; ++l) {
            std::vector<int32_t> experts;
            for (const auto & t : tokens) {
                experts.push_back(t[l]);
            }
            learned.serve(l, experts.data(), (int) tokens.size(), 1);
        }
    }

    double chance(int layer, int expert) const { return learned.chance(a, layer, expert); }
};

// A text whose layers choose x, x+1, x+2; x jumps about.
std::vector<int32_t> chain(int i) {
    uint32_t h = (uint32_t) i * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    const int x = (int) ((h ^ h >> 13) % 6);
    return { x, x + 1, x + 2 };
}

} // namespace

TEST(succession_starts_with_the_share_that_is_used) {
    fixture f;
    for (int e = 0; e < N_EXPERT; ++e) {
        CHECK(f.chance(1, e) > 0.12 && f.chance(1, e) < 0.13); // 1 of 8
    }
}

TEST(succession_learns_what_follows_in_the_same_token) {
    fixture f;
    for (int i = 0; i < 3000; ++i) {
        f.token(chain(i));
    }
    f.token({ 2 });
    CHECK(f.chance(1, 3) > 0.75 && f.chance(2, 4) > 0.75);
    for (int e = 0; e < N_EXPERT; ++e) {
        CHECK(e == 3 || f.chance(1, e) < 0.15);
        CHECK(e == 4 || f.chance(2, e) < 0.15);
    }
    const double before = f.chance(0, 2);
    f.token({ 0, 1, 2 });
    f.token({ 5, 6 });
    CHECK(f.chance(2, 7) > 0.75 && f.chance(2, 4) < 0.15); // what is nearer counts, what was expected is forgotten
    CHECK(f.chance(0, 2) != before);
}

TEST(succession_learns_what_follows_from_token_to_token) {
    fixture f;
    for (int i = 0; i < 3000; ++i) {
        f.token({ i % 4, i % 4, 7 });
    }
    // token 2999 chose 3 and 3: the next one 0 and 0
    CHECK(f.chance(0, 0) > 0.75 && f.chance(1, 0) > 0.75 && f.chance(2, 7) > 0.75);
    CHECK(f.chance(0, 3) < 0.15 && f.chance(1, 1) < 0.15);
}

TEST(succession_learns_that_experts_stay) {
    fixture f;
    std::vector<int32_t> x = { 0, 0, 0 };
    for (int i = 0; i < 200; ++i) { // each a few times in a row, too seldom to know any of them well
        if (i % 5 == 0) {
            x = { (i * 7) % N_EXPERT, (i * 3) % N_EXPERT, i % N_EXPERT };
        }
        f.token(x);
    }
    CHECK(f.chance(0, x[0]) > 0.5);
}

TEST(succession_sequences_share_what_is_learned) {
    fixture f;
    for (int i = 0; i < 3000; ++i) {
        f.token(chain(i), i % 2 == 1);
    }
    f.token({ 1 });
    f.token({ 4 }, true);
    CHECK(f.chance(1, 2) > 0.75 && f.chance(1, 5) < 0.15);
    CHECK(f.learned.chance(f.b, 1, 5) > 0.75 && f.learned.chance(f.b, 1, 2) < 0.15);
    f.learned.start(f.a); // a new text: nothing came before
    CHECK(f.chance(1, 2) < 0.5);
    f.number[0] = 0;
    f.token({ 3 });
    CHECK(f.chance(1, 4) > 0.75); // but what was learned stays
}

TEST(succession_learns_from_prompts) {
    fixture f;
    for (int i = 0; i < 3000; i += 40) {
        std::vector<std::vector<int32_t>> tokens;
        for (int t = 0; t < 40; ++t) {
            tokens.push_back(chain(i + t));
        }
        f.batch(tokens);
    }
    f.token({ 3 });
    CHECK(f.chance(1, 4) > 0.75 && f.chance(2, 5) > 0.75 && f.chance(1, 2) < 0.15);
    // more tokens than are looked at; fewer in a layer than the batch has; more sequences at once
    std::vector<std::vector<int32_t>> many(3 * succession::MOST, { 1, 2, 3 });
    f.batch(many);
    const int32_t last = 5;
    f.learned.serve(2, &last, 1, 1);
    std::vector<succession_token> both = { { &f.a, ++f.number[0] }, { &f.b, 1 }, { &f.a, ++f.number[0] } };
    f.learned.begin(both);
    const int32_t chosen[3] = { 0, 1, 2 };
    f.learned.serve(0, chosen, 3, 1);
    CHECK(f.chance(1, 3) > 0.75 && f.learned.chance(f.b, 1, 2) > 0.75); // each by its own last token
}

TEST(succession_memory_is_bounded) {
    const auto layout = [](int n_layers, int n_expert, size_t expert_bytes) {
        return fake_model({ { n_expert, 2, 1, { { expert_bytes, 0, 0 }, { 16, 0, 0 } } } }, std::vector<int>(n_layers, 0)).layout;
    };
    uint64_t before = 0;
    for (size_t expert_bytes : { 64, 4096, 65536 }) {
        const model_layout l = layout(12, 64, expert_bytes);
        const uint64_t all = 12 * 64 * (uint64_t) expert_bytes;
        const uint64_t fixed = 12 * 64 * (4 + 16 * 4) + 16 * 2 * 24 * 2 + succession::MOST * 24 * 2 + 1024 * 10 + 12 * 4; // biases, forecasts, choices, ...
        const uint64_t n = succession::bytes(l, 16);
        CHECK(n <= fixed + std::max(all / succession::SHARE, succession::SMALL));
        CHECK(n >= before);
        before = n;
    }
    // a deep model has tables for 1, 2 and 4 layers back, and its own layer's, each 2 bytes a pair of experts
    CHECK_EQ(succession::bytes(layout(12, 64, 1 << 20), 0) - succession::bytes(layout(12, 64, 1 << 8), 0), 7u * 12 * 64 * 64 * 2);
}
