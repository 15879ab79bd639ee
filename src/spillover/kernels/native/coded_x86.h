// Products with codes on x86 cores: by vectors of bytes (AVX-512 VNNI), with more rows by tiles where the cores have them
// (AMX), as bfloat16, which holds codes and digits exactly. A vector's bytes of codes are unsigned, so its sums start
// with what takes the codes' centre away.
#pragma once
#include "amx.h"
#include "coded.h"

namespace {

constexpr int64_t kFew = 3;             // rows that vectors multiply faster than tiles do
constexpr int64_t kRowStep = kTile;     // rows are kept in tiles
constexpr int64_t kDigitBytes = 2;      // at most
constexpr int64_t kRowBytes = 1 << 20;  // of x in digits, held in the second-level cache while panels pass

struct Scale {
    float unit;               // that the lowest digit counts
    float total;              // of its columns
    int32_t centre[kDigits];  // less what its digits times the codes' centre sum up to
    int32_t unused[3];
};

float from_half(uint16_t stored) { return _cvtsh_ss(stored); }

bool in_tiles(const Rows& rows) { return rows.M > kFew && tiles_allowed(); }

// bytes: the codes of a vector, as bytes from 0 on; four columns of a channel lie together, in the form's order.
// pairs: the codes less kCentre as bfloat16, a row of a tile for each pair of columns.
template <class Form>
struct Vectors;

template <>
struct Vectors<Four> {
    static constexpr int64_t kByteVectors = 2, kPairRows = 4;  // that a vector of codes becomes
    static constexpr int kCentre = 8;

    static void bytes(__m512i codes, __m512i (&out)[kByteVectors]) {
        const __m512i low = _mm512_set1_epi8(15);
        out[0] = _mm512_and_si512(codes, low);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
    }

    static void pairs(__m512i codes, uint16_t* out) {
        alignas(64) static constexpr uint16_t kValues[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
            0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        // A look-up sees five bits of a word, and the fifth makes no difference.
        const __m512i values = _mm512_load_si512(kValues);
        _mm512_store_si512(out, _mm512_permutexvar_epi16(codes, values));
        _mm512_store_si512(out + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values));
        _mm512_store_si512(out + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), values));
        _mm512_store_si512(out + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), values));
    }
};

template <>
struct Vectors<Eight> {
    static constexpr int64_t kByteVectors = 1, kPairRows = 2;
    static constexpr int kCentre = 128;  // of the bytes: the codes themselves are signed

    static void bytes(__m512i codes, __m512i (&out)[kByteVectors]) {
        out[0] = _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(kCentre)));
    }

    static void pairs(__m512i codes, uint16_t* out) {
        // Of the byte that is highest in each word of two columns.
        const auto number = [](__m512i v) { return (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24)); };
        const auto store = [&](uint16_t* to, __m512i odd, __m512i even) {
            const __m512i low = _mm512_srli_epi32(number(even), 16);
            _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, low, number(odd)));
        };
        store(out, _mm512_slli_epi32(codes, 8), _mm512_slli_epi32(codes, 24));
        store(out + 32, codes, _mm512_slli_epi32(codes, 16));
    }
};

