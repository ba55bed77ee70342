#include "refuse.h"

#include <cstdlib>
#include <new>

static thread_local long countdown = 0;

refused::refused(long n) : before_(countdown) { countdown = n; }

refused::~refused() { countdown = before_; }

long refused::left() { return countdown; }

// The program's own, for all of it. The nothrow forms too: sanitizers have theirs, which would not go with our delete.
void * operator new(std::size_t n, const std::nothrow_t &) noexcept {
    return countdown > 0 && --countdown == 0 ? nullptr : std::malloc(n > 0 ? n : 1);
}

void * operator new(std::size_t n) {
    void * p = operator new(n, std::nothrow);
    if (!p) {
        throw std::bad_alloc();
    }
    return p;
}

void * operator new[](std::size_t n) { return operator new(n); }
void * operator new[](std::size_t n, const std::nothrow_t &) noexcept { return operator new(n, std::nothrow); }

void operator delete(void * p) noexcept { std::free(p); }
void operator delete(void * p, std::size_t) noexcept { std::free(p); }
void operator delete(void * p, const std::nothrow_t &) noexcept { std::free(p); }
void operator delete[](void * p) noexcept { std::free(p); }
void operator delete[](void * p, std::size_t) noexcept { std::free(p); }
void operator delete[](void * p, const std::nothrow_t &) noexcept { std::free(p); }
