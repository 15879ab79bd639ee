// Element types of a KV pool: floats, or codes of one byte (float8 e4m3fn, int8) with one float scale per token.
//
// value = code * scale; scale = the largest magnitude of the token's head / the largest code. kv_quant.py describes the
// layout; these functions agree with its reference bit for bit.
#pragma once
#include <cstring>

#include "vector.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

template <int W>
struct Bytes {
    typedef int8_t V __attribute__((vector_size(W)));
    typedef int8_t Unaligned __attribute__((vector_size(W), aligned(1), may_alias));
};

// Intrinsics are used as compilers do not find the single instruction that widens or narrows a whole vector.
template <int W>
static inline typename Vec<W>::I load_codes(const uint8_t* p) {
    typedef typename Vec<W>::I I;
#if defined(__AVX512F__)
    if constexpr (W == 16) return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON)
    if constexpr (W == 4) {
        uint32_t codes;
        std::memcpy(&codes, p, 4);
        return (I)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(codes)))));
    }
#endif
    const typename Bytes<W>::V codes = *reinterpret_cast<const typename Bytes<W>::Unaligned*>(p);
    return __builtin_convertvector(codes, I);
}

// Stores the low byte of every lane.
template <int W>
static inline void store_codes(uint8_t* p, typename Vec<W>::I codes) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)codes));
#endif
#if defined(__AVX512VL__)
    if constexpr (W == 8) return _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_cvtepi32_epi8((__m256i)codes));
#elif defined(__ARM_NEON)
    if constexpr (W == 4) {
        const int16x4_t shorts = vmovn_s32((int32x4_t)codes);
        const uint32_t bytes = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(shorts, shorts))), 0);
        std::memcpy(p, &bytes, 4);
        return;
    }
#endif
    *reinterpret_cast<typename Bytes<W>::Unaligned*>(p) = __builtin_convertvector(codes, typename Bytes<W>::V);
}

// Every pool below has: Code, the element type; kScaled, whether scales follow a head's codes; load, W codes / kUnit.

struct FloatPool {
    typedef float Code;
    static constexpr bool kScaled = false;
    template <int W>
    static typename Vec<W>::F load(const float* p) {
        return ::load<W>(p);
    }
};

struct Int8Pool {
    typedef uint8_t Code;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 127.0f, kUnit = 1.0f;
    template <int W>
    static typename Vec<W>::F load(const uint8_t* p) {
        return __builtin_convertvector(load_codes<W>(p), typename Vec<W>::F);
    }
    // Rounds half to even, as adding 1.5 * 2^23 does.
    template <int W>
    static typename Vec<W>::I encode(typename Vec<W>::F x) {
        typedef typename Vec<W>::I I;
        return (I)(x + 12582912.0f) - 0x4b400000;
    }
};

// The bits of e4m3 are those of a half whose exponent is smaller by 8, including subnormals. So codes are loaded as
// halves, if the machine can convert these, and kUnit corrects the exponent.
struct Fp8Pool {
    typedef uint8_t Code;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 448.0f, kUnit = 256.0f;
    template <int W>
    static typename Vec<W>::F load(const uint8_t* p) {
        typedef typename Vec<W>::F F;
        typedef typename Vec<W>::I I;
#if defined(__AVX512BW__)
        if constexpr (W == 16) {
            const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
            return (F)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
        }
#endif
#if defined(__F16C__)
        if constexpr (W == 8) {
            const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
            const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
            return (F)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
        }
#elif defined(__ARM_NEON)
        if constexpr (W == 4) {
            uint32_t codes;
            std::memcpy(&codes, p, 4);
            const int16x8_t halves = vshll_n_s8(vreinterpret_s8_u32(vdup_n_u32(codes)), 7);
            const int16x4_t kept = vand_s16(vget_low_s16(halves), vdup_n_s16(static_cast<int16_t>(0xbf80)));
            return (F)vcvt_f32_f16(vreinterpret_f16_s16(kept));
        }
#endif
        const I codes = load_codes<W>(p);
        const I magnitude = (codes & 0x7f) << 20;
        // The result is 2^-14 or more, or a multiple of 2^-17 below it: no subnormal float occurs in between.
        const F normal = (F)(magnitude + (112 << 23)), subnormal = (F)(magnitude + (113 << 23)) - 0x1p-14f;
        const I bits = (codes & 0x7f) < 8 ? (I)subnormal : (I)normal;
        return (F)(bits | (codes & 0x80) << 24);
    }
    // Rounds to nearest, ties to even; |x| <= 448.
    template <int W>
    static typename Vec<W>::I encode(typename Vec<W>::F x) {
        typedef typename Vec<W>::F F;
        typedef typename Vec<W>::I I;
        const I bits = (I)x, magnitude = bits & 0x7fffffff;
        const I normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
        const I subnormal = (I)((F)magnitude + 16384.0f) - 0x46800000;  // 2^14, whose last bit is worth 2^-9
        return (magnitude < 0x3c800000 ? subnormal : normal) | (bits >> 24 & 0x80);
    }
};

// Returns x / scale as codes. A scale is 0 if all values are zero, or so small that it underflows; codes are then 0.
template <class Pool, int W>
static inline typename Vec<W>::I encode(typename Vec<W>::F x, typename Vec<W>::F scale) {
    typedef typename Vec<W>::F F;
    const F high = splat<W>(Pool::kLargest), low = splat<W>(-Pool::kLargest);
    F ratio = x / scale;
    ratio = ratio > high ? high : ratio;
    ratio = ratio < low ? low : ratio;
    return Pool::template encode<W>(scale > 0.0f ? ratio : F{});
}

template <int W>
static inline typename Vec<W>::F magnitude(typename Vec<W>::F x) {
    typedef typename Vec<W>::I I;
    return (typename Vec<W>::F)((I)x & 0x7fffffff);
}

// Returns the scale of one head of a token; D is a multiple of W.
template <class Pool, int W>
static inline float row_scale(const float* x, int64_t D) {
    typename Vec<W>::F top{};
    for (int64_t d = 0; d < D; d += W) top = maximum<W>(magnitude<W>(load<W>(x + d)), top);
    return maximum<W>(top) / Pool::kLargest;
}

// Encodes a row x [D] to contiguous codes [D].
template <class Pool, int W>
static inline void encode_row(const float* x, float scale, uint8_t* codes, int64_t D) {
    for (int64_t d = 0; d < D; d += W) store_codes<W>(codes + d, encode<Pool, W>(load<W>(x + d), splat<W>(scale)));
}
