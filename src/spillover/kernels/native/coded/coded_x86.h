// Products with codes on x86 cores: by vectors of bytes (AVX-512, in one instruction with VNNI), and for more rows by
// tiles where the cores support them (AMX), as bfloat16, in which codes and digits are exact. Codes in vectors are
// unsigned bytes, raised by a base, so their sums start with a value that subtracts the base.
#pragma once
#include "../amx.h"
#include "coded.h"

namespace {

constexpr int64_t kFew = 3;             // number of rows up to which vectors are faster than tiles
constexpr int64_t kRowStep = kTile;     // rows are stored in tiles
constexpr int64_t kDigitBytes = 2;      // maximum bytes per digit
constexpr int64_t kRowBytes = 1 << 20;  // maximum bytes of x in digits, which stay in L2 cache while panels pass

struct Scale {
    float unit;                 // unit of the lowest digit
    float total;                // sum of the block's columns
    int32_t base[2][kDigits];   // start value of each part's sums: minus the sum of its digits times kBase
};

float from_half(uint16_t stored) { return _cvtsh_ss(stored); }

bool in_tiles(const Rows& rows) { return rows.M > kFew && tiles_allowed(); }

struct Lanes {
    static __m512 halves(const uint8_t* p) { return _mm512_cvtph_ps(shorts(p)); }
    static __m512 brains(const uint8_t* p) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(shorts(p)), 16); }
    static __m512 bytes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(p))); }
    static __m512 signed_bytes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(p))); }
    static __m512 e4m3(const uint8_t* p) { return (__m512)(Fp8Pool::load<kHalf>(p) * Fp8Pool::kUnit); }
    static __m512 floats(const uint8_t* p) { return _mm512_loadu_ps(p); }

  private:
    static __m256i shorts(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
};

// Returns sums + four unsigned bytes, of at most MOST, times four signed ones.
template <int MOST>
__m512i dot(__m512i sums, __m512i codes, __m512i digits) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sums, codes, digits);
#else
    if constexpr (MOST * 2 * 128 < 1 << 15) {
        const __m512i pairs = _mm512_maddubs_epi16(codes, digits);
        return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(digits, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), _mm512_srai_epi16(digits, 8));
    return _mm512_add_epi32(sums, _mm512_add_epi32(even, odd));
#endif
}

// Shifts 16-bit words right by BY, or left by -BY.
template <int BY>
__m512i shifted(__m512i words) {
    if constexpr (BY > 0) return _mm512_srli_epi16(words, BY);
    if constexpr (BY < 0) return _mm512_slli_epi16(words, -BY);
    return words;
}

// Returns an integer of magnitude at most 255 as bfloat16.
constexpr uint16_t brain(int value) {
    const int magnitude = value < 0 ? -value : value;
    int exponent = 0;
    while (magnitude >> (exponent + 1)) exponent++;
    return magnitude == 0 ? 0 : (value < 0) << 15 | (127 + exponent) << 7 | ((magnitude << 7 >> exponent) & 127);
}

// bytes<I>: the I-th vector of half a block's codes as bytes from 0 to kMost: less the codes' centre plus kBase; four
// columns of a channel are adjacent, in the form's order.
// pairs<V>: writes the values of eight columns, less the centre, as bfloat16, one row of a tile per pair of columns.
template <class Codes>
struct Vectors {
    static constexpr int kBase = Codes::kCentre, kMost = 2 * kBase - 1;

    template <int I>
    static __m512i bytes(const uint8_t* half) {
        const __m512i low = _mm512_and_si512(shifted<I % 2 * 4>(_mm512_loadu_si512(half + I / 2 * 64)),
                                             _mm512_set1_epi8(15));
        if constexpr (Codes::kHigh == 0) return low;
        const __m512i high = shifted<I * Codes::kHigh % 8 - 4>(_mm512_loadu_si512(half + 256 + I * Codes::kHigh / 8 * 64));
        return _mm512_ternarylogic_epi64(low, high, _mm512_set1_epi8(((1 << Codes::kHigh) - 1) << 4), 0xf8);
    }

