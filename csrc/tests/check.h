// check.h - a registry of tests and the macros that they use.
//
//   TEST(name) { CHECK(x > 0); CHECK_EQ(a, b); }
//
// A failed check is printed and the test goes on; a test with a failed check has failed. Checks may be
// made from several threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct test {
    const char * name;
    void (*run)();
};

std::vector<test> & tests();
extern std::atomic<int> failed_checks; // of the running test

// Set by the command line: how long the random tests are, and where they start.
extern uint32_t seed;
extern int      steps;

struct registration {
    registration(const char * name, void (*run)()) { tests().push_back({ name, run }); }
};

void report(const char * file, int line, const std::string & what);
void failed(const char * file, int line, const char * what); // the same, without a string to make and to free

// Out of line and for few types: hundreds of checks would make the tests slow to compile.
std::string text(long long x);
std::string text(unsigned long long x);
std::string text(double x);
std::string text(const std::string & x);

template <class T> auto wide(const T & x) {
    if constexpr (std::is_same_v<T, char>) {
        return std::string(1, x);
    } else if constexpr (std::is_floating_point_v<T>) {
        return (double) x;
    } else if constexpr (std::is_enum_v<T> || (std::is_integral_v<T> && std::is_signed_v<T>)) {
        return (long long) x;
    } else if constexpr (std::is_integral_v<T>) {
        return (unsigned long long) x;
    } else {
        return std::string(x);
    }
}

void unequal(const char * file, int line, const char * what, const std::string & a, const std::string & b);

template <class A, class B> void equal(const char * file, int line, const char * what, const A & a, const B & b) {
    if (!(a == b)) {
        unequal(file, line, what, text(wide(a)), text(wide(b)));
    }
}

} // namespace check

#define TEST(name)                                             \
    static void name();                                        \
    static const check::registration register_##name(#name, name); \
    static void name()

#define CHECK(x)       ((x) ? (void) 0 : check::failed(__FILE__, __LINE__, #x))
#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a, (a), (b))
