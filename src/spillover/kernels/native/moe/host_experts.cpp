// Experts computed by the host's cores: rows of floats through gate_up, a gated activation and down.
//
// The tensors of an expert form one record, and the records of a layer are contiguous. A request comes by a call, or by
// the host expert queue ("mail"), to which a CUDA device writes within a step (kernels/moe/host_expert_queue.py has the
// layout). A row of weights is read from memory once for all rows of floats that go through its expert. mixture_of.h
// says which of two paths computes them; on both the order of sums does not depend on the number of rows or threads.
#include <cstring>
#include <vector>

#include "../amx.h"
#include "mixture.h"

namespace {

enum Header { kPosted = 0, kDone = 16, kFailed = 32, kLayer = 33, kCount = 34, kTokens = 35 };  // indices in the header
constexpr int32_t kRefused = 2;  // value of header[kFailed]: the host rejected an invalid post

std::unique_ptr<Mixture> make_mixture(const Layout& layout, float limit, int threads, int64_t grain) {
    static constexpr struct { int64_t first; MakeMixture* make; } kMakers[] = {
        {kGgufForms, make_gguf_mixture}, {kInt8Forms, make_int8_mixture}, {kInt4Forms, make_int4_mixture},
        {kSmallFloatForms, make_small_float_mixture}};
    for (const auto& maker : kMakers)
        if (layout.form >= maker.first) return maker.make(layout.form - maker.first, layout, limit, threads, grain);
    return make_float_mixture(layout.form - kFloatForms, layout, limit, threads, grain);
}

struct Mail {
    int32_t* header;
    const int32_t* pairs;
    const float* x;
    float* out;
    int64_t max_pairs, max_tokens;
};

class HostExperts {
  public:
    HostExperts(const Layout& layout, float limit, const int64_t* bases, int64_t layers, int threads, int64_t grain)
        : bases_(bases, bases + layers), threads_(threads), mixture_(make_mixture(layout, limit, threads, grain)) {}

    ~HostExperts() { detach(); }

    bool run(int64_t layer, const float* x, int64_t tokens, const int32_t* pairs, int64_t count, float* out) {
        if (layer < 0 || layer >= static_cast<int64_t>(bases_.size()) || !bases_[layer]) return false;
        const std::lock_guard<std::mutex> guard(busy_);
        int64_t chunks[ThreadPool::kPhases];
        const Request request{reinterpret_cast<const uint8_t*>(bases_[layer]), x, pairs, out, tokens, count};
        if (!mixture_->prepare(request, chunks)) return false;
        threads_.lead(*mixture_, chunks);
        return true;
    }

    void attach(const Mail& mail) {
        detach();
        mail_ = mail;
        leaving_ = false;
        reader_ = std::thread([this] { read_mail(); });
    }

    void detach() {
        if (!reader_.joinable()) return;
        {
            const std::lock_guard<std::mutex> guard(sleep_);
            leaving_ = true;
        }
        alarm_.notify_all();
        reader_.join();
    }

    void wake() {
        {
            const std::lock_guard<std::mutex> guard(sleep_);
            woken_ = true;
        }
        alarm_.notify_all();
    }

  private:
    // A post that comes after spinning has stopped is answered late by at most one nap, but never missed: a device may
    // have other work between the launch of a step and its first post.
    static constexpr std::chrono::microseconds kShortNap{50}, kLongNap{10000};
    static constexpr std::chrono::seconds kIdle{1};

    void read_mail() {
        int32_t turn = __atomic_load_n(mail_.header + kDone, __ATOMIC_RELAXED);
        auto last = Clock::now();
        for (Spin spin;; spin()) {
            const int32_t posted = __atomic_load_n(mail_.header + kPosted, __ATOMIC_ACQUIRE);
            if (posted != turn) {
                if (!answer()) __atomic_store_n(mail_.header + kFailed, kRefused, __ATOMIC_RELAXED);
                turn = posted;
                __atomic_store_n(mail_.header + kDone, turn, __ATOMIC_RELEASE);
                last = Clock::now();
                continue;
            }
            if (!spin.often()) continue;
            if (leaving_) return;
            const auto idle = Clock::now() - last;
            if (idle < ThreadPool::kAwake && !woken_) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            const auto nap = idle < kIdle ? kShortNap : kLongNap;
            alarm_.wait_for(lock, nap, [&] { return woken_ || leaving_; });
            if (woken_) {
                woken_ = false;
                last = Clock::now();
                lock.unlock();
                threads_.wake();
            }
        }
    }

    bool answer() {
        const int32_t *header = mail_.header, count = header[kCount], tokens = header[kTokens];
        if (count < 0 || count > mail_.max_pairs || tokens < 0 || tokens > mail_.max_tokens) return false;
        try {
            return run(header[kLayer], mail_.x, tokens, mail_.pairs, count, mail_.out);
        } catch (const std::bad_alloc&) {
            return false;
        }
    }

    const std::vector<int64_t> bases_;  // address of each layer's records; 0 if the layer has none on this host
    ThreadPool threads_;
    std::unique_ptr<Mixture> mixture_;
    Mail mail_{};
    std::thread reader_;
    std::mutex busy_, sleep_;
    std::condition_variable alarm_;
    std::atomic<bool> leaving_{false}, woken_{false};
};

}  // namespace

// Returns whether experts can be computed in tiles on this machine.
extern "C" int host_experts_tiles() { return tiles_allowed(); }

// Returns 0 if memory or threads could not be allocated.
extern "C" int64_t host_experts_new(const int64_t* layout, float limit, const int64_t* bases, int64_t layers,
                                    int64_t threads, int64_t grain) {
    Layout copied;
    std::memcpy(&copied, layout, sizeof copied);
    try {
        return reinterpret_cast<int64_t>(new HostExperts(copied, limit, bases, layers, threads, grain));
    } catch (const std::exception&) {
        return 0;
    }
}

// Returns 0 on success, 1 if there is no such layer, token or expert, 2 if out of memory.
extern "C" int64_t host_experts_run(int64_t self, int64_t layer, const float* x, int64_t tokens, const int32_t* pairs,
                                    int64_t count, float* out) {
    try {
        return !reinterpret_cast<HostExperts*>(self)->run(layer, x, tokens, pairs, count, out);
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

extern "C" void host_experts_attach(int64_t self, int32_t* header, const int32_t* pairs, const float* x, float* out,
                                    int64_t max_pairs, int64_t max_tokens) {
    reinterpret_cast<HostExperts*>(self)->attach({header, pairs, x, out, max_pairs, max_tokens});
}

extern "C" void host_experts_detach(int64_t self) { reinterpret_cast<HostExperts*>(self)->detach(); }

extern "C" void host_experts_wake(int64_t self) { reinterpret_cast<HostExperts*>(self)->wake(); }

extern "C" void host_experts_delete(int64_t self) { delete reinterpret_cast<HostExperts*>(self); }