    template <int V>
    static void pairs(const uint8_t* half, uint16_t* out) {
        alignas(64) static constexpr Values kValues;
        const __m512i low = _mm512_loadu_si512(half + V * 64);
        unrolled<0, 4>([&](auto j) {
            constexpr int J = decltype(j)::value, kAt = (V * 2 + J % 2) * Codes::kHigh;
            __m512i names = shifted<4 * J>(low);
            if constexpr (Codes::kHigh > 0) {
                const __m512i high = shifted<J / 2 * 8 + kAt % 8 - 4>(_mm512_loadu_si512(half + 256 + kAt / 8 * 64));
                const __m512i mask = _mm512_set1_epi16(((1 << Codes::kHigh) - 1) << 4);
                names = _mm512_ternarylogic_epi64(names, high, mask, 0xd8);
            }
            // A lookup uses five bits of a word, or six; for codes of four bits the fifth makes no difference.
            const __m512i first = _mm512_load_si512(kValues.values);
            if constexpr (Codes::kHigh < 2) {
                _mm512_store_si512(out + J * 32, _mm512_permutexvar_epi16(names, first));
            } else {
                const __m512i second = _mm512_load_si512(kValues.values + 32);
                _mm512_store_si512(out + J * 32, _mm512_permutex2var_epi16(first, names, second));
            }
        });
    }

  private:
    struct Values {
        uint16_t values[64] = {};
        constexpr Values() {
            for (int i = 0; i < 64; i++) values[i] = brain(i % (16 << Codes::kHigh) - Codes::kCentre);
        }
    };
};

template <class Named>
struct Vectors<Table<Named>> {
    static constexpr int kBase = 128, kMost = 255;

    template <int I>
    static __m512i bytes(const uint8_t* half) {
        alignas(16) static constexpr Raised kRaised;
        const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kRaised.values)));
        return _mm512_shuffle_epi8(values, Vectors<Planes<0>>::bytes<I>(half));
    }

    template <int V>
    static void pairs(const uint8_t* half, uint16_t* out) {
        alignas(64) static constexpr Widened kWidened;
        const __m512i codes = _mm512_loadu_si512(half + V * 64), values = _mm512_load_si512(kWidened.values);
        unrolled<0, 4>([&](auto j) {
            constexpr int J = decltype(j)::value;
            _mm512_store_si512(out + J * 32, _mm512_permutexvar_epi16(shifted<4 * J>(codes), values));
        });
    }

  private:
    struct Raised {
        uint8_t values[16] = {};
        constexpr Raised() {
            for (int i = 0; i < 16; i++) values[i] = static_cast<uint8_t>(Named::kValues[i] + kBase);
        }
    };
    struct Widened {
        uint16_t values[32] = {};
        constexpr Widened() {
            for (int i = 0; i < 32; i++) values[i] = brain(Named::kValues[i % 16]);
        }
    };
};

template <>
struct Vectors<SignedBytes> {
    static constexpr int kBase = 128, kMost = 255;

    template <int I>
    static __m512i bytes(const uint8_t* half) {
        return _mm512_xor_si512(_mm512_loadu_si512(half + I * 64), _mm512_set1_epi8(static_cast<char>(kBase)));
    }

    template <int V>
    static void pairs(const uint8_t* half, uint16_t* out) {
        // number() converts the highest byte of each 32-bit word to float.
        const auto number = [](__m512i v) { return (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24)); };
        const auto store = [&](uint16_t* to, __m512i odd, __m512i even) {
            const __m512i low = _mm512_srli_epi32(number(even), 16);
            _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, low, number(odd)));
        };
        for (int four = 0; four < 2; four++) {
            const __m512i codes = _mm512_loadu_si512(half + (V * 2 + four) * 64);
            store(out + four * 64, _mm512_slli_epi32(codes, 8), _mm512_slli_epi32(codes, 24));
            store(out + four * 64 + 32, codes, _mm512_slli_epi32(codes, 16));
        }
    }
};

