// Rows of weights in the forms in which experts are stored, and their products with rows of floats.
//
// Weights are widened 32 columns at a time, which is a step. A form may return the columns of a step in a different
// order: `place` returns the index of a column's float in the other operand, and `arrange` reorders a whole row. Rows
// of floats are padded with zeros to whole steps.
#pragma once
#include <cstring>

#include "codes.h"
#include "vector.h"

constexpr int64_t kStep = 32;

static inline int64_t padded(int64_t columns) { return ceil_div(columns, kStep) * kStep; }

// Every form below has: kBits per weight; kScaled, whether weights have scales, and if so kScaleSteps, the number of
// steps that share a scale; widen, a step of weights times their scale; prepare, the scales of a row for `widen`.

struct DenseForm {
    static constexpr bool kScaled = false;
    static constexpr int64_t kScaleSteps = 1;
    static int64_t place(int64_t column) { return column; }
    static void arrange(const float* in, float* out, int64_t columns) { std::memcpy(out, in, columns * 4); }
    static void prepare(const uint8_t*, float*, int64_t) {}
};

struct Float32Form : DenseForm {
    static constexpr int64_t kBits = 32;
    template <int W>
    static void widen(const uint8_t* p, const float*, typename Vec<W>::F (&w)[kStep / W]) {
        for (int64_t i = 0; i < kStep / W; i++) w[i] = load<W>(reinterpret_cast<const float*>(p) + i * W);
    }
};

template <int W>
struct Shorts {
    typedef uint16_t V __attribute__((vector_size(W * 2)));
    typedef uint16_t Unaligned __attribute__((vector_size(W * 2), aligned(1), may_alias));
};

struct Bfloat16Form : DenseForm {
    static constexpr int64_t kBits = 16;
    static float widen_one(uint16_t bits) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    template <int W>
    static void widen(const uint8_t* p, const float*, typename Vec<W>::F (&w)[kStep / W]) {
        typedef typename Vec<W>::F F;
        typedef typename Vec<W>::I I;
        for (int64_t i = 0; i < kStep / W; i++) {
            const typename Shorts<W>::V bits = *reinterpret_cast<const typename Shorts<W>::Unaligned*>(p + i * W * 2);
#if defined(__AVX512F__)
            if constexpr (W == 16) {
                w[i] = (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
                continue;
            }
#endif
            w[i] = (F)(__builtin_convertvector(bits, I) << 16);
        }
    }
};

struct Float16Form : DenseForm {
    static constexpr int64_t kBits = 16;
    static float widen_one(uint16_t bits) {
        const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
        float value;
        std::memcpy(&value, &magnitude, 4);
        value *= 0x1p112f;  // the difference of the exponents' biases
        if (magnitude >= 0x0f800000) value = __builtin_inff();
        return bits & 0x8000 ? -value : value;
    }
    template <int W>
    static void widen(const uint8_t* p, const float*, typename Vec<W>::F (&w)[kStep / W]) {
        for (int64_t i = 0; i < kStep / W; i++) {
            const uint8_t* at = p + i * W * 2;
#if defined(__AVX512F__)
            if constexpr (W == 16) {
                w[i] = (typename Vec<W>::F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
                continue;
            }
#endif
#if defined(__F16C__)
            if constexpr (W == 8) {
                w[i] = (typename Vec<W>::F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
                continue;
            }
#elif defined(__ARM_NEON) && defined(__aarch64__)
            if constexpr (W == 4) {
                const uint16x4_t halves = vld1_u16(reinterpret_cast<const uint16_t*>(at));
                w[i] = (typename Vec<W>::F)vcvt_f32_f16(vreinterpret_f16_u16(halves));
                continue;
            }
#endif
            for (int64_t j = 0; j < W; j++) {
                uint16_t bits;
                std::memcpy(&bits, at + j * 2, 2);
                w[i][j] = widen_one(bits);
            }
        }
    }
};

struct Fp8Form {
    static constexpr int64_t kBits = 8, kScaleSteps = 4, kBlock = kScaleSteps * kStep;
    static constexpr bool kScaled = true;
    static int64_t place(int64_t column) { return column; }
    static void arrange(const float* in, float* out, int64_t columns) { std::memcpy(out, in, columns * 4); }
    static int64_t scale_bytes(int64_t columns) { return ceil_div(columns, kBlock) * 4; }  // per row of blocks
    static void prepare(const uint8_t* scales, float* out, int64_t columns) {
        for (int64_t i = 0; i < ceil_div(columns, kBlock); i++) {
            out[i] = reinterpret_cast<const float*>(scales)[i] * Fp8Pool::kUnit;
        }
    }
    template <int W>
    static void widen(const uint8_t* p, const float* scale, typename Vec<W>::F (&w)[kStep / W]) {
#if defined(__AVX512BW__)
        if constexpr (W == 16) {
            // The same as Fp8Pool::load, for two vectors at once.
            const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
            const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7),
                                                    _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
            const __m512 by = _mm512_set1_ps(*scale);
            w[0] = (typename Vec<W>::F)_mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), by);
            w[1] = (typename Vec<W>::F)_mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), by);
            return;
        }
