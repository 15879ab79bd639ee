// A batch of copies over the link of a CUDA device, waited for, as one call: Python gives its interpreter up once, and
// not at every step of the way. The driver's functions come as addresses: nothing of CUDA is needed to build this.
#include <cstddef>
#include <cstdint>

namespace {

constexpr int kUnsupported = 801;

// CUmemcpyAttributes: sources are read in stream order; no hints of places.
struct CopyAttributes {
    int source_order, source_type, source_id, target_type, target_id;
    unsigned flags;
};

}  // namespace

// As CudaDriver.table lists them; copy_batch may be null.
struct Driver {
    int (*set_context)(void* context);
    int (*write_value)(void* stream, uint64_t address, uint32_t value, unsigned flags);
    int (*copy)(uint64_t target, uint64_t source, size_t size, void* stream);
    int (*copy_batch)(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes, size_t count,
                      CopyAttributes* attributes, size_t* first, size_t kinds, size_t* failed, void* stream);
    int (*record_event)(void* event, void* stream);
    int (*synchronize_event)(void* event);
};

// Copies and sleeps until `done` has passed. A CUDA error, or 0. `gate`: 32 bits on the device, or 0, that are 1 while
// the copies run: streams of a lower priority wait there.
extern "C" int64_t cuda_copy(const Driver* driver, void* context, void* gate, const uint64_t* targets,
                             const uint64_t* sources, const uint64_t* sizes, int64_t count, void* stream, void* done,
                             int64_t batch) {
    int error = driver->set_context(context);
    if (error || count == 0) return error;
    if (gate) error = driver->write_value(stream, reinterpret_cast<uint64_t>(gate), 1, 0);
    if (error) return error;
    bool copied = false;
    if (batch && driver->copy_batch) {
        CopyAttributes attributes{1, 0, 0, 0, 0, 0};
        size_t first = 0, failed = 0;
        error = driver->copy_batch(targets, sources, sizes, count, &attributes, &first, 1, &failed, stream);
        copied = error != kUnsupported;
    }
    for (int64_t i = 0; !copied && i < count; i++) {
        error = driver->copy(targets[i], sources[i], sizes[i], stream);
        if (error) break;
    }
    if (gate) {  // whatever happened: it may not stay shut
        int opened = driver->write_value(stream, reinterpret_cast<uint64_t>(gate), 0, 0);
        error = error ? error : opened;
    }
    if (!error) error = driver->record_event(done, stream);
    return error ? error : driver->synchronize_event(done);
}
