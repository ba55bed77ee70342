#include "hobbit-link.h"

#include "layout.h"

#include <map>
#include <vector>

namespace {

// Tickets number the marks; each mark records the next of a ring of events. The event of an old ticket may have
// been recorded again since: waiting for it waits for more, never for less.
class backend_link : public hob::device_link {
  public:
    backend_link(ggml_backend_t stream, std::vector<ggml_backend_event_t> events) : stream_(stream), events_(std::move(events)) {}

    ~backend_link() override {
        ggml_backend_synchronize(stream_.get());
        for (ggml_backend_event_t e : events_) {
            ggml_backend_event_free(e);
        }
    }

    void copy(const hob::bank & to, size_t offset, const uint8_t * from, size_t n, size_t rows, size_t stride_to, size_t stride_from) override {
        auto * bank = (ggml_tensor *) to.memory;
        if (rows == 1) {
            ggml_backend_tensor_set_async(stream_.get(), bank, from, offset, n);
        } else {
            ggml_backend_tensor_set_2d_async(stream_.get(), bank, from, offset, n, rows, stride_to, stride_from);
        }
        marked_ = false;
    }

    uint64_t mark() override {
        if (!marked_) {
            tickets_++;
            ggml_backend_event_record(event(tickets_), stream_.get());
            marked_ = true;
        }
        return tickets_;
    }

    void before(void * compute, uint64_t ticket) override {
        if (ticket > 0) {
            ggml_backend_event_wait((ggml_backend_t) compute, event(ticket));
        }
    }

    void wait(uint64_t ticket) override {
        if (ticket > 0) {
            ggml_backend_event_synchronize(event(ticket));
        }
    }

  private:
    ggml_backend_event_t event(uint64_t ticket) const { return events_[ticket % events_.size()]; }

    ggml_backend_ptr stream_;
    std::vector<ggml_backend_event_t> events_;
    uint64_t tickets_ = 0;
    bool     marked_  = true; // nothing was queued since the last ticket
};

constexpr size_t EVENTS = 256; // marks that can be told apart: the waves of a prompt and what it loads ahead

} // namespace

std::unique_ptr<hob::device_link> hobbit_make_link(ggml_backend_dev_t dev) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    if (!props.caps.async || !props.caps.events) {
        return nullptr;
    }
    ggml_backend_t stream = ggml_backend_dev_init(dev, nullptr);
    if (!stream) {
        return nullptr;
    }
    std::vector<ggml_backend_event_t> events;
    for (size_t i = 0; i < EVENTS; ++i) {
        if (ggml_backend_event_t e = ggml_backend_event_new(dev)) {
            events.push_back(e);
        }
    }
    if (events.size() < EVENTS) {
        for (ggml_backend_event_t e : events) {
            ggml_backend_event_free(e);
        }
        ggml_backend_free(stream);
        return nullptr;
    }
    return std::make_unique<backend_link>(stream, std::move(events));
}

std::function<void(size_t, const void *, size_t)> hobbit_uploader(ggml_tensor * bank) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(bank->buffer));
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    if (!props.caps.async) {
        return [bank](size_t offset, const void * data, size_t n) { ggml_backend_tensor_set(bank, data, offset, n); };
    }
    return [bank, dev](size_t offset, const void * data, size_t n) {
        // freed when the thread ends, which is before the banks go
        static thread_local std::map<ggml_backend_dev_t, ggml_backend_ptr> streams;
        ggml_backend_ptr & stream = streams[dev];
        if (!stream) {
            stream.reset(ggml_backend_dev_init(dev, nullptr));
        }
        ggml_backend_tensor_set_async(stream.get(), bank, data, offset, n);
        ggml_backend_synchronize(stream.get());
    };
}
