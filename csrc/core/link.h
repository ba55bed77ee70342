// link.h - copies from host memory to a device's memory that no host thread waits for.
//
// Copies run in the order in which they were queued. The device's compute queue is told to wait for them
// (before()), so that the host can give it work whose weights are still on their way. Used by one thread at a
// time, the one that holds the engine's lock; wait() by any.

#pragma once

#include <cstddef>
#include <cstdint>

namespace hob {

struct bank;

class device_link {
  public:
    virtual ~device_link() = default;

    // Queue a copy of rows pieces of n bytes; from must stay as it is until the copy has run. Strides are those
    // between pieces, and mean nothing for one.
    virtual void copy(const bank & to, size_t offset, const uint8_t * from, size_t n, size_t rows, size_t stride_to, size_t stride_from) = 0;

    // A ticket for everything queued so far. Tickets grow; 0 is "nothing".
    virtual uint64_t mark() = 0;

    // What compute (the device's compute queue, as the route operation names it) is given from now on starts
    // when that ticket's copies have run.
    virtual void before(void * compute, uint64_t ticket) = 0;

    // The host waits for that ticket's copies.
    virtual void wait(uint64_t ticket) = 0;
};

} // namespace hob
