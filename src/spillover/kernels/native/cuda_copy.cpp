// A batch of copies over the link of a CUDA device, including the wait, as one call: Python releases its interpreter
// lock once instead of for every copy. The driver's functions are passed as addresses, so the build needs no CUDA.
#include <cstddef>
#include <cstdint>

namespace {

constexpr int kUnsupported = 801;

// CUmemcpyAttributes: sources are read in stream order; without location hints.
struct CopyAttributes {
    int source_order, source_type, source_id, target_type, target_id;
    unsigned flags;
};

}  // namespace

// Driver functions in the order of CudaDriver.table; copy_batch may be null.
struct Driver {
    int (*set_context)(void* context);
    int (*write_value)(void* stream, uint64_t address, uint32_t value, unsigned flags);
    int (*copy)(uint64_t target, uint64_t source, size_t size, void* stream);
    int (*copy_batch)(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes, size_t count,
                      CopyAttributes* attributes, size_t* first, size_t kinds, size_t* failed, void* stream);
    int (*record_event)(void* event, void* stream);
    int (*synchronize_event)(void* event);
};

// Copies, sleeps until the event `done` is complete, and returns a CUDA error or 0. `gate`: 32 bits on the device that
// are 1 while the copies run, so that streams of lower priority wait; null if not used.
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
    if (gate) {  // opened also after an error: other streams must not wait forever
        int opened = driver->write_value(stream, reinterpret_cast<uint64_t>(gate), 0, 0);
        error = error ? error : opened;
    }
    if (!error) error = driver->record_event(done, stream);
    return error ? error : driver->synchronize_event(done);
}
