// Experts computed by the host's cores: rows of floats through gate_up, a gated activation and down.
//
// An expert's tensors lie in one record, the records of a layer side by side. What is asked for comes by a call, or by
// mail that a CUDA device writes in the middle of its step (kernels/mail.py has the layout). A row of weights is read
// from memory once for all rows of floats that go through its expert, and a sum has one order, whatever the number of
// rows and threads.
#include <algorithm>
#include <cmath>
#include <new>

#include "crew.h"
#include "experts.h"
#include "gated.h"

namespace {

constexpr int kRows = 4;  // of floats that are multiplied at once
constexpr int kColumns = 32;  // of the activation in a chunk, at most
constexpr int kPair = 4;  // int32 of a pair: token, expert, and two that are not looked at here

enum Place { kPosted = 0, kDone = 16, kFailed = 32, kLayer = 33, kCount = 34, kTokens = 35 };  // in a mail's header
constexpr int32_t kRefused = 2;  // as kFailed: the host cannot make sense of what was posted

struct Linear {
    int64_t values, scales, bias;  // where they lie in a record; bias < 0: there is none
};

enum Type { kFloat32, kBfloat16, kFloat16 };

// As ExpertLayout.numbers lists it.
struct Layout {
    int64_t form;  // 0 to 2: dense, of that type; 3: fp8; 4: mxfp4
    int64_t bias_type;
    int64_t hidden, inner, experts, record_bytes;
    int64_t clamped;  // rows of gate and up alternate, and SwiGLU is clamped
    Linear gate_up, down;
};

float load_one(const uint8_t* p, int64_t index, int64_t type) {
    if (type == kFloat32) return reinterpret_cast<const float*>(p)[index];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(p)[index];
    return type == kBfloat16 ? Bfloat16Form::widen_one(bits) : Float16Form::widen_one(bits);
}

// Memory of floats that starts a cache line, so that no vector of it lies on two.
class Floats {
  public:
    void grow(int64_t count) {
        if (count <= size_) return;
        data_.reset();
        size_ = 0;
        data_.reset(new (std::align_val_t(64)) float[count]());
        size_ = count;
    }
    float* at(int64_t index) const { return data_.get() + index; }

  private:
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<float[], Free> data_;
    int64_t size_ = 0;
};

struct Request {
    const uint8_t* records;  // of the layer
    const float* x;          // [tokens, hidden]
    const int32_t* pairs;    // [count, kPair]
    float* out;              // [count, hidden]
    int64_t tokens, count;
};

// One request's rows through their experts.
class Mixture : public Job {
  public:
    virtual ~Mixture() = default;
    // Whether all that is asked for is there.
    virtual bool prepare(const Request& request, int64_t (&chunks)[Crew::kPhases]) = 0;
};

template <class Form>
class MixtureOf final : public Mixture {
  public:
    MixtureOf(const Layout& layout, float limit, int threads, int64_t grain) : layout_(layout), limit_(limit) {
        x_stride_ = padded(layout.hidden);
        h_stride_ = padded(layout.inner);
        const int64_t wide = larger(x_stride_, h_stride_) / kStep;
        scale_stride_ = ceil_div(wide, 16) * 16;
        scales_.grow(threads * 2 * scale_stride_);
        columns_ = std::clamp<int64_t>(grain / (2 * row_bytes(layout.hidden)), 1, kColumns);
        rows_ = larger(1, grain / row_bytes(layout.inner) / 2) * 2;
        starts_.resize(layout.experts + 1);
    }

    bool prepare(const Request& request, int64_t (&chunks)[Crew::kPhases]) override {
        request_ = request;
        std::fill(starts_.begin(), starts_.end(), 0);
        for (int64_t i = 0; i < request.count; i++) {
            const int32_t token = request.pairs[i * kPair], expert = request.pairs[i * kPair + 1];
            if (token < 0 || token >= request.tokens || expert < 0 || expert >= layout_.experts) return false;
            starts_[expert + 1]++;
        }
        groups_.clear();
        for (int64_t e = 0; e < layout_.experts; e++) {
            if (starts_[e + 1]) groups_.push_back({e, starts_[e], starts_[e + 1]});
            starts_[e + 1] += starts_[e];
        }
        order_.resize(request.count);
        for (int64_t i = 0; i < request.count; i++) order_[starts_[request.pairs[i * kPair + 1]]++] = i;
        x_.grow(request.tokens * x_stride_);
        h_.grow(request.count * h_stride_);
        const int64_t experts = groups_.size();
        chunks[0] = request.tokens;
        chunks[1] = experts * ceil_div(layout_.inner, columns_);
        chunks[2] = experts * ceil_div(layout_.hidden, rows_);
        return true;
    }