#endif
        for (int64_t i = 0; i < kStep / W; i++) w[i] = Fp8Pool::load<W>(p + i * W) * splat<W>(*scale);
    }
};

// A byte holds columns 2i and 2i + 1, so `widen` returns the even columns of a step first, and then the odd ones.
struct Mxfp4Form {
    static constexpr int64_t kBits = 4, kScaleSteps = 1;
    static constexpr bool kScaled = true;
    static int64_t place(int64_t column) {
        return column / kStep * kStep + column % 2 * (kStep / 2) + column % kStep / 2;
    }
    static void arrange(const float* in, float* out, int64_t columns) {
        for (int64_t k = 0; k < columns; k += kStep) {
            for (int64_t i = 0; i < kStep / 2; i++) {
                out[k + i] = in[k + 2 * i];
                out[k + kStep / 2 + i] = in[k + 2 * i + 1];
            }
        }
    }
    static int64_t scale_bytes(int64_t columns) { return ceil_div(columns / kStep, 4) * 4; }
    // 2^(code - 127); the code is the exponent of a float, except for code 0, which is half the smallest normal float.
    static void prepare(const uint8_t* scales, float* out, int64_t columns) {
        for (int64_t i = 0; i < columns / kStep; i++) {
            const int32_t bits = static_cast<int32_t>(static_cast<uint32_t>(scales[i]) << 23);
            const int32_t kept = bits > 0x00400000 ? bits : 0x00400000;
            std::memcpy(out + i, &kept, 4);
        }
    }
    template <int W>
    static void widen(const uint8_t* p, const float* scale, typename Vec<W>::F (&w)[kStep / W]) {
        typedef typename Vec<W>::F F;
#if defined(__AVX512F__)
        if constexpr (W == 16) {
            const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                                -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
            const __m512 scaled = _mm512_mul_ps(table, _mm512_set1_ps(*scale));
            const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
            w[0] = (F)_mm512_permutexvar_ps(codes, scaled);  // uses only the low four bits
            w[1] = (F)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), scaled);
            return;
        }
#endif
        alignas(16) int8_t doubled[kStep];
        lookup(p, doubled);
        const F by = splat<W>(*scale * 0.5f);
        for (int64_t i = 0; i < kStep / W; i++) {
            const auto codes = load_codes<W>(reinterpret_cast<const uint8_t*>(doubled) + i * W);
            w[i] = __builtin_convertvector(codes, F) * by;
        }
    }

  private:
    // Writes twice the values of the low halves of 16 bytes, then of their high halves.
    static void lookup(const uint8_t* p, int8_t* out) {
        alignas(16) static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if defined(__SSSE3__)
        const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kTable)), low = _mm_set1_epi8(15);
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i high = _mm_and_si128(_mm_srli_epi16(codes, 4), low);
        _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(table, _mm_and_si128(codes, low)));
        _mm_store_si128(reinterpret_cast<__m128i*>(out) + 1, _mm_shuffle_epi8(table, high));
#elif defined(__ARM_NEON) && defined(__aarch64__)
        const int8x16_t table = vld1q_s8(kTable);
        const uint8x16_t codes = vld1q_u8(p);
        vst1q_s8(out, vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(15))));
        vst1q_s8(out + 16, vqtbl1q_s8(table, vshrq_n_u8(codes, 4)));
#else
        for (int i = 0; i < 16; i++) {
            out[i] = kTable[p[i] & 15];
            out[i + 16] = kTable[p[i] >> 4];
        }
#endif
    }
};

// Codes in groups of columns that share a word: a float scale whose last byte is replaced by the codes' zero. Codes of
// 4 bits are stored as those of MXFP4. A step's scale is two floats: the group's scale, and the offset for the zero.
template <int64_t kCodeBits, int64_t kGroup>
struct IntForm {
    static constexpr int64_t kBits = kCodeBits, kScaleSteps = 1;
    static constexpr bool kScaled = true;
    static int64_t place(int64_t column) { return kBits == 4 ? Mxfp4Form::place(column) : column; }
    static void arrange(const float* in, float* out, int64_t columns) {
        if (kBits == 4) return Mxfp4Form::arrange(in, out, columns);
        std::memcpy(out, in, columns * 4);
    }
    static int64_t scale_bytes(int64_t columns) { return columns / kGroup * 4; }
    static void prepare(const uint8_t* words, float* out, int64_t columns) {
        for (int64_t step = 0; step < columns / kStep; step++) {
            uint32_t word;
            std::memcpy(&word, words + step * kStep / kGroup * 4, 4);
            const uint32_t bits = word & ~255u;
            std::memcpy(out + 2 * step, &bits, 4);
            out[2 * step + 1] = -out[2 * step] * static_cast<float>(word & 255);  // exact: 16 bits times 8 bits
        }
    }
    template <int W>
    static void widen(const uint8_t* p, const float* scale, typename Vec<W>::F (&w)[kStep / W]) {
        typedef typename Vec<W>::F F;
        alignas(16) uint8_t codes[kStep];
        for (int i = 0; kBits == 4 && i < 16; i++) {
            codes[i] = p[i] & 15;
            codes[i + 16] = p[i] >> 4;
        }
        const uint8_t* from = kBits == 4 ? codes : p;
        const F by = splat<W>(scale[0]), added = splat<W>(scale[1]);
        for (int64_t i = 0; i < kStep / W; i++) {
            F number;
            for (int64_t j = 0; j < W; j++) number[j] = static_cast<float>(from[i * W + j]);
            w[i] = number * by + added;
        }
    }
};