// Digits lie as [tiles][blocks][kDigits][rows][32 columns], bytes or, for tiles, bfloat16. Tiles have 16 rows, a single
// one as many as there are.
template <class Form, class Digit>
void split_into(const float* x, int64_t row, const Rows& rows) {
    const int64_t digit_bytes = smaller(rows.M, kTile) * kColumns * sizeof(Digit);  // of a tile
    const char* o = Form::kOrder;
    const __m128i eight = _mm_setr_epi8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], 8 + o[0], 8 + o[1], 8 + o[2],
                                        8 + o[3], 8 + o[4], 8 + o[5], 8 + o[6], 8 + o[7]);
    const __m512i half = _mm512_set1_epi32(128);
    uint8_t* out = rows.digits + row / kTile * rows.blocks * kDigits * digit_bytes;
    out += row % kTile * kColumns * sizeof(Digit);
    Scale* scale = rows.scales + row * rows.blocks;
    for (int64_t b = 0; b < rows.blocks; b++, x += kColumns, scale++) {
        const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
        // As integers: a comparison of numbers would pass over what is none.
        const __m512i a = (__m512i)_mm512_abs_ps(first), c = (__m512i)_mm512_abs_ps(second);
        scale->unit = unit_of(_mm512_reduce_max_epi32(_mm512_max_epi32(a, c)));
        const __m512 per_unit = _mm512_set1_ps(1 / scale->unit);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(first, per_unit));
        __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(second, per_unit));
        scale->total = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(low, high))) * scale->unit;
        float worth = scale->unit;
        for (int64_t d = 0; d < kDigits; d++, out += digit_bytes, worth *= 256) {
            const __m512i low_rest = _mm512_srai_epi32(_mm512_add_epi32(low, half), 8);
            const __m512i high_rest = _mm512_srai_epi32(_mm512_add_epi32(high, half), 8);
            low = _mm512_sub_epi32(low, _mm512_slli_epi32(low_rest, 8));
            high = _mm512_sub_epi32(high, _mm512_slli_epi32(high_rest, 8));
            auto* to = reinterpret_cast<__m128i*>(out);
            if constexpr (sizeof(Digit) == 1) {
                scale->centre[d] = -Vectors<Form>::kCentre * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
                _mm_storeu_si128(to, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), eight));
                _mm_storeu_si128(to + 1, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), eight));
            } else {
                const auto halves = [&](__m512i digits) {
                    const __m512i value = (__m512i)_mm512_mul_ps(_mm512_cvtepi32_ps(digits), _mm512_set1_ps(worth));
                    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(value, 16));
                };
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves(low));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2), halves(high));
            }
            low = low_rest, high = high_rest;
        }
    }
}

template <class Form>
void split(const float* x, int64_t row, const Rows& rows) {
    (in_tiles(rows) ? split_into<Form, uint16_t> : split_into<Form, int8_t>)(x, row, rows);
}

// The scales and offsets of half a block's channels.
template <class Form>
struct Channels {
    __m512 scale, offset;

    Channels(const uint8_t* block, int64_t half) {
        const auto stored = [&](int64_t at) {
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + at + half * 32)));
        };
        scale = stored(0);
        if constexpr (Form::kOffset) offset = _mm512_fmadd_ps(scale, _mm512_set1_ps(Vectors<Form>::kCentre), stored(64));
    }

    // `products`: of a block of x with codes less their centre.
    __m512 add(__m512 sum, __m512 products, const Scale& x) const {
        sum = _mm512_fmadd_ps(scale, products, sum);
        if constexpr (Form::kOffset) sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.total), sum);
        return sum;
    }
};

void store(const Output& out, int64_t row, int64_t half, __m512 sum) {
    const int64_t n = half * kHalf, left = out.width - n;
    const __mmask16 there = left >= kHalf ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
    if (out.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, out.bias + n));
    _mm512_mask_storeu_ps(out.y + row * out.N + n, there, sum);
}

template <class Form, int M>
void few_rows(const uint8_t* block, const Rows& rows, int64_t stride, const Output& out) {
    __m512 sums[M][kHalves] = {};
    for (int64_t b = 0; b < rows.blocks; b++, block += Form::kBytes) {
        ask_ahead<Form>(block);
        const uint8_t* x = rows.digits + b * kDigits * stride;
        const Scale* scales = rows.scales + b;
#pragma GCC unroll 2
        for (int64_t h = 0; h < kHalves; h++) {
            __m512i products[M][kDigits];
            for (int m = 0; m < M; m++) {
                for (int d = 0; d < kDigits; d++) products[m][d] = _mm512_set1_epi32(scales[m * rows.blocks].centre[d]);
            }
#pragma GCC unroll 8
            for (int v = 0; v < Form::kVectors; v++) {
                __m512i codes[Vectors<Form>::kByteVectors];
                Vectors<Form>::bytes(_mm512_loadu_si512(codes_of<Form>(block, h) + v * 64), codes);
#pragma GCC unroll 2
                for (int i = 0; i < Vectors<Form>::kByteVectors; i++) {
                    const uint8_t* columns = x + (v * Vectors<Form>::kByteVectors + i) * 4;
                    for (int m = 0; m < M; m++) {
                        for (int d = 0; d < kDigits; d++) {
                            int32_t four;
                            __builtin_memcpy(&four, columns + d * stride + m * kColumns, 4);
                            products[m][d] = _mm512_dpbusd_epi32(products[m][d], codes[i], _mm512_set1_epi32(four));
                        }
                    }
                }
            }
            const Channels<Form> channels(block, h);
            for (int m = 0; m < M; m++) {
                // As the tiles add them up: the lower two digits, to these the highest.
                const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(products[m][1], 8), products[m][0]);
                const __m512 highest = _mm512_cvtepi32_ps(products[m][2]);
                const __m512 all = _mm512_fmadd_ps(highest, _mm512_set1_ps(65536), _mm512_cvtepi32_ps(lower));
                const Scale& scale = scales[m * rows.blocks];
                sums[m][h] = channels.add(sums[m][h], _mm512_mul_ps(all, _mm512_set1_ps(scale.unit)), scale);
            }
        }
    }
    for (int m = 0; m < M; m++) {
        for (int64_t h = 0; h < kHalves; h++) store(out, m, h, sums[m][h]);
    }
}