// Converts a row of x to digits [tiles][blocks][kDigits][rows][32 columns], as bytes or, for tiles, bfloat16. Tiles
// have 16 rows; a single tile has only the existing rows.
template <class Form, class Digit>
void split_into(const float* x, int64_t row, const Rows& rows) {
    const int64_t digit_bytes = smaller(rows.M, kTile) * kColumns * sizeof(Digit);  // bytes of one digit of a tile
    const char* o = Form::Codes::kOrder;
    const __m128i eight = _mm_setr_epi8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], 8 + o[0], 8 + o[1], 8 + o[2],
                                        8 + o[3], 8 + o[4], 8 + o[5], 8 + o[6], 8 + o[7]);
    const __m512i half = _mm512_set1_epi32(128);
    uint8_t* out = rows.digits + row / kTile * rows.blocks * kDigits * digit_bytes;
    out += row % kTile * kColumns * sizeof(Digit);
    Scale* scale = rows.scales + row * rows.blocks;
    for (int64_t b = 0; b < rows.blocks; b++, x += kColumns, scale++) {
        const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
        // Compared as integers, since a comparison of floats would ignore NaN.
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
                constexpr int kBase = Vectors<typename Form::Codes>::kBase;
                if constexpr (Form::kParts == 1) {
                    scale->base[0][d] = -kBase * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
                } else {
                    scale->base[0][d] = -kBase * _mm512_reduce_add_epi32(low);
                    scale->base[1][d] = -kBase * _mm512_reduce_add_epi32(high);
                }
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

// The scales and offsets of one part of a block, for half of its channels.
template <class Form>
struct Channels {
    __m512 scale, offset;

    Channels(const Place<Form>& at, int64_t half, int64_t part) {
        typedef typename Form::Numbers Numbers;
        scale = Numbers::template scale<Lanes>(at.head, at.block, half * kHalf, part);
        if constexpr (Form::kOffset) {
            offset = Numbers::template offset<Lanes>(at.head, at.block, half * kHalf);
            if constexpr (Form::Codes::kCentre) {
                offset = _mm512_fmadd_ps(scale, _mm512_set1_ps(Form::Codes::kCentre), offset);
            }
        }
    }

    // Adds a part of a block to a sum; `products`: those of x with the codes less their centre.
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

constexpr int64_t kAhead = 4096;  // bytes by which a panel is prefetched

// Prefetches a later block. Not done on ARM, where the hardware prefetcher does better.
template <class Form>
void ask_ahead(const Place<Form>& at) {
#pragma GCC unroll 17
    for (int64_t line = 0; line < Form::kBytes; line += 64) __builtin_prefetch(at.block + kAhead + line, 0, 2);
}

template <class Form, int M>
void few_rows(const uint8_t* panel, const Rows& rows, int64_t stride, const Output& out) {
    constexpr int kPartVectors = kByteVectors / Form::kParts;
    __m512 sums[M][kHalves] = {};
    Place<Form> at(panel, rows.unit);
    for (int64_t b = 0; b < rows.blocks; b++, at.next()) {
        ask_ahead(at);
        const uint8_t* x = rows.digits + b * kDigits * stride;
        const Scale* scales = rows.scales + b;
        unrolled<0, Form::kParts>([&](auto part) {
            constexpr int kPart = decltype(part)::value;
            __m512i products[M][kHalves][kDigits];  // both halves, so that none waits for the previous one
            for (int m = 0; m < M; m++) {
                const int32_t* base = scales[m * rows.blocks].base[kPart];
                for (auto& three : products[m]) {
                    for (int d = 0; d < kDigits; d++) three[d] = _mm512_set1_epi32(base[d]);
                }
            }
            unrolled<kPart * kPartVectors, kPartVectors>([&](auto i) {
                constexpr int I = decltype(i)::value;
                __m512i codes[kHalves];
                for (int h = 0; h < kHalves; h++) {
                    codes[h] = Vectors<typename Form::Codes>::template bytes<I>(at.codes(h));
                }
                for (int m = 0; m < M; m++) {
                    for (int d = 0; d < kDigits; d++) {
                        int32_t four;
                        __builtin_memcpy(&four, x + I * 4 + d * stride + m * kColumns, 4);
                        const __m512i digits = _mm512_set1_epi32(four);
                        for (int h = 0; h < kHalves; h++) {
                            products[m][h][d] = dot<Vectors<typename Form::Codes>::kMost>(products[m][h][d], codes[h], digits);
                        }
                    }
                }
            });
            for (int h = 0; h < kHalves; h++) {
                const Channels<Form> channels(at, h, kPart);
                for (int m = 0; m < M; m++) {
                    // In the same order as tiles: the lower two digits are added first, then the highest.
                    const __m512i* three = products[m][h];
                    const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(three[1], 8), three[0]);
                    const __m512 highest = _mm512_cvtepi32_ps(three[2]);
                    const __m512 all = _mm512_fmadd_ps(highest, _mm512_set1_ps(65536), _mm512_cvtepi32_ps(lower));
                    const Scale& scale = scales[m * rows.blocks];
                    __m512& sum = sums[m][h];
                    sum = channels.add(sum, _mm512_mul_ps(all, _mm512_set1_ps(scale.unit)), scale);
                }
            }
        });
    }
    for (int m = 0; m < M; m++) {
        for (int64_t h = 0; h < kHalves; h++) store(out, m, h, sums[m][h]);
    }
}

template <class Form>
void few_rows(const uint8_t* panel, const Rows& rows, Output out) {
    const int64_t stride = smaller(rows.M, kTile) * kColumns;  // bytes of one digit of a tile
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

constexpr int64_t kSpan = 2;                    // panels multiplied together, so that x is loaded once for them
constexpr int64_t kSpanHalves = kSpan * kHalves;
constexpr unsigned kLowTiles = 0x7f;            // tiles of the height of x: sums 0 to 3, digits 4 to 6; codes are in 7

// Memory of one thread. Buffers alternate, since just-stored data cannot be loaded as a tile at once.
struct SpanMemory {
    alignas(64) uint16_t codes[2][kSpanHalves][kPairs];
    alignas(64) float products[2][kSpanHalves][kTileFloats];
    alignas(64) float sums[kMostRows / kTile][kSpanHalves][kTileFloats];
};

// Widens a part of half a block's codes; the columns of other parts become zero.
template <class Form>
void widen(const Place<Form>& at, int64_t half, int64_t part, uint16_t* out) {
    if (half == 0 && part == 0) ask_ahead(at);
    unrolled<0, kColumns / 8>([&](auto v) {
        constexpr int V = decltype(v)::value;
        uint16_t* to = out + V * 4 * kColumns;
        if (V * Form::kParts / (kColumns / 8) == part) {
            Vectors<typename Form::Codes>::template pairs<V>(at.codes(half), to);
        } else {
            for (int row = 0; row < 4; row++) _mm512_store_si512(to + row * kColumns, _mm512_setzero_si512());
        }
    });
}

// sums += the products of a tile of x with a part of half of a block's channels.
template <class Form>
void scale(const Place<Form>& at, int64_t half, int64_t part, const float* products, const Scale* scales, int64_t blocks,
           int64_t height, bool fresh, float* sums) {
    const Channels<Form> channels(at, half, part);
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

// Each step multiplies a part of a block of a tile of x with one half of the channels after the other. While the tiles
// multiply a half, vectors scale that half of the last step and widen that of the next part, in about the same time.
template <class Form, int HALVES>
void many_rows(const uint8_t* panel, const Rows& rows, const Output& out, SpanMemory& memory) {
    const int64_t tiles = ceil_div(rows.M, kTile), height = smaller(rows.M, kTile), blocks = rows.blocks;
    const int64_t parts = blocks * Form::kParts, panel_bytes = Form::panel_bytes(blocks, rows.unit);
    const int64_t stride = height * kColumns;  // numbers of one digit of a tile
    const auto place = [&](int64_t half, int64_t part) {
        return Place<Form>(panel + half / kHalves * panel_bytes, rows.unit, part / Form::kParts);
    };
    const auto widen_half = [&](int64_t half, int64_t part) {
        widen<Form>(place(half, part), half % kHalves, part % Form::kParts, memory.codes[part % 2][half]);
    };
    const auto scale_half = [&](int64_t half, int64_t part, int64_t t, int64_t step) {
        scale<Form>(place(half, part), half % kHalves, part % Form::kParts, memory.products[step % 2][half],
                    rows.scales + t * kTile * blocks + part / Form::kParts, blocks, height, part == 0,
                    memory.sums[t][half]);
    };
    for (int64_t half = 0; half < HALVES; half++) widen_half(half, 0);
    const auto* x = reinterpret_cast<const uint16_t*>(rows.digits);
    int64_t step = 0, part_before = 0, t_before = 0;
    for (int64_t part = 0; part < parts; part++) {
        const auto& codes = memory.codes[part % 2];
        for (int64_t t = 0; t < tiles; t++, step++) {
            const auto beside = [&](int64_t half) {
                if (step > 0) scale_half(half, part_before, t_before, step - 1);
                if (t == 0 && part + 1 < parts) widen_half(half, part + 1);
            };
            float(*before)[kTileFloats] = memory.products[(step + 1) % 2];
            float(*products)[kTileFloats] = memory.products[step % 2];
            const uint16_t* digits = x + (t * blocks + part / Form::kParts) * kDigits * stride;
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
            part_before = part, t_before = t;
        }
    }
    tile_fence();
    if constexpr (HALVES == 2) {
        STORE(1, memory.products[(step + 1) % 2][1]);
    } else {
        STORE(3, memory.products[(step + 1) % 2][3]);
    }
    for (int64_t half = 0; half < HALVES; half++) scale_half(half, part_before, t_before, step - 1);
    for (int64_t row = 0; row < rows.M; row++) {
        for (int64_t half = 0; half < HALVES; half++) {
            store(out, row, half, _mm512_load_ps(memory.sums[row / kTile][half] + row % kTile * kTile));
        }
    }
}
#undef MULTIPLY
#undef STORE

#endif

// Multiplies panels [first, end): panel(p) is the address of a panel, output(p) the destination of its product.
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
