// Products of weights with many rows of floats, in bfloat16, on x86 cores with matrix tiles (AMX).
//
// A tile of weights is 16 rows of 32 columns. A tile of the other operand is 32 columns of 16 rows of floats (called
// tokens here, as opposed to rows of weights) as [16 pairs of columns][16 tokens][2]. A token tile is a sequence of
// these; lanes without a token may hold any values, as lanes are summed separately. Sums are [16 rows][16 tokens] of
// float32: the tiles sum 128 columns, which are scaled and added to the sums before the next 128, so that the order of
// a sum does not depend on the number of tokens. Weights of every form are exact in bfloat16.
#pragma once
#include <algorithm>

#include "experts.h"

// Compiled if the library's target cores have tiles; whether the system permits their use is checked at run time.
#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__AVX512BF16__)
#define HAVE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int64_t kTile = 16;                   // rows of weights, and tokens, per tile
constexpr int64_t kTileFloats = kTile * kTile;  // floats of a tile of sums
constexpr int64_t kPairs = kStep * kTile;       // bfloat16 numbers of one step of either operand

// Rows of weights that are multiplied together.
struct Strip {
    const uint8_t* weights[kTile];
    const uint8_t* scales[kTile];  // scales of the rows in the record, not prepared
    int64_t next;                  // bytes from a row to the row at the same index of the next strip
};

#if HAVE_TILES

// Every form has: convert, which returns the step of weights at `p` as bfloat16; convert_some, for a step of which only
// the columns in `kept` exist; and kBlockScaled, whether the sum of a block's columns remains to be scaled.
template <class Form>
struct TileForm {
    static constexpr bool kThere = false;
};

template <>
struct TileForm<Bfloat16Form> {
    static constexpr bool kThere = true, kBlockScaled = false;
    static __m512i convert(const uint8_t* p, const uint8_t*, int64_t) { return _mm512_loadu_si512(p); }
    static __m512i convert_some(const uint8_t* p, const uint8_t*, int64_t, __mmask32 kept) {
        return _mm512_maskz_loadu_epi16(kept, p);
    }
};

template <>
struct TileForm<Fp8Form> {
    static constexpr bool kThere = true, kBlockScaled = true;
    static __m512i convert(const uint8_t* p, const uint8_t*, int64_t) {
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static __m512i convert_some(const uint8_t* p, const uint8_t*, int64_t, __mmask32 kept) {
        return widen(_mm256_maskz_loadu_epi8(kept, p));
    }

  private:
    // The exponents' biases differ by 120. Subnormals become normal bfloat16 numbers, by a table.
    static __m512i widen(__m256i bytes) {
        alignas(64) static constexpr uint16_t kSubnormal[32] = {
            0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0,      0,      0,      0,      0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0};
        const __m512i codes = _mm512_cvtepu8_epi16(bytes);
        const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16(0x07f0));
        const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
        const __mmask32 small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
        const __m512i value = _mm512_mask_permutexvar_epi16(normal, small, codes, _mm512_load_si512(kSubnormal));
        const __m512i sign = _mm512_slli_epi16(codes, 8);
        return _mm512_ternarylogic_epi32(value, sign, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8);
    }
};