// Codes of a GGUF file: each step has a scale, or with kHalves one per half, and with kOffsets an offset. The zero is
// 128 for codes of 8 bits and 0 for 4 bits. A prepared scale is three floats: one per half, and the offset.
template <int64_t kCodeBits, bool kHalves, bool kOffsets>
struct GgufForm : IntForm<kCodeBits, kStep> {
    static constexpr int64_t kNumbers = 1 + kHalves + kOffsets;
    static int64_t scale_bytes(int64_t columns) { return columns / kStep * kNumbers * 4; }
    static void prepare(const uint8_t* numbers, float* out, int64_t columns) {
        for (int64_t step = 0; step < columns / kStep; step++) {
            float found[kNumbers];
            std::memcpy(found, numbers + step * sizeof(found), sizeof(found));
            out[3 * step] = found[0];
            out[3 * step + 1] = found[kHalves];
            out[3 * step + 2] = kOffsets ? found[kNumbers - 1] : 0.0f;
        }
    }
    template <int W>
    static void widen(const uint8_t* p, const float* scale, typename Vec<W>::F (&w)[kStep / W]) {
        typename Vec<W>::F number;
        for (int64_t i = 0; i < kStep / W; i++) {
            for (int64_t j = 0; j < W; j++) {
                const int64_t at = i * W + j;
                number[j] = static_cast<float>(kCodeBits == 8 ? p[at] - 128 : at < 16 ? p[at] & 15 : p[at - 16] >> 4);
            }
            w[i] = number * splat<W>(scale[i * W / 16]) + splat<W>(scale[2]);
        }
    }
};

// Number of floats that `prepare` writes for a step's scale.
template <class Form>
constexpr int64_t kScaleFloats = 1;
template <int64_t kCodeBits, int64_t kGroup>
constexpr int64_t kScaleFloats<IntForm<kCodeBits, kGroup>> = 2;
template <int64_t kCodeBits, bool kHalves, bool kOffsets>
constexpr int64_t kScaleFloats<GgufForm<kCodeBits, kHalves, kOffsets>> = 3;

struct Row {
    const uint8_t* weights;
    const float* scales;  // prepared
};

constexpr int64_t kAhead = 2048;  // bytes by which a row is prefetched

template <class Form>
static inline void prefetch(const Row (&rows)[2], int64_t step) {
    constexpr int64_t kBytes = 4 * kStep * Form::kBits / 8;
    for (int64_t line = 0; line < kBytes; line += 64) {
        for (const Row& row : rows) __builtin_prefetch(row.weights + step * kStep * Form::kBits / 8 + kAhead + line);
    }
}

// Computes out[b][0..1], the products of two rows of weights with B rows of floats, with one order of sums for every B.
template <class Form, int W, int B>
static inline void products(const Row (&rows)[2], const float* const* x, int64_t columns, float (*out)[2]) {
    typedef typename Vec<W>::F F;
    constexpr int64_t kVectors = kStep / W, kBytes = kStep * Form::kBits / 8;
    F total[2][B][2] = {};
    const auto add = [&](const uint8_t* first, const uint8_t* second, int64_t step) __attribute__((always_inline)) {
        F w[2][kVectors];
        Form::template widen<W>(first, rows[0].scales + step / Form::kScaleSteps * kScaleFloats<Form>, w[0]);
        Form::template widen<W>(second, rows[1].scales + step / Form::kScaleSteps * kScaleFloats<Form>, w[1]);
#pragma GCC unroll 8
        for (int64_t v = 0; v < kVectors; v++) {
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
                const F values = load<W>(x[b] + step * kStep + v * W);
                total[0][b][v % 2] += w[0][v] * values;
                total[1][b][v % 2] += w[1][v] * values;
            }
        }
    };
    const int64_t steps = columns / kStep;
    int64_t step = 0;
    for (; step + 4 <= steps; step += 4) {
        prefetch<Form>(rows, step);
#pragma GCC unroll 4
        for (int64_t s = step; s < step + 4; s++) add(rows[0].weights + s * kBytes, rows[1].weights + s * kBytes, s);
    }
    for (; step < steps; step++) add(rows[0].weights + step * kBytes, rows[1].weights + step * kBytes, step);
    if (const int64_t rest = columns % kStep) {
        uint8_t part[2][kBytes] = {};
        for (int i = 0; i < 2; i++) std::memcpy(part[i], rows[i].weights + step * kBytes, rest * Form::kBits / 8);
        add(part[0], part[1], step);
    }
    for (int b = 0; b < B; b++) {
        for (int i = 0; i < 2; i++) out[b][i] = sum<W>(total[i][b][0] + total[i][b][1]);
    }
}
