// Rotary embedding in place: dimensions d and d + D/2 of every head are rotated by the angle of the row's position.
#include "team.h"
#include "vector.h"

namespace {

constexpr int64_t kParallel = 1 << 12;  // number of elements up to which a second thread costs more than it saves

void rotate(float* x, const float* cos, const float* sin, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; h++) {
        float *low = x + h * 2 * half, *high = low + half;
#pragma GCC ivdep
        for (int64_t d = 0; d < half; d++) {
            const float a = low[d], b = high[d];
            low[d] = a * cos[d] - b * sin[d];
            high[d] = b * cos[d] + a * sin[d];
        }
    }
}

}  // namespace

// Rotates q and k, whose rows are a stride apart and whose heads are contiguous; cos and sin [P, half].
extern "C" void rope(float* q, float* k, const float* cos, const float* sin, const int64_t* positions, int64_t T,
                     int64_t H, int64_t Hk, int64_t half, int64_t q_stride, int64_t k_stride) {
    share(T, [=](int64_t t, int) {
        const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
        rotate(q + t * q_stride, c, s, H, half);
        rotate(k + t * k_stride, c, s, Hk, half);
    }, T * (H + Hk) * half > kParallel);
}
