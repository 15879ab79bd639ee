// y = x W^T + b over weights that stay as their file has them: codes of four or eight bits, and for every block of 32
// of a row a scale and an offset, w = scale * code + offset.
//
// A block of x becomes 24 bits fixed-point, in three digits of eight bits: what that rounds away is no more than what
// sums of float32 do. Digits times codes are summed up without rounding, so in any order: with few rows by vectors of
// bytes, with more by tiles where the cores have them (AMX), as bfloat16, which holds codes and digits exactly. The
// sums of the three digits, then those of the blocks, are added up in one order. So the bits of y[m, n] depend neither
// on M nor on the way they were made.
#include "amx.h"
#include "team.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

namespace {

constexpr int64_t kPanel = 32, kHalves = 2, kHalf = 16;  // channels
constexpr int64_t kColumns = 32;                         // of a block
constexpr int64_t kDigits = 3;
constexpr int64_t kFew = 3;             // rows that vectors multiply faster than tiles do
constexpr int64_t kMostRows = 128;      // that are multiplied with a panel at once
constexpr int64_t kRowBytes = 1 << 20;  // of x in digits, held in the second-level cache while panels pass
constexpr int64_t kUnits = 8;           // of work for a thread, so that one that is held up is helped
constexpr int64_t kAhead = 4096;        // bytes of a panel that are asked for before they are needed

// A block of a panel: scales [32], offsets [32] if the form has some, both float16; then codes, half of the channels
// after half. A vector of codes has two words for each channel: one for the even columns, one for the odd ones.
//
// bytes: the codes of a vector, as bytes from 0 on; four columns of a channel lie together, in the order kOrder.
// pairs: the codes less kCentre as bfloat16, a row of a tile for each pair of columns.
struct Four {
    static constexpr int64_t kBytes = 640, kCodes = 128, kVectors = 4;  // of half the channels
    static constexpr int64_t kByteVectors = 2, kPairRows = 4;           // that a vector of codes becomes
    static constexpr int kCentre = 8;
    static constexpr bool kOffset = true;
    static constexpr char kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

    // Column 2j + p of the vector's eight is in bits 4j of word p.
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

    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const uint8_t* word = half + column / 8 * 64 + (channel * 2 + column % 2) * 2;
        return word[column % 8 / 4] >> (column % 4 / 2 * 4) & 15;
    }
};

struct Eight {
    static constexpr int64_t kBytes = 1088, kCodes = 64, kVectors = 8;
    static constexpr int64_t kByteVectors = 1, kPairRows = 2;
    static constexpr int kCentre = 128;  // of the bytes: the codes themselves are signed
    static constexpr bool kOffset = false;
    static constexpr char kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};

    // Column 2j + p of the vector's four is byte j of word p.
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

    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const uint8_t* word = half + column / 4 * 64 + (channel * 2 + column % 2) * 2;
        return static_cast<int8_t>(word[column % 4 / 2]);
    }
};

template <class Form>
const uint8_t* codes_of(const uint8_t* block, int64_t half) {
    return block + Form::kCodes + half * Form::kVectors * 64;
}

// What a block of a row of x is beside its digits.
struct Scale {
    float unit;               // that the lowest digit counts
    float total;              // of its columns
    int32_t centre[kDigits];  // less what its digits times the codes' centre sum up to
    int32_t unused[3];
};

// x in digits [tiles][blocks][kDigits][rows][32 columns], bytes or bfloat16, and its scales [tiles * 16][blocks]. Tiles
// have 16 rows, a single one as many as there are.
struct Rows {
    int64_t M, blocks;
    uint8_t* digits;
    Scale* scales;
};

// A power of two, so that the largest number of a block is just below what three digits hold.
float unit_of(int32_t largest_bits) {
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    const float room = largest * 1.0041f;  // digits are signed and reach 127 * 65793, a little less than 2^23
    int32_t bits;
    __builtin_memcpy(&bits, &room, 4);
    bits = (std::clamp(bits >> 23, 30, 254) + 1 - 23) << 23;
    float unit;
    __builtin_memcpy(&unit, &bits, 4);
    return largest < __builtin_inff() ? unit : __builtin_nanf("");
}

template <class Form, class Digit>
void split(const float* x, int64_t row, const Rows& rows) {
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
                scale->centre[d] = -Form::kCentre * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
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

// The scales and offsets of half a block's channels.
template <class Form>
struct Channels {
    __m512 scale, offset;

    Channels(const uint8_t* block, int64_t half) {
        const auto stored = [&](int64_t at) {
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + at + half * 32)));
        };
        scale = stored(0);
        if constexpr (Form::kOffset) offset = _mm512_fmadd_ps(scale, _mm512_set1_ps(Form::kCentre), stored(64));
    }

    // `products`: of a block of x with codes less their centre.
    __m512 add(__m512 sum, __m512 products, const Scale& x) const {
        sum = _mm512_fmadd_ps(scale, products, sum);
        if constexpr (Form::kOffset) sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.total), sum);
        return sum;
    }
};

// Where the product with a panel goes.
struct Output {
    float* y;
    const float* bias;
    int64_t N, width;

    void store(int64_t row, int64_t half, __m512 sum) const {
        const int64_t n = half * kHalf, left = width - n;
        const __mmask16 there = left >= kHalf ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
        if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, bias + n));
        _mm512_mask_storeu_ps(y + row * N + n, there, sum);
    }
};

