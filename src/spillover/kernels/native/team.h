// The threads that the kernels share; set_threads sets their number.
//
// OpenMP is not used: once two threads of a process (the loading and the stepping thread) have used it, its workers
// sleep after every parallel region, and waking one takes as long as a small product.
#pragma once
#include <map>
#include <system_error>

#include "thread_pool.h"

constexpr std::chrono::microseconds kTeamAwake{200};  // Python takes less between two kernels, more between steps

inline std::atomic<int> team_size{1};

inline ThreadPool& team(int threads) {
    static std::mutex mutex;
    static auto& teams = *new std::map<int, std::unique_ptr<ThreadPool>>;  // never deleted, as its threads still wait at exit
    const std::lock_guard<std::mutex> guard(mutex);
    std::unique_ptr<ThreadPool>& found = teams[threads];
    if (!found) {
        try {
            found = std::make_unique<ThreadPool>(threads, kTeamAwake);
        } catch (const std::system_error&) {  // the system allows no more threads
            found = std::make_unique<ThreadPool>(1);
        }
    }
    return *found;
}

// Calls body(i, thread) for i in [0, count): each thread processes its own range in order, and then helps the others.
template <class Body>
void share(int64_t count, Body body, bool worth = true) {
    const int threads = worth && count > 1 ? team_size.load(std::memory_order_relaxed) : 1;
    if (threads == 1) {
        for (int64_t i = 0; i < count; i++) body(i, 0);
        return;
    }
    struct Shared final : Job {
        explicit Shared(Body& body) : body(body) {}
        void run(int, int64_t chunk, int thread) override { body(chunk, thread); }
        Body& body;
    } job(body);
    team(threads).lead(job, {count, 0, 0});
}
