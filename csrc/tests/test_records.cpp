// What is remembered of every sequence.

#include "check.h"
#include "fake_model.h"
#include "records.h"

using namespace hob;

namespace {

const group_spec SMALL = { 4, 2, 3, { { 8, 8, 8 }, { 4, 4, 4 } } };

struct fixture {
    fake_model model{ { SMALL }, { 0, 0 } };
    records    rec{ model.layout };
    int        context = 0;

    void begin(const std::vector<int32_t> & seq, const std::vector<int32_t> & pos, const void * ctx = nullptr) {
        rec.begin(ctx ? ctx : &context, seq.data(), pos.data(), (int) seq.size());
    }
};

} // namespace

TEST(records_count_uses_by_wish) {
    fixture f;
    f.begin({ 0 }, { 0 });
    f.rec.use(0, 0, 3, HOBBIT_HIGH);
    f.rec.use(1, 0, 3, HOBBIT_SKIP);
    f.begin({ 0 }, { 1 });
    f.rec.use(0, 0, 3, HOBBIT_LOW);
    f.begin({ 0 }, { 2 });
    f.rec.use(0, 0, 1, HOBBIT_HIGH);

    CHECK_EQ(f.rec.active().size(), 1u);
    const sequence_records & s = *f.rec.active()[0];
    CHECK_EQ(s.tokens, 3u);
    const use_record & a = f.rec.at(s, 0, 3);
    CHECK_EQ(a.last, 2u);
    CHECK_EQ(a.uses, 2u);
    CHECK_EQ(a.high, 1u);
    CHECK_EQ(a.low, 1u);
    const use_record & skipped = f.rec.at(s, 1, 3); // a wish to skip is a use all the same
    CHECK_EQ(skipped.last, 1u);
    CHECK_EQ(skipped.uses, 1u);
    CHECK_EQ(skipped.high + skipped.low, 0u);
    CHECK_EQ(f.rec.at(s, 0, 0).last, 0u); // never
}

TEST(records_sequences_are_apart) {
    fixture f;
    f.begin({ 0, 1, 0 }, { 0, 0, 1 }); // two tokens of sequence 0, one of sequence 1
    f.rec.use(0, 0, 2, HOBBIT_HIGH);
    f.rec.use(0, 1, 2, HOBBIT_LOW);
    f.rec.use(0, 2, 1, HOBBIT_HIGH);
    CHECK_EQ(f.rec.active().size(), 2u);
    const sequence_records & s0 = *f.rec.active()[0];
    const sequence_records & s1 = *f.rec.active()[1];
    CHECK_EQ(s0.tokens, 2u);
    CHECK_EQ(s1.tokens, 1u);
    CHECK_EQ(f.rec.at(s0, 0, 2).last, 1u);
    CHECK_EQ(f.rec.at(s0, 0, 1).last, 2u); // the third token of the ubatch is the second of its sequence
    CHECK_EQ(f.rec.at(s1, 0, 2).low, 1u);
    CHECK_EQ(f.rec.at(s1, 0, 1).uses, 0u);
}

TEST(records_position_0_starts_anew) {
    fixture f;
    f.begin({ 0 }, { 0 });
    f.rec.use(0, 0, 2, HOBBIT_HIGH);
    f.begin({ 1 }, { 0 });
    f.rec.use(0, 0, 2, HOBBIT_HIGH);
    f.begin({ 0 }, { 0 });
    CHECK_EQ(f.rec.active()[0]->tokens, 1u);
    CHECK_EQ(f.rec.at(*f.rec.active()[0], 0, 2).uses, 0u);
    f.begin({ 1 }, { 1 }); // the other sequence goes on
    CHECK_EQ(f.rec.active()[0]->tokens, 2u);
    CHECK_EQ(f.rec.at(*f.rec.active()[0], 0, 2).uses, 1u);
}

TEST(records_contexts_are_apart) {
    fixture f;
    int other = 0;
    f.begin({ 0 }, { 0 });
    f.rec.use(0, 0, 2, HOBBIT_HIGH);
    f.begin({ 0 }, { 5 }, &other);
    CHECK_EQ(f.rec.active()[0]->tokens, 1u);
    CHECK_EQ(f.rec.at(*f.rec.active()[0], 0, 2).uses, 0u);
}

TEST(records_keep_the_sequences_that_ran_last) {
    fixture f;
    const int n = (int) records::MAX_SEQUENCES;
    for (int s = 0; s < n; ++s) {
        f.begin({ s }, { 0 });
    }
    f.begin({ 0 }, { 1 }); // now sequence 1 ran longest ago
    f.begin({ n }, { 0 }); // one too many
    f.begin({ 0 }, { 2 });
    CHECK_EQ(f.rec.active()[0]->tokens, 3u);
    f.begin({ 2 }, { 1 });
    CHECK_EQ(f.rec.active()[0]->tokens, 2u);
    f.begin({ 1 }, { 1 }); // was forgotten, starts with this token
    CHECK_EQ(f.rec.active()[0]->tokens, 1u);
}

TEST(records_a_ubatch_of_more_sequences_than_are_kept) {
    fixture f;
    const int n = (int) records::MAX_SEQUENCES + 5;
    std::vector<int32_t> seq, pos;
    for (int s = 0; s < n; ++s) {
        seq.push_back(s);
        pos.push_back(0);
    }
    for (int step = 0; step < 3; ++step) {
        f.begin(seq, pos);
        CHECK_EQ((int) f.rec.active().size(), n);
        for (int s = 0; s < n; ++s) {
            f.rec.use(1, s, s % 4, HOBBIT_HIGH);
            CHECK_EQ(f.rec.active()[s]->tokens, (uint32_t) step + 1);
            CHECK_EQ(f.rec.at(*f.rec.active()[s], 1, s % 4).uses, (uint32_t) step + 1);
        }
        for (int32_t & p : pos) {
            p++;
        }
    }
    f.begin({ n - 1 }, { 3 });
    CHECK_EQ(f.rec.active().size(), 1u);
}

TEST(records_bytes_are_enough) {
    fixture f;
    CHECK(records::bytes(f.model.layout, HOBBIT_POLICY_HOBBIT) >= records::MAX_SEQUENCES * 8 * sizeof(use_record));
}
