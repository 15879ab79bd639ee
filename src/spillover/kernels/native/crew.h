// Threads that share the chunks of a job: phases one after another, a phase's chunks in any order.
//
// Each thread has a range of chunks of its own, so that it reads memory in one run, and takes from the others' ranges
// when its own is empty: a thread that sleeps or is held up by the system delays nobody.
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

// Waits a little. Now and then it lets others run: there may be more threads than cores.
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
    // Whether it is time to look at the clock.
    bool often() const { return count_ % 64 == 0; }

  private:
    unsigned count_ = 0;
};

// What a crew works on. A chunk may rely on all chunks of the phases before it.
class Job {
  public:
    virtual void run(int phase, int64_t chunk, int thread) = 0;

  protected:
    ~Job() = default;
};

// The first chunk of a thread's range.
inline int64_t range_begin(int64_t chunks, int thread, int threads) { return chunks * thread / threads; }

class Crew {
  public:
    static constexpr int kPhases = 3;
    static constexpr std::chrono::microseconds kAwake{2000};

    // The thread that leads is one of `threads`. One without work spins `awake` for the next job.
    explicit Crew(int threads, std::chrono::microseconds awake = kAwake) : size_(threads), awake_(awake) {
        for (auto& phase : phases_) phase.ranges = std::make_unique<Line[]>(size_);
        try {
            for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { follow(i); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~Crew() { stop(); }

    int size() const { return size_; }

    // Does the job together with whoever is awake, and returns when it is done. One leader at a time.
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
        current_.store(turn);  // in one order with sleepers_, as its increment and the look at current_ after it
        if (sleepers_.load() > 0) notify();
        work(turn, 0);
    }

    // A job is about to come.
    void wake() {
        wakes_.fetch_add(1);
        if (sleepers_.load() > 0) notify();
    }

  private:
    // A turn and a count, so that a thread which comes late to a turn takes nothing of the next.
    static uint64_t tagged(uint64_t turn, int64_t count) { return turn << 32 | static_cast<uint64_t>(count); }
    static bool of(uint64_t value, uint64_t turn) { return value >> 32 == (turn & 0xffffffffu); }
    static int64_t count(uint64_t value) { return static_cast<int64_t>(value & 0xffffffffu); }

    struct alignas(64) Line {
        std::atomic<uint64_t> value{0};
    };

    struct Phase {
        Line left;                       // chunks that are not done
        std::unique_ptr<Line[]> ranges;  // chunks that nobody took, of each thread's range
        int64_t chunks = 0;              // read only by who holds one of them
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

    // Chunks that were left in the range before one was taken, 0 if there is none of this turn. Whoever holds a chunk
    // keeps the turn from ending, so what belongs to the job may be read.
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
        { const std::lock_guard<std::mutex> guard(sleep_); }  // nobody is between its look and its sleep
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
    alignas(64) std::atomic<uint64_t> current_{0};  // turn of the latest job
    alignas(64) std::atomic<uint64_t> wakes_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex lead_, sleep_;
    std::condition_variable alarm_;
    std::vector<std::thread> threads_;
};
