// fake_model.h - a model without llama.cpp: layouts of any shape, "files" in memory whose bytes tell
// which layer, expert, copy and projection they belong to, and slots in memory.

#pragma once

#include "budget.h"
#include "storage.h"

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct group_spec {
    int    n_expert;
    int    n_used;
    int    n_proj;
    size_t bytes[hob::N_COPIES][hob::MAX_PROJ]; // one expert
    bool   host = true;                         // false: slots are reached through bank::write only
    bool   link = false;                        // slots are reached by a link; all copies are in host memory
    int    n_units = 1;                         // experts can be divided in so many
    int    n_parts[hob::MAX_PROJ] = { 1, 1, 1 };
};

// A link as lazy as a link may be: nothing is copied before somebody waits for it.
class fake_link : public hob::device_link {
  public:
    void copy(const hob::bank & to, size_t offset, const uint8_t * from, size_t n, size_t rows, size_t stride_to, size_t stride_from) override;
    uint64_t mark() override;
    void before(void * compute, uint64_t ticket) override;
    void wait(uint64_t ticket) override;

    int n_waits = 0; // of the host
    size_t queued() const { return queue_.size(); }

  private:
    struct piece { uint8_t * to; const uint8_t * from; size_t n; uint64_t ticket; };
    std::deque<piece> queue_;
    uint64_t tickets_ = 0;
    bool marked_ = true;
};

struct fake_model {
    hob::model_layout layout;                                 // no slots before place_slots()
    std::vector<std::vector<uint8_t>> files;                  // one per copy_kind
    std::vector<std::unique_ptr<std::vector<uint8_t>>> banks; // memory of the slots

    fake_link link;

    // layer i belongs to group group_of[i]
    fake_model(const std::vector<group_spec> & groups, const std::vector<int> & group_of);

    // Memory for the slots that layout.groups[].n_slots says.
    void place_slots();
    void place_slots(int high, int low); // the same for all groups

    // What the file has for this expert's projection.
    const uint8_t * truth(int layer, int expert, int copy, int proj) const;

    // Does that slot hold exactly this expert?
    bool holds(int layer, int expert, int copy, int slot, int proj) const;

    // Does that slot hold the first units of this expert's inner width?
    bool holds_part(int layer, int expert, int copy, int slot, int proj, int units) const;

    // Whose bytes are at this place of a file? For messages and counters.
    struct place { int layer; int expert; int copy; int proj; };
    place whose(int file, uint64_t offset) const;

  private:
    std::vector<group_spec> specs_;
};

// Reads from a fake model's files. Hooks let tests slow reads down, hold them back or fail them.
class fake_storage : public hob::storage {
  public:
    explicit fake_storage(const fake_model & model) : model_(model) {}

    std::string read(int file, uint64_t offset, size_t n, uint8_t * dst, uint8_t * scratch) override;
    bool direct() const override { return false; }

    // Called before each read, on the reading thread; a text that is not empty fails the read.
    std::function<std::string(const fake_model::place &)> before;

    std::atomic<uint64_t> n_reads{ 0 };
    std::atomic<uint64_t> n_bytes{ 0 };

  private:
    const fake_model & model_;
};

// Parameters with every budget checked elsewhere: t1, t2 and policy are what tests vary.
hobbit_params test_params(float t1 = 0.6f, float t2 = 0.9f, int policy = HOBBIT_POLICY_HOBBIT);
