// Settings from variables of the environment.

#include "check.h"
#include "environment.h"

#include <clocale>

using hob::parse_bytes;

namespace {

const uint64_t KIB = 1024, MIB = 1024 * KIB, GIB = 1024 * MIB;

// What went wrong, with the variables given; p and the lists are of the last call.
hobbit_params            p;
std::vector<std::string> used, unknown;

std::string read(std::vector<const char *> variables) {
    p = {};
    used.clear();
    unknown.clear();
    variables.push_back(nullptr);
    return hob::from_environment(variables.data(), p, used, unknown);
}

bool says(const std::string & error, const char * part) { return error.find(part) != std::string::npos && error.find('\n') == std::string::npos; }

} // namespace

TEST(environment_sizes) {
    const struct { const char * text; uint64_t n; } good[] = {
        { "4096", 4096 }, { "8GiB", 8 * GIB }, { "8 GB", 8000000000 }, { "512MiB", 512 * MIB }, { "1.5G", 3 * GIB / 2 }, { "1k", KIB },
        { " 2 tib ", 2 * KIB * GIB }, { "3KB", 3000 }, { "7b", 7 }, { ".5m", MIB / 2 }, { "9007199254740993", 9007199254740993 }, { "5.", 5 }, { "0", 0 },
    };
    for (const auto & x : good) {
        uint64_t n = 1;
        CHECK(parse_bytes(x.text, n));
        CHECK_EQ(n, x.n);
    }
    for (const char * text : { "", "GiB", "-1", "+1", "1,5G", "1.2.3", "8 GiBs", "8e9", "1/2", "nan", "inf", "8 G B", ".", "9223372036854775808", "8388608T", "99999999999999999999999" }) {
        uint64_t n = 77;
        CHECK(!parse_bytes(text, n));
        CHECK_EQ(n, 77u);
    }
}

TEST(environment_settings) {
    CHECK_EQ(read({ "PATH=/bin", "HOBBIT_CACHE=2 GiB", "HOBBIT_T1=0.25", "HOBBIT_T2= 0.75 ", "HOBBIT_SKIP_MASS=.5", "HOBBIT_LOW_FRACTION=1e-1", "HOBBIT_POLICY=lcu",
                    "HOBBIT_MISS=fetch", "HOBBIT_HOST_COPIES=1MiB", "HOBBIT_IO_THREADS=9", "HOBBIT_NO_DIRECT_IO=no" }), "");
    CHECK_EQ(p.budget_kind, HOBBIT_BUDGET_BYTES);
    CHECK_EQ(p.cache_bytes, 2 * GIB);
    CHECK_EQ(p.t1, 0.25f);
    CHECK_EQ(p.t2, 0.75f);
    CHECK_EQ(p.skip_mass, 0.5f);
    CHECK_EQ(p.low_fraction, 0.1f);
    CHECK_EQ(p.policy, HOBBIT_POLICY_LCU);
    CHECK_EQ(p.miss, HOBBIT_MISS_FETCH);
    CHECK_EQ(p.host_copies, HOBBIT_HOST_SOME);
    CHECK_EQ(p.host_bytes, MIB);
    CHECK_EQ(p.n_io_threads, 9);
    CHECK_EQ(p.direct_io, 1);
    CHECK_EQ(used.size(), 10u);
    CHECK_EQ(used[0], "HOBBIT_CACHE=2 GiB");
    CHECK(unknown.empty());

    CHECK_EQ(read({ "HOBBIT_CACHE=12.5%", "HOBBIT_HOST_COPIES=all", "HOBBIT_NO_DIRECT_IO=True" }), "");
    CHECK_EQ(p.budget_kind, HOBBIT_BUDGET_FRACTION);
    CHECK_EQ(p.cache_fraction, 0.125);
    CHECK_EQ(p.host_copies, HOBBIT_HOST_ON);
    CHECK_EQ(p.direct_io, 0);
    CHECK_EQ(read({ "HOBBIT_CACHE=Min", "HOBBIT_HOST_COPIES=none" }), "");
    CHECK_EQ(p.budget_kind, HOBBIT_BUDGET_MIN);
    CHECK_EQ(p.host_copies, HOBBIT_HOST_OFF);
}

TEST(environment_wrong_values_are_named) {
    const struct { const char * variable; const char * says; } bad[] = {
        { "HOBBIT_T1=0,5", "HOBBIT_T1 is \"0,5\": it must be a number" },
        { "HOBBIT_T2=nan", "HOBBIT_T2 is \"nan\"" },
        { "HOBBIT_T2=1x", "HOBBIT_T2 is \"1x\"" },
        { "HOBBIT_T1=", "HOBBIT_T1 is \"\"" },
        { "HOBBIT_CACHE=", "give a size such as 8GiB" },
        { "HOBBIT_CACHE=much", "give a size such as 8GiB" },
        { "HOBBIT_CACHE=auto", "hobbit env" },
        { "HOBBIT_CACHE=0%", "more than 0" },
        { "HOBBIT_CACHE=101%", "at most 100" },
        { "HOBBIT_CACHE=-1", "HOBBIT_CACHE is \"-1\"" },
        { "HOBBIT_POLICY=LRU", "one of lru, lfu, hobbit, lcu, follow" },
        { "HOBBIT_MISS=gpu", "one of fetch, cpu, auto" },
        { "HOBBIT_HOST_COPIES=some", "all, none, auto" },
        { "HOBBIT_HOST_COPIES=0", "all, none, auto" },
        { "HOBBIT_IO_THREADS=2.5", "whole number from 1 to 64" },
        { "HOBBIT_IO_THREADS=65", "whole number from 1 to 64" },
        { "HOBBIT_NO_DIRECT_IO=maybe", "true or false" },
    };
    for (const auto & x : bad) {
        const std::string error = read({ x.variable });
        CHECK(says(error, x.says));
        CHECK(says(error, std::string(x.variable).substr(0, std::string(x.variable).find('=')).c_str()));
    }
}

TEST(environment_names_that_say_nothing) {
    CHECK_EQ(read({ "HOBBIT_CAHCE=1GiB", "HOBBIT_SERVE_PORT=1", "HOBBIT_LLAMA_CPP_SOURCE=x", "HOBBIT_=1", "HOBBIT", "XHOBBIT_T1=a", "hobbit_t1=a" }), "");
    CHECK(used.empty());
    CHECK_EQ(unknown.size(), 2u);
    CHECK_EQ(unknown[0], "HOBBIT_CAHCE");
}

TEST(environment_numbers_do_not_depend_on_the_locale) {
    const std::string before = setlocale(LC_ALL, nullptr);
    for (const char * name : { "de_DE.UTF-8", "fr_FR.UTF-8" }) { // where none is installed this says nothing
        setlocale(LC_ALL, name);
        CHECK_EQ(read({ "HOBBIT_T1=0.5", "HOBBIT_CACHE=1.5MiB" }), "");
        CHECK_EQ(p.t1, 0.5f);
        CHECK_EQ(p.cache_bytes, 3 * MIB / 2);
    }
    setlocale(LC_ALL, before.c_str());
}