    void run(int phase, int64_t chunk, int thread) override {
        if (phase == 0) return arrange(chunk);
        const int64_t size = phase == 1 ? columns_ : rows_, total = phase == 1 ? layout_.inner : layout_.hidden;
        const int64_t pieces = ceil_div(total, size);
        const Group& group = groups_[chunk / pieces];
        const int64_t first = chunk % pieces * size, end = smaller(first + size, total);
        float* scales = scales_.at(thread * 2 * scale_stride_);
        for (int64_t i = 0; i < group.count; i += kRows) {
            const int64_t* pairs = &order_[group.first + i];
            const int64_t rows = smaller(kRows, group.count - i);
            if (rows == 1) compute<1>(phase, group, pairs, first, end, scales);
            if (rows == 2) compute<2>(phase, group, pairs, first, end, scales);
            if (rows == 3) compute<3>(phase, group, pairs, first, end, scales);
            if (rows == 4) compute<4>(phase, group, pairs, first, end, scales);
        }
    }

  private:
    struct Group {
        int64_t expert, first, count;  // pairs that go through it: order_[first ...]
    };

    static int64_t row_bytes(int64_t columns) { return columns * Form::kBits / 8; }

    void arrange(int64_t token) {
        Form::arrange(request_.x + token * layout_.hidden, x_.at(token * x_stride_), layout_.hidden);
    }

    Row row(const uint8_t* record, const Linear& linear, int64_t columns, int64_t index, int64_t scale_row,
            float* scales) const {
        if constexpr (Form::kScaled) {
            Form::prepare(record + linear.scales + scale_row * Form::scale_bytes(columns), scales, columns);
        }
        return {record + linear.values + index * row_bytes(columns), scales};
    }

    static int64_t scale_row(int64_t row) {
        if constexpr (std::is_same_v<Form, Fp8Form>) return row / Fp8Form::kBlock;
        return row;
    }

    template <int B>
    void compute(int phase, const Group& group, const int64_t* pairs, int64_t first, int64_t end, float* scales) {
        if (phase == 1) return inner<B>(group, pairs, first, end, scales);
        outer<B>(group, pairs, first, end, scales);
    }

    // Columns [first, end) of the activation, of B pairs.
    template <int B>
    void inner(const Group& group, const int64_t* pairs, int64_t first, int64_t end, float* scales) {
        const int64_t H = layout_.hidden, I = layout_.inner;
        const uint8_t* record = request_.records + group.expert * layout_.record_bytes;
        const Linear& linear = layout_.gate_up;
        const float* x[B];
        for (int b = 0; b < B; b++) x[b] = x_.at(request_.pairs[pairs[b] * kPair] * x_stride_);
        float sums[2][B][kColumns] = {};
        for (int64_t c = first; c < end; c++) {
            int64_t index[2], scale[2];
            for (int i = 0; i < 2; i++) {
                index[i] = layout_.clamped ? 2 * c + i : i * I + c;
                // Gate and up below each other were quantised apart: each begins a block of its own.
                scale[i] = layout_.clamped ? scale_row(index[i]) : i * (scale_row(I - 1) + 1) + scale_row(c);
            }
            const Row rows[2] = {row(record, linear, H, index[0], scale[0], scales),
                                 row(record, linear, H, index[1], scale[1], scales + scale_stride_)};
            float out[B][2];
            products<Form, kLanes, B>(rows, x, H, out);
            for (int i = 0; i < 2; i++) {
                const float bias = linear.bias < 0 ? 0.0f : load_one(record + linear.bias, index[i], layout_.bias_type);
                for (int b = 0; b < B; b++) sums[i][b][c - first] = out[b][i] + bias;
            }
        }
        for (int b = 0; b < B; b++) {
            float gated[kColumns];
            for (int64_t c = 0; c < end - first; c += kLanes) {
                const auto gate = load<kLanes>(sums[0][b] + c), up = load<kLanes>(sums[1][b] + c);
                store<kLanes>(gated + c, layout_.clamped ? swiglu<kLanes>(gate, up, limit_) : silu<kLanes>(gate, up));
            }
            float* h = h_.at(pairs[b] * h_stride_);
            for (int64_t c = first; c < end; c++) h[Form::place(c)] = gated[c - first];
        }
    }

