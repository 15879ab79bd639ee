// Root-mean-square normalisation of rows, with or without a residual sum before it. A row is summed in one fixed order.
#include <cmath>

#include "team.h"
#include "vector.h"

namespace {

typedef Vec<kLanes>::F F;
constexpr int64_t kParallel = 1 << 13;  // number of elements up to which a second thread costs more than it saves

// Normalises x into y, which may be the same; D need not be a multiple of the lanes.
void normalise(const float* x, const float* weight, float* y, int64_t D, float eps) {
    F squares[4] = {};
    int64_t d = 0;
    for (; d + 4 * kLanes <= D; d += 4 * kLanes) {
        for (int i = 0; i < 4; i++) {
            const F v = load<kLanes>(x + d + i * kLanes);
            squares[i] += v * v;
        }
    }
    float total = sum<kLanes>((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; d < D; d++) total += x[d] * x[d];
    const float factor = 1.0f / std::sqrt(total / static_cast<float>(D) + eps);
    d = 0;
    for (; d + kLanes <= D; d += kLanes) {
        store<kLanes>(y + d, load<kLanes>(x + d) * factor * load<kLanes>(weight + d));
    }
    for (; d < D; d++) y[d] = x[d] * factor * weight[d];
}

}  // namespace

// Normalises x [outer, inner, D], whose outer rows are `stride` floats apart, into contiguous y.
extern "C" void rms_norm(const float* x, const float* weight, float* y, int64_t outer, int64_t inner, int64_t D,
                         int64_t stride, float eps) {
    share(outer, [=](int64_t o, int) {
        for (int64_t i = 0; i < inner; i++) {
            normalise(x + o * stride + i * D, weight, y + (o * inner + i) * D, D, eps);
        }
    }, outer * inner * D > kParallel);
}

extern "C" void add_rms_norm(const float* x, const float* residual, const float* weight, float* y, float* total,
                             int64_t rows, int64_t D, float eps) {
    share(rows, [=](int64_t r, int) {
        for (int64_t d = 0; d < D; d++) total[r * D + d] = x[r * D + d] + residual[r * D + d];
        normalise(total + r * D, weight, y + r * D, D, eps);
    }, rows * D > kParallel);
}
