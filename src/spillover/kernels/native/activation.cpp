// The gated activations of an MLP, row by row.
#include "gated.h"
#include "team.h"

namespace {

constexpr int64_t kParallel = 1 << 12;  // number of elements up to which a second thread costs more than it saves

// Loads a part of a vector, the rest zero, so that the last elements of a row use the same arithmetic as the others.
template <int W>
typename Vec<W>::F load_part(const float* p, int64_t count, int64_t step) {
    typename Vec<W>::F v = {};
    for (int64_t i = 0; i < count; i++) v[i] = p[i * step];
    return v;
}

}  // namespace

// x [rows, 2I], gate then up -> y [rows, I].
extern "C" void silu_and_mul(const float* x, float* y, int64_t rows, int64_t I) {
    share(rows, [=](int64_t r, int) {
        const float *gate = x + r * 2 * I, *up = gate + I;
        float* out = y + r * I;
        int64_t i = 0;
        for (; i + kLanes <= I; i += kLanes) {
            store<kLanes>(out + i, silu<kLanes>(load<kLanes>(gate + i), load<kLanes>(up + i)));
        }
        if (i < I) {
            const auto v = silu<kLanes>(load_part<kLanes>(gate + i, I - i, 1), load_part<kLanes>(up + i, I - i, 1));
            for (int64_t j = i; j < I; j++) out[j] = v[j - i];
        }
    }, rows * I > kParallel);
}

// x [rows, 2I], gate and up interleaved -> y [rows, I].
extern "C" void clamped_swiglu(const float* x, float* y, int64_t rows, int64_t I, float limit) {
    share(rows, [=](int64_t r, int) {
        const float* in = x + r * 2 * I;
        float* out = y + r * I;
        for (int64_t i = 0; i < I; i += kLanes) {
            const int64_t count = smaller(kLanes, I - i);
            const auto v = swiglu<kLanes>(load_part<kLanes>(in + 2 * i, count, 2),
                                          load_part<kLanes>(in + 2 * i + 1, count, 2), limit);
            for (int64_t j = 0; j < count; j++) out[i + j] = v[j];
        }
    }, rows * I > kParallel);
}