template <class Form>
void few_rows(const uint8_t* panel, const Rows& rows, Output out) {
    const int64_t stride = smaller(rows.M, kTile) * kColumns;  // of digits
    Rows some = rows;
    for (int64_t row = 0; row < rows.M; row += some.M, out.y += some.M * out.N) {
        some.M = smaller(kFew, smaller(rows.M, row / kTile * kTile + kTile) - row);
        some.digits = rows.digits + row / kTile * rows.blocks * kDigits * stride + row % kTile * kColumns;
        some.scales = rows.scales + row * rows.blocks;
        const auto run = some.M == 1 ? few_rows<Form, 1> : some.M == 2 ? few_rows<Form, 2> : few_rows<Form, 3>;
        run(panel, some, stride, out);
    }
}

#if HAVE_TILES

constexpr int64_t kSpan = 2;                    // panels that are multiplied at once, so that x is loaded once for them
constexpr int64_t kSpanHalves = kSpan * kHalves;
constexpr unsigned kLowTiles = 0x7f;            // with the height of x: sums in tiles 0 to 3, digits in 4 to 6; codes in 7

// Of one thread. What was just stored cannot be loaded as a tile at once, so things take turns in it.
struct SpanMemory {
    alignas(64) uint16_t codes[2][kSpanHalves][kPairs];
    alignas(64) float products[2][kSpanHalves][kTileFloats];
    alignas(64) float sums[kMostRows / kTile][kSpanHalves][kTileFloats];
};

template <class Form>
void widen(const uint8_t* block, int64_t half, uint16_t* out) {
    if (half == 0) ask_ahead<Form>(block);
#pragma GCC unroll 8
    for (int v = 0; v < Form::kVectors; v++) {
        const __m512i codes = _mm512_loadu_si512(codes_of<Form>(block, half) + v * 64);
        Vectors<Form>::pairs(codes, out + v * Vectors<Form>::kPairRows * kColumns);
    }
}

// sums += the products of a tile of x with half of a block's channels.
template <class Form>
void scale(const uint8_t* block, int64_t half, const float* products, const Scale* scales, int64_t blocks,
           int64_t height, bool fresh, float* sums) {
    const Channels<Form> channels(block, half);
#pragma GCC unroll 4
    for (int64_t row = 0; row < height; row++) {
        const __m512 sum = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + row * kTile);
        const __m512 more = _mm512_load_ps(products + row * kTile);
        _mm512_store_ps(sums + row * kTile, channels.add(sum, more, scales[row * blocks]));
    }
}

#define MULTIPLY(sum, codes)        \
    do {                            \
        tile_fence();               \
        _tile_zero(sum);            \
        _tile_loadd(7, codes, 64);  \
        _tile_dpbf16ps(sum, 4, 7);  \
        _tile_dpbf16ps(sum, 5, 7);  \
        _tile_dpbf16ps(sum, 6, 7);  \
    } while (0)

#define STORE(sum, products)            \
    do {                                \
        _tile_stored(sum, products, 64); \
        tile_fence();                   \
    } while (0)

