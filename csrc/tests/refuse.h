// refuse.h - memory that runs out for the calling thread.

#pragma once

// While it lives, the n-th allocation with operator new (from 1 on) throws std::bad_alloc, and the others do not. 0: none does.
class refused {
  public:
    explicit refused(long n);
    ~refused(); // what was before
    refused(const refused &) = delete;
    refused & operator=(const refused &) = delete;

    static long left(); // allocations until then; 0: it has been

  private:
    long before_;
};
