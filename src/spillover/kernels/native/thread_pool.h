// Threads that share the chunks of a job: phases one after another, the chunks of a phase in any order.
//
// Each thread has its own range of chunks, so that it reads memory sequentially, and takes chunks from other ranges
// once its own is empty: a thread that sleeps or is descheduled does not delay the others.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

typedef std::chrono::steady_clock Clock;

// Waits briefly. Every 4096 calls it yields the core, as there may be more threads than cores.
class Spin {
  public:
    void operator()() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
        if (++count_ % 4096 == 0) sched_yield();
    }
    // Whether it is time to read the clock.
    bool often() const { return count_ % 64 == 0; }

  private:
    unsigned count_ = 0;
};

// The work of a thread pool. A chunk may rely on all chunks of earlier phases being complete.
class Job {
  public:
    virtual void run(int phase, int64_t chunk, int thread) = 0;

  protected:
    ~Job() = default;
};

// Returns the first chunk of a thread's range.
inline int64_t range_begin(int64_t chunks, int thread, int threads) { return chunks * thread / threads; }

class ThreadPool {
  public:
    static constexpr int kPhases = 3;
    static constexpr std::chrono::microseconds kAwake{2000};

    // The leading thread counts as one of `threads`. A thread without work spins for `awake`, then sleeps.
    explicit ThreadPool(int threads, std::chrono::microseconds awake = kAwake) : size_(threads), awake_(awake) {
        for (auto& phase : phases_) phase.ranges = std::make_unique<Line[]>(size_);
        try {
            for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { follow(i); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~ThreadPool() { stop(); }

    int size() const { return size_; }

    // Runs the job together with the threads that are awake, and returns when it is complete. One leader at a time.
    void lead(Job& job, const int64_t (&chunks)[kPhases]) {
        const std::lock_guard<std::mutex> guard(lead_);
        const uint64_t turn = current_.load(std::memory_order_relaxed) + 1;
        job_ = &job;
        for (int p = 0; p < kPhases; p++) phases_[p].chunks = chunks[p];
        for (Phase& phase : phases_) {
            phase.left.value.store(tagged(turn, phase.chunks), std::memory_order_release);
            for (int r = 0; r < size_; r++) {
                const int64_t count = begin(phase, r + 1) - begin(phase, r);
                phase.ranges[r].value.store(tagged(turn, count), std::memory_order_release);
            }
        }
        current_.store(turn);  // sequentially consistent, as are the accesses in sleep()
        if (sleepers_.load() > 0) notify();
        work(turn, 0);
    }

    // Wakes sleeping threads because a job is about to start.
    void wake() {
        wakes_.fetch_add(1);
        if (sleepers_.load() > 0) notify();
    }

  private:
    // Packs a turn and a count, so that a thread that is late for a turn takes no chunk of the next.
    static uint64_t tagged(uint64_t turn, int64_t count) { return turn << 32 | static_cast<uint64_t>(count); }
    static bool of(uint64_t value, uint64_t turn) { return value >> 32 == (turn & 0xffffffffu); }
    static int64_t count(uint64_t value) { return static_cast<int64_t>(value & 0xffffffffu); }

    struct alignas(64) Line {
        std::atomic<uint64_t> value{0};
    };

    struct Phase {
        Line left;                       // number of chunks that are not complete
        std::unique_ptr<Line[]> ranges;  // number of chunks not yet taken from each thread's range
        int64_t chunks = 0;              // total; read only by threads that hold one of the chunks
    };

    int64_t begin(const Phase& phase, int range) const { return range_begin(phase.chunks, range, size_); }

    void work(uint64_t turn, int me) {
        for (int p = 0; p < kPhases; p++) {
            Phase& phase = phases_[p];
            for (int k = 0; k < size_; k++) {
                const int r = me + k < size_ ? me + k : me + k - size_;
                while (const int64_t rest = take(phase.ranges[r].value, turn)) {
                    job_->run(p, begin(phase, r + 1) - rest, me);
                    phase.left.value.fetch_sub(1, std::memory_order_acq_rel);
                }
            }
            for (Spin spin;; spin()) {
                const uint64_t left = phase.left.value.load(std::memory_order_acquire);
                if (!of(left, turn)) return;
                if (count(left) == 0) break;
            }
        }
    }

    // Takes a chunk and returns the number of chunks left before it was taken; 0 if there was none of this turn. The
    // turn cannot end while a thread holds a chunk, so that thread may read the job's data.
    static int64_t take(std::atomic<uint64_t>& range, uint64_t turn) {
        uint64_t value = range.load(std::memory_order_acquire);
        while (of(value, turn) && count(value) > 0) {
            if (range.compare_exchange_weak(value, value - 1, std::memory_order_acquire)) return count(value);
        }
        return 0;
    }

    void follow(int me) {
        uint64_t seen = 0, wakes = 0;
        auto idle = Clock::now();
        for (Spin spin; !stopping_.load(std::memory_order_relaxed); spin()) {
            const uint64_t turn = current_.load(std::memory_order_acquire);
            if (turn != seen) {
                seen = turn;
                work(turn, me);
                idle = Clock::now();
            } else if (spin.often()) {
                if (wakes_.load() != wakes) {
                    wakes = wakes_.load();
                    idle = Clock::now();
                } else if (Clock::now() - idle > awake_) {
                    sleep(seen, wakes);
                }
            }
        }
    }

    void sleep(uint64_t seen, uint64_t wakes) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        alarm_.wait(lock, [&] { return current_.load() != seen || wakes_.load() != wakes || stopping_.load(); });
        sleepers_.fetch_sub(1);
    }

    void notify() {
        { const std::lock_guard<std::mutex> guard(sleep_); }  // no thread is between its check and its sleep
        alarm_.notify_all();
    }

    void stop() {
        stopping_.store(true);
        notify();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    const int size_;
    const std::chrono::microseconds awake_;
    Job* job_ = nullptr;
    Phase phases_[kPhases];
    alignas(64) std::atomic<uint64_t> current_{0};  // turn number of the latest job
    alignas(64) std::atomic<uint64_t> wakes_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex lead_, sleep_;
    std::condition_variable alarm_;
    std::vector<std::thread> threads_;
};