template <>
struct TileForm<Mxfp4Form> {
    static constexpr bool kThere = true, kBlockScaled = false;
    // The scale is added to the exponents of a table of the values, except zero. Scales whose products would be
    // subnormal, infinite or NaN in bfloat16 are clamped to the nearest for which none is.
    static __m512i convert(const uint8_t* p, const uint8_t* scales, int64_t step) {
        alignas(64) static constexpr uint16_t kValues[32] = {
            0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
            0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
            0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        const int scale = (std::clamp<int>(scales[step], 2, 252) - 127) * 128;
        const __m512i values = _mm512_load_si512(kValues), by = _mm512_set1_epi16(static_cast<int16_t>(scale));
        const __m512i table = _mm512_mask_add_epi16(values, 0xfefefefe, values, by);
        // A byte's low half goes to the low word, its high half to the high word; a lookup uses five bits of a word,
        // of which the fifth makes no difference.
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_permutexvar_epi16(_mm512_or_si512(codes, _mm512_slli_epi32(codes, 12)), table);
    }
    static __m512i convert_some(const uint8_t* p, const uint8_t* scales, int64_t step, __mmask32) {
        return convert(p, scales, step);  // MXFP4 columns are whole steps
    }
};

// Whether the system permits this process to use tiles.
inline bool tiles_allowed() {
    constexpr long kRequest = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return allowed;
}

// Configures this thread's tiles for a scope: rows of 64 bytes, 16 of them, or `height` for tiles with a bit in `low`.
class TileScope {
  public:
    explicit TileScope(int64_t height = kTile, unsigned low = 0) {
        alignas(64) uint8_t config[64] = {1};
        for (int i = 0; i < 8; i++) {
            config[16 + 2 * i] = 64;
            config[48 + i] = low >> i & 1 ? height : kTile;
        }
        _tile_loadconfig(config);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

constexpr int64_t kBlock = 4;       // steps whose columns are summed before they are scaled
constexpr int64_t kAheadSteps = 16;  // steps by which weights are prefetched

// Memory of one thread, for groups of up to some number of token tiles. It is small enough to stay in L1 cache while
// weights stream past.
struct TileMemory {
    uint16_t weights[2][kBlock][kPairs];
    float part[kTileFloats];
    float* sums() { return reinterpret_cast<float*>(this + 1); }  // [token tiles][kTileFloats]
    static int64_t floats(int64_t tiles) { return sizeof(TileMemory) / 4 + tiles * kTileFloats; }
};

// Needed as compilers do not know which memory the tile instructions read and write.
static inline void tile_fence() { asm volatile("" ::: "memory"); }

template <class Form>
static inline void convert_block(const Strip& strip, int64_t columns, int64_t first, int64_t steps,
                                 uint16_t (*weights)[kPairs]) {
    constexpr int64_t kBytes = kStep * Form::kBits / 8;
    const int64_t total = ceil_div(columns, kStep), then = first + kAheadSteps;
    const int64_t ahead = then < total ? then * kBytes : strip.next + larger(0, then - total) * kBytes;
    const int64_t whole = smaller(steps, columns / kStep - first);
    const __mmask32 kept = (1u << columns % kStep) - 1;
    for (int64_t r = 0; r < kTile; r++) {
#pragma GCC unroll 4
        for (int64_t line = 0; line < kBlock * kBytes; line += 64) {
            __builtin_prefetch(strip.weights[r] + ahead + line, 0, 2);
        }
        const uint8_t* p = strip.weights[r] + first * kBytes;
        uint16_t* out = weights[0] + r * kStep;
        if (whole == kBlock) {
#pragma GCC unroll 4
            for (int64_t s = 0; s < kBlock; s++) {
                const __m512i step = TileForm<Form>::convert(p + s * kBytes, strip.scales[r], first + s);
                _mm512_store_si512(out + s * kPairs, step);
            }
            continue;
        }
        for (int64_t s = 0; s < steps; s++) {
            const __mmask32 there = s < whole ? ~0u : kept;
            const __m512i step = TileForm<Form>::convert_some(p + s * kBytes, strip.scales[r], first + s, there);
            _mm512_store_si512(out + s * kPairs, step);
        }
    }
}

// sums += the products of a block's steps with those of one token tile.
template <class Form>
static inline void multiply_block(const Strip& strip, int64_t first, int64_t steps, const uint16_t* x,
                                  const uint16_t (*weights)[kPairs], float* part, float* sums) {
    tile_fence();
    _tile_zero(0);
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(1, weights[s], 64);
        _tile_loadd(2, x + s * kPairs, 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, part, 64);
    tile_fence();
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTile; r++) {
        const __m512 sum = _mm512_load_ps(sums + r * kTile), more = _mm512_load_ps(part + r * kTile);
        if constexpr (TileForm<Form>::kBlockScaled) {
            const float scale = reinterpret_cast<const float*>(strip.scales[r])[first / kBlock];
            _mm512_store_ps(sums + r * kTile, _mm512_fmadd_ps(more, _mm512_set1_ps(scale), sum));
        } else {
            _mm512_store_ps(sums + r * kTile, _mm512_add_ps(sum, more));
        }
    }
}

// Computes memory.sums(): the products of a strip with every token of the token tiles x [tiles][stride]. A block is
// converted before the previous one is multiplied, since just-stored data cannot be loaded as a tile at once.
template <class Form>
static inline void tile_products(const Strip& strip, int64_t columns, const uint16_t* x, int64_t stride, int64_t tiles,
                                 TileMemory& memory) {
    static_assert(Form::kScaleSteps == kBlock || !TileForm<Form>::kBlockScaled);
    const int64_t steps = ceil_div(columns, kStep);
    std::memset(memory.sums(), 0, tiles * kTileFloats * sizeof(float));
    convert_block<Form>(strip, columns, 0, smaller(kBlock, steps), memory.weights[0]);
    for (int64_t first = 0; first < steps; first += kBlock) {
        const int64_t turn = first / kBlock % 2, next = first + kBlock;
        if (next < steps) {
            convert_block<Form>(strip, columns, next, smaller(kBlock, steps - next), memory.weights[1 - turn]);
        }
        for (int64_t t = 0; t < tiles; t++) {
            multiply_block<Form>(strip, first, smaller(kBlock, steps - first), x + t * stride + first * kPairs,
                                 memory.weights[turn], memory.part, memory.sums() + t * kTileFloats);
        }
    }
}

// Stores two columns [kTile] of floats as a pair of a token tile.
static inline void store_pair(uint16_t* out, Vec<16>::F even, Vec<16>::F odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
    _mm512_store_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Stores columns [first, end) of a row as a token of a token tile. `first` starts a step; the last step ends in zeros.
static inline void store_token(uint16_t* tile, int64_t token, const float* row, int64_t first, int64_t end) {
    const __m512i places = _mm512_slli_epi32((__m512i)iota<16>(), 4);
    for (int64_t c = first; c < end; c += kStep) {
        const uint32_t kept = end - c >= kStep ? ~0u : (1u << (end - c)) - 1;
        const __m512 low = _mm512_maskz_loadu_ps(kept & 0xffff, row + c);
        const __m512 high = _mm512_maskz_loadu_ps(kept >> 16, row + c + 16);
        _mm512_i32scatter_epi32(tile + c * kTile + token * 2, places, (__m512i)_mm512_cvtne2ps_pbh(high, low), 4);
    }
}

// Returns a token's sums for all rows of a strip.
static inline Vec<16>::F token_sums(const float* sums, int64_t token) {
    const __m512i places = _mm512_slli_epi32((__m512i)iota<16>(), 4);
    return (Vec<16>::F)_mm512_i32gather_ps(places, sums + token, 4);
}

#else

inline bool tiles_allowed() { return false; }

#endif
