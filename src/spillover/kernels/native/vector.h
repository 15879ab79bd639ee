// Vectors of floats in portable vector extensions (GCC and Clang), and the operations on them that the kernels use.
#pragma once
#include <cstdint>
#include <utility>

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // floats in the widest register
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int W>
struct Vec {
    typedef float F __attribute__((vector_size(W * 4)));
    typedef int32_t I __attribute__((vector_size(W * 4)));
    typedef float Unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
};

template <int W>
static inline typename Vec<W>::F load(const float* p) {
    return *reinterpret_cast<const typename Vec<W>::Unaligned*>(p);
}

template <int W>
static inline void store(float* p, typename Vec<W>::F v) {
    *reinterpret_cast<typename Vec<W>::Unaligned*>(p) = v;
}

template <int W>
static inline typename Vec<W>::F splat(float x) {
    return x - typename Vec<W>::F{};  // x - 0 is x for every x, including -0
}

template <int W, int... Lane>
static inline typename Vec<W>::I iota(std::integer_sequence<int, Lane...>) {
    return typename Vec<W>::I{Lane...};
}

template <int W>
static inline typename Vec<W>::I iota() {
    return iota<W>(std::make_integer_sequence<int, W>{});
}

template <int W, int H, int... Lane>
static inline typename Vec<W>::F exchange(typename Vec<W>::F v, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, (Lane ^ H)...);
#else
    return __builtin_shuffle(v, typename Vec<W>::I{(Lane ^ H)...});
#endif
}

// Exchanges every lane with the lane H away from it; log2(W) of these form a reduction with one fixed order.
template <int W, int H>
static inline typename Vec<W>::F exchange(typename Vec<W>::F v) {
    return exchange<W, H>(v, std::make_integer_sequence<int, W>{});
}

template <int W, int H = W / 2>
static inline float sum(typename Vec<W>::F v) {
    v += exchange<W, H>(v);
    if constexpr (H > 1) return sum<W, H / 2>(v);
    return v[0];
}

template <int W>
static inline typename Vec<W>::F maximum(typename Vec<W>::F a, typename Vec<W>::F b) {
    return a > b ? a : b;
}

template <int W, int H = W / 2>
static inline float maximum(typename Vec<W>::F v) {
    v = maximum<W>(v, exchange<W, H>(v));
    if constexpr (H > 1) return maximum<W, H / 2>(v);
    return v[0];
}

// e^x within 1 ulp; exactly 0 below -86.6, infinity above 88.72, NaN stays NaN.
template <int W>
static inline typename Vec<W>::F exponential(typename Vec<W>::F x) {
    typedef typename Vec<W>::F F;
    typedef typename Vec<W>::I I;
    const F low = splat<W>(-86.6f), high = splat<W>(88.72283f);
    F clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const F shifted = clamped * 1.44269504f + magic;
    const F n = shifted - magic;
    const F r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
    F p = splat<W>(1.98756591e-4f);
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    // 2^n is computed as 2 * 2^(n-1), since n reaches 128.
    const I bits = ((I)shifted - 0x4b400000 + 126) << 23;
    p = (p + p) * (F)bits;
    p = x < low ? F{} : p;
    return x > high ? splat<W>(__builtin_inff()) : p;
}

static inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