    // Columns [first, end) of the result, of B pairs.
    template <int B>
    void outer(const Group& group, const int64_t* pairs, int64_t first, int64_t end, float* scales) {
        const int64_t I = layout_.inner;
        const uint8_t* record = request_.records + group.expert * layout_.record_bytes;
        const Linear& linear = layout_.down;
        const float* h[B];
        for (int b = 0; b < B; b++) h[b] = h_.at(pairs[b] * h_stride_);
        for (int64_t r = first; r < end; r += 2) {
            const int64_t next = smaller(r + 1, end - 1);
            const Row rows[2] = {row(record, linear, I, r, scale_row(r), scales),
                                 row(record, linear, I, next, scale_row(next), scales + scale_stride_)};
            float out[B][2];
            products<Form, kLanes, B>(rows, h, I, out);
            for (int64_t i = 0; i <= next - r; i++) {
                const float bias = linear.bias < 0 ? 0.0f : load_one(record + linear.bias, r + i, layout_.bias_type);
                for (int b = 0; b < B; b++) request_.out[pairs[b] * layout_.hidden + r + i] = out[b][i] + bias;
            }
        }
    }

    const Layout layout_;
    const float limit_;
    int64_t x_stride_, h_stride_, scale_stride_, columns_, rows_;
    Request request_{};
    std::vector<int64_t> starts_, order_;
    std::vector<Group> groups_;
    Floats x_, h_, scales_;  // x and h are padded with zeros
};

std::unique_ptr<Mixture> make_mixture(const Layout& layout, float limit, int threads, int64_t grain) {
    switch (layout.form) {
        case 0: return std::make_unique<MixtureOf<Float32Form>>(layout, limit, threads, grain);
        case 1: return std::make_unique<MixtureOf<Bfloat16Form>>(layout, limit, threads, grain);
        case 2: return std::make_unique<MixtureOf<Float16Form>>(layout, limit, threads, grain);
        case 3: return std::make_unique<MixtureOf<Fp8Form>>(layout, limit, threads, grain);
        default: return std::make_unique<MixtureOf<Mxfp4Form>>(layout, limit, threads, grain);
    }
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
        : bases_(bases, bases + layers), crew_(threads), mixture_(make_mixture(layout, limit, threads, grain)) {}

    ~HostExperts() { detach(); }

    bool run(int64_t layer, const float* x, int64_t tokens, const int32_t* pairs, int64_t count, float* out) {
        if (layer < 0 || layer >= static_cast<int64_t>(bases_.size()) || !bases_[layer]) return false;
        const std::lock_guard<std::mutex> guard(busy_);
        int64_t chunks[Crew::kPhases];
        const Request request{reinterpret_cast<const uint8_t*>(bases_[layer]), x, pairs, out, tokens, count};
        if (!mixture_->prepare(request, chunks)) return false;
        crew_.lead(*mixture_, chunks);
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
    // A step whose mail comes later than it spins is answered a nap late, never left alone: a device may have other
    // work to do between its launch and its first post.
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
            if (idle < Crew::kAwake && !woken_) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            const auto nap = idle < kIdle ? kShortNap : kLongNap;
            alarm_.wait_for(lock, nap, [&] { return woken_ || leaving_; });
            if (woken_) {
                woken_ = false;
                last = Clock::now();
                lock.unlock();
                crew_.wake();
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

    const std::vector<int64_t> bases_;  // of the layers' records; 0: the layer has none here
    Crew crew_;
    std::unique_ptr<Mixture> mixture_;
    Mail mail_{};
    std::thread reader_;
    std::mutex busy_, sleep_;
    std::condition_variable alarm_;
    std::atomic<bool> leaving_{false}, woken_{false};
};

}  // namespace

// 0: out of memory or of threads.
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

// 0: done; 1: no such layer, token or expert; 2: out of memory.
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
