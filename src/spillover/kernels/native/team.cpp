#include "team.h"

// Threads of every kernel that begins after this, the caller's among them.
extern "C" void set_threads(int64_t threads) {
    team_size.store(static_cast<int>(std::max<int64_t>(1, threads)), std::memory_order_relaxed);
}
