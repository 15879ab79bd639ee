// A mixture of experts that are resident on a CPU: the choice of experts, and their products, all of one kind at once,
// as those of one expert are too small for many threads, and Python between two of them costs more than one with few
// rows.
#include <algorithm>
#include <vector>

#include "products.h"
#include "team.h"
#include "vector.h"

extern "C" {
void silu_and_mul(const float* x, float* y, int64_t rows, int64_t I);
void clamped_swiglu(const float* x, float* y, int64_t rows, int64_t I, float limit);
}

namespace {

constexpr int64_t kParallel = 1 << 14;  // number of elements up to which a second thread costs more than it saves

struct Pair {
    int64_t expert, token, slot;  // slot: index among the token's experts
};

// A stack of linears, one of each expert: panels of a kind at `first`, and at every `stride` bytes after it; likewise
// biases, in floats, or null.
struct Stack {
    const uint8_t* first;
    int64_t stride;
    const float* bias;
    int64_t bias_stride, kind;

    void multiply(const std::vector<Pair>& pairs, const float* x, bool same_row, float* y, int64_t N, int64_t K) const {
        static thread_local std::vector<Product> list;
        list.clear();
        const int64_t count = pairs.size();
        for (int64_t i = 0, end; i < count; i = end) {
            const int64_t expert = pairs[i].expert;
            for (end = i + 1; end < count && pairs[end].expert == expert;) end++;
            list.push_back({same_row ? x : x + i * K, first + expert * stride,
                            bias ? bias + expert * bias_stride : nullptr, y + i * N, end - i});
        }
        products(kind, list.data(), list.size(), N, K);
    }
};

}  // namespace

// Chooses the k experts with the highest scores [T, E] of each row, of equal ones the first; writes their ids and
// shares [T, k]: their parts of the softmax over all experts, which `renormalize` scales to a sum of 1.
extern "C" void route(const float* scores, int64_t T, int64_t E, int64_t k, int64_t renormalize, int64_t* ids,
                      float* shares) {
    constexpr int kWidth = 4;  // the sums below have one order, whatever the width of the core's vectors
    share(T, [=](int64_t t, int) {
        const float* row = scores + t * E;
        int64_t* chosen = ids + t * k;
        float* parts = shares + t * k;
        for (int64_t j = 0; j < k; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; e++) {
                if ((best < 0 || row[e] > row[best]) && std::find(chosen, chosen + j, e) == chosen + j) best = e;
            }
            chosen[j] = best;
        }
        const float most = row[chosen[0]];
        float total = 0.0f;
        for (int64_t j = 0; j < k; j++) {
            parts[j] = exponential<kWidth>(splat<kWidth>(row[chosen[j]] - most))[0];
            total += parts[j];
        }
        if (!renormalize) {
            total = 0.0f;
            for (int64_t e = 0; e < E; e += kWidth) {
                float some[kWidth];
                for (int64_t i = 0; i < kWidth; i++) some[i] = e + i < E ? row[e + i] - most : -1000.0f;  // e^x is 0
                const auto powers = exponential<kWidth>(load<kWidth>(some));
                for (int64_t i = 0; i < kWidth; i++) total += powers[i];
            }
        }
        for (int64_t j = 0; j < k; j++) parts[j] /= total;
    }, T * E * k > kParallel);
}

// out [T, hidden] = sum over a token's experts, in ascending order, of share * down(activation(gate_up(x))). ids and
// shares are [T, k]; negative ids are skipped. limit: of the clamped SwiGLU; 0: SiLU. scratch: T * k * (2 * hidden +
// 3 * inner) floats.
extern "C" void expert_mlps(const float* x, const int64_t* ids, const float* shares, float* out, const uint8_t* gate_up,
                            int64_t gate_up_stride, const float* gate_up_bias, int64_t gate_up_bias_stride,
                            int64_t gate_up_kind, const uint8_t* down, int64_t down_stride, const float* down_bias,
                            int64_t down_bias_stride, int64_t down_kind, int64_t T, int64_t k, int64_t hidden,
                            int64_t inner, float limit, float* scratch) {
    static thread_local std::vector<Pair> pairs;
    static thread_local std::vector<int64_t> places;  // for each token, the places of its pairs in ascending order
    pairs.clear();
    for (int64_t i = 0; i < T * k; i++) {
        if (ids[i] >= 0) pairs.push_back({ids[i], i / k, i % k});
    }
    std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
    const int64_t count = pairs.size();
    places.assign(T * (k + 1), 0);  // number of pairs, then places
    for (int64_t i = 0; i < count; i++) {
        int64_t* of = &places[pairs[i].token * (k + 1)];
        of[++of[0]] = i;
    }
    const Pair* all = pairs.data();
    const int64_t* place = places.data();
    float* gathered = scratch;                 // [pairs, hidden]
    float* both = gathered + count * hidden;   // [pairs, 2 * inner]
    float* active = both + count * 2 * inner;  // [pairs, inner]
    float* result = active + count * inner;    // [pairs, hidden]
    if (T > 1) {
        share(count, [=](int64_t i, int) {
            const float* row = x + all[i].token * hidden;
            std::copy(row, row + hidden, gathered + i * hidden);
        }, count * hidden > kParallel);
    }
    const Stack first{gate_up, gate_up_stride, gate_up_bias, gate_up_bias_stride, gate_up_kind};
    const Stack second{down, down_stride, down_bias, down_bias_stride, down_kind};
    first.multiply(pairs, T > 1 ? gathered : x, T == 1, both, 2 * inner, hidden);
    limit > 0 ? clamped_swiglu(both, active, count, inner, limit) : silu_and_mul(both, active, count, inner);
    second.multiply(pairs, active, false, result, hidden, inner);
    share(T, [=](int64_t t, int) {
        const int64_t* of = place + t * (k + 1);
        float* sum = out + t * hidden;
        // Two loops, so that products are rounded before they are added, as by torch.
        for (int64_t j = 1; j <= of[0]; j++) {
            const Pair& pair = all[of[j]];
            const float by = shares[t * k + pair.slot];
            float* row = result + of[j] * hidden;
            for (int64_t i = 0; i < hidden; i++) row[i] *= by;
        }
        std::fill(sum, sum + hidden, 0.0f);
        for (int64_t j = 1; j <= of[0]; j++) {
            const float* row = result + of[j] * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] += row[i];
        }
    }, count * hidden > kParallel);
}