template <class Form>
void ask_ahead(const uint8_t* block) {
#pragma GCC unroll 17
    for (int64_t line = 0; line < Form::kBytes; line += 64) __builtin_prefetch(block + kAhead + line, 0, 2);
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
                __m512i codes[Form::kByteVectors];
                Form::bytes(_mm512_loadu_si512(codes_of<Form>(block, h) + v * 64), codes);
#pragma GCC unroll 2
                for (int i = 0; i < Form::kByteVectors; i++) {
                    const uint8_t* columns = x + (v * Form::kByteVectors + i) * 4;
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
        for (int64_t h = 0; h < kHalves; h++) out.store(m, h, sums[m][h]);
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
        Form::pairs(codes, out + v * Form::kPairRows * kColumns);
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
            out.store(row, half, _mm512_load_ps(memory.sums[row / kTile][half] + row % kTile * kTile));
        }
    }
}
#undef MULTIPLY
#undef STORE

#endif

template <class Form>
void product(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N, int64_t K) {
    static thread_local std::unique_ptr<uint8_t[]> memory;
    static thread_local int64_t room = 0;
    const int64_t blocks = K / kColumns;
    const int64_t most = std::clamp<int64_t>(kRowBytes / (K * kDigits * 2 * kTile), 1, kMostRows / kTile) * kTile;
    const int64_t padded = ceil_div(smaller(M, most), kTile) * kTile;
    const int64_t digit_bytes = padded * K * kDigits * 2, needed = digit_bytes + padded * blocks * sizeof(Scale) + 64;
    if (room < needed) memory.reset(new uint8_t[room = needed]);
    uint8_t* digits = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
    Scale* scales = reinterpret_cast<Scale*>(digits + digit_bytes);
    const int64_t num_panels = ceil_div(N, kPanel), threads = team_size;
    const int64_t per = larger(1, num_panels / (threads * kUnits)), units = ceil_div(num_panels, per);
    for (int64_t done = 0; done < M; done += most) {
        const Rows rows{smaller(most, M - done), blocks, digits, scales};
        const bool tiles = rows.M > kFew && tiles_allowed();
        share(rows.M, [&](int64_t row, int) {
            const float* from = x + (done + row) * K;
            tiles ? split<Form, uint16_t>(from, row, rows) : split<Form, int8_t>(from, row, rows);
        }, rows.M > 4);
        share(units, [&](int64_t unit, int) {
            const int64_t end = smaller(num_panels, (unit + 1) * per);
            const auto panel = [&](int64_t p) { return panels + p * blocks * Form::kBytes; };
            const auto output = [&](int64_t p) {
                return Output{y + done * N + p * kPanel, bias ? bias + p * kPanel : nullptr, N, N - p * kPanel};
            };
#if HAVE_TILES
            if (tiles) {
                const TileScope scope(smaller(rows.M, kTile), kLowTiles);
                SpanMemory span;
                for (int64_t p = unit * per; p < end; p += kSpan) {
                    const auto run = end - p < kSpan ? many_rows<Form, kHalves> : many_rows<Form, kSpanHalves>;
                    run(panel(p), rows, output(p), span);
                }
                return;
            }
#endif
            for (int64_t p = unit * per; p < end; p++) few_rows<Form>(panel(p), rows, output(p));
        });
    }
}

template <class Form>
void look_up(const int64_t* ids, const uint8_t* panels, float* y, int64_t T, int64_t K) {
    share(T, [=](int64_t t, int) {
        const int64_t channel = ids[t] % kPanel;
        const uint8_t* block = panels + ids[t] / kPanel * (K / kColumns) * Form::kBytes;
        for (float* out = y + t * K; out < y + (t + 1) * K; out += kColumns, block += Form::kBytes) {
            const auto number = [&](int64_t at) {
                uint16_t stored;
                __builtin_memcpy(&stored, block + at + channel * 2, 2);
                return _cvtsh_ss(stored);
            };
            const float scale = number(0), offset = Form::kOffset ? number(64) : 0;
            const uint8_t* codes = codes_of<Form>(block, channel / kHalf);
            for (int64_t c = 0; c < kColumns; c++) {
                out[c] = scale * static_cast<float>(Form::code(codes, channel % kHalf, c)) + offset;
            }
        }
    }, T > 8);
}

}  // namespace

extern "C" int64_t multiplies_codes() { return 1; }

extern "C" void coded_linear(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N,
                             int64_t K, int64_t bits) {
    if (M > 0) (bits == 4 ? product<Four> : product<Eight>)(x, panels, bias, y, M, N, K);
}

extern "C" void coded_embedding(const int64_t* ids, const uint8_t* panels, float* y, int64_t T, int64_t K,
                                int64_t bits) {
    (bits == 4 ? look_up<Four> : look_up<Eight>)(ids, panels, y, T, K);
}

#else

// Cores without the instructions: weights are widened to float32 when they are loaded.
extern "C" int64_t multiplies_codes() { return 0; }
extern "C" void coded_linear(const float*, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t) {}
extern "C" void coded_embedding(const int64_t*, const uint8_t*, float*, int64_t, int64_t, int64_t) {}

#endif
