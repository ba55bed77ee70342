// host_cache.h - the second level: host memory that holds some of the copies, between the files and slots on a device.
//
// A copy that is read from a file for a slot is read into an entry, and copied on from there; while the entry keeps
// it, the next load of that copy needs no file. The entry used longest ago gives way: copies that stay in a slot are
// not asked for and age by themselves. With few entries this is a ring of buffers for the reads. All copying is the
// loader threads': where a link brings loads (link.h), all copies are in host memory and there is no second level.

#pragma once

#include "loader.h"

#include <deque>
#include <list>
#include <vector>

namespace hob {

class host_cache {
  public:
    // Entries for one group's copies of one precision: n of them, stride bytes apart.
    struct block {
        uint8_t * base   = nullptr;
        size_t    stride = 0;
        int       n      = 0;
    };

    // blocks: [group*N_COPIES + copy]
    host_cache(const model_layout & layout, std::vector<block> blocks);

    // Bytes of an entry, and how many entries of each kind (block::n, stride) so many bytes give: the same share of
    // each precision's copies, at least MIN_ENTRIES, or all. total: what they take.
    static constexpr int MIN_ENTRIES = 4;
    static size_t entry_bytes(const group_layout & g, int copy);
    static std::vector<block> divide(const model_layout & layout, uint64_t bytes, uint64_t & total);

    // Before a load is submitted, which must follow: where its bytes come from (r.host), or where they are read to on their way
    // (r.stage). Neither if all entries are in use: then it is read without being kept. True: no file is needed.
    bool serve(load_request & r);

    bool consistent() const; // for tests

  private:
    struct entry {
        int        layer  = -1;
        int        expert = -1;
        std::list<int>::iterator age; // its place in part::ages
        load_state busy; // pieces that are read into it or copied from it by the threads
    };
    struct part {
        block memory;
        int   n_expert = 0;
        std::deque<entry> entries; // loads point into them
        std::vector<int>  where;   // [n_layers of the group][n_expert], -1
        std::list<int>    ages;    // all entries, used longest ago first
    };

    static void take(load_request & r, part & p, entry & e);

    std::deque<part>  parts_;     // [group*N_COPIES + copy]
    std::vector<int>  in_group_;  // [layer]
    std::vector<int>  group_;     // [layer]
};

} // namespace hob