// A step multiplies a block of a tile of x with half of the channels after half. While the tiles do one, vectors scale
// the same half of the step before and widen that of the next block: tiles and vectors take about as long.
template <class Form, int HALVES>
void many_rows(const uint8_t* panel, const Rows& rows, const Output& out, SpanMemory& memory) {
    const int64_t tiles = ceil_div(rows.M, kTile), height = smaller(rows.M, kTile), blocks = rows.blocks;
    const int64_t stride = height * kColumns;  // of digits
    const auto block_of = [&](int64_t half, int64_t block) {
        return panel + (half / kHalves * blocks + block) * Form::kBytes;
    };
    const auto widen_half = [&](int64_t half, int64_t block) {
        widen<Form>(block_of(half, block), half % kHalves, memory.codes[block % 2][half]);
    };
    const auto scale_half = [&](int64_t half, int64_t block, int64_t t, int64_t step) {
        scale<Form>(block_of(half, block), half % kHalves, memory.products[step % 2][half],
                    rows.scales + t * kTile * blocks + block, blocks, height, block == 0, memory.sums[t][half]);
    };
    for (int64_t half = 0; half < HALVES; half++) widen_half(half, 0);
    const auto* x = reinterpret_cast<const uint16_t*>(rows.digits);
    int64_t step = 0, block_before = 0, t_before = 0;
    for (int64_t block = 0; block < blocks; block++) {
        const auto& codes = memory.codes[block % 2];
        for (int64_t t = 0; t < tiles; t++, step++) {
            const auto beside = [&](int64_t half) {
                if (step > 0) scale_half(half, block_before, t_before, step - 1);
                if (t == 0 && block + 1 < blocks) widen_half(half, block + 1);
            };
            float(*before)[kTileFloats] = memory.products[(step + 1) % 2];
            float(*products)[kTileFloats] = memory.products[step % 2];
            const uint16_t* digits = x + (t * blocks + block) * kDigits * stride;
            tile_fence();
            _tile_loadd(4, digits, 64);
            _tile_loadd(5, digits + stride, 64);
            _tile_loadd(6, digits + 2 * stride, 64);
            MULTIPLY(0, codes[0]);
            if constexpr (HALVES == 2) {
                STORE(1, before[1]);
                beside(0);
                MULTIPLY(1, codes[1]);
                STORE(0, products[0]);
                beside(1);
            } else {
                STORE(3, before[3]);
                beside(0);
                MULTIPLY(1, codes[1]);
                STORE(0, products[0]);
                beside(1);
                MULTIPLY(2, codes[2]);
                STORE(1, products[1]);
                beside(2);
                MULTIPLY(3, codes[3]);
                STORE(2, products[2]);
                beside(3);
            }
            block_before = block, t_before = t;
        }
    }
    tile_fence();
    if constexpr (HALVES == 2) {
        STORE(1, memory.products[(step + 1) % 2][1]);
    } else {
        STORE(3, memory.products[(step + 1) % 2][3]);
    }
    for (int64_t half = 0; half < HALVES; half++) scale_half(half, block_before, t_before, step - 1);
    for (int64_t row = 0; row < rows.M; row++) {
        for (int64_t half = 0; half < HALVES; half++) {
            store(out, row, half, _mm512_load_ps(memory.sums[row / kTile][half] + row % kTile * kTile));
        }
    }
}
#undef MULTIPLY
#undef STORE

#endif

// Panels [first, end): panel(p) is where one lies, output(p) where its product goes.
template <class Form, class Panel, class To>
void multiply(const Rows& rows, int64_t first, int64_t end, Panel panel, To output) {
#if HAVE_TILES
    if (in_tiles(rows)) {
        const TileScope scope(smaller(rows.M, kTile), kLowTiles);
        SpanMemory span;
        for (int64_t p = first; p < end; p += kSpan) {
            const auto run = end - p < kSpan ? many_rows<Form, kHalves> : many_rows<Form, kSpanHalves>;
            run(panel(p), rows, output(p), span);
        }
        return;
    }
#endif
    for (int64_t p = first; p < end; p++) few_rows<Form>(panel(p), rows, output(p));
}

}  // namespace
