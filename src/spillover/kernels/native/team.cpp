#include "team.h"

// Sets the number of threads, including the caller's, of all kernels called afterwards.
extern "C" void set_threads(int64_t threads) {
    team_size.store(static_cast<int>(std::max<int64_t>(1, threads)), std::memory_order_relaxed);
}
