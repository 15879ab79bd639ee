// A register tile of attention: rows of one KV head against one block of the KV pool. attention.cpp calls it per block.
#pragma once
#include "codes.h"

namespace {

constexpr int kRows = 12;         // maximum number of rows of a register tile
constexpr float kFloor = -1e30f;  // less than every score; finite, so that floor - floor is 0

// The lanes [first, last] of a block that a row sees.
struct Visible {
    int32_t first, last;
};

// Returns the scales that follow the codes of a head, one per token; not read for a pool of floats, which has none.
template <class Pool>
const float* scales(const typename Pool::Code* head, int64_t bs, int64_t D) {
    return reinterpret_cast<const float*>(head + bs * D);
}

// Prefetch of the next block. Keys and values are fetched in turn, half of both during `score` and half in `gather`, so
// that the hardware prefetcher runs ahead in the pages of both.
template <class Code>
struct Ahead {
    const Code *keys, *values;

    // Fetches COUNT elements of both together, from `first` on in fetch order; every cache line is fetched once.
    template <int64_t COUNT>
    void fetch(int64_t first) const {
        constexpr int64_t kLine = 64 / sizeof(Code);
        if (COUNT < kLine && first % kLine != 0) return;
        for (int64_t element = first; element < first + COUNT; element += kLine) {
            const int64_t line = element / kLine;
            __builtin_prefetch((line % 2 ? values : keys) + line / 2 * kLine);
        }
    }
};

// Returns the number of vectors to sum concurrently for R rows, at most `most`: a single sum would wait four cycles for
// every addition.
constexpr int together(int R, int most) {
    const int vectors = R <= 3 ? 4 : R <= 6 ? 2 : 1;
    return vectors < most ? vectors : most;
}

// Calls body(c, std::integral_constant<int, C>) for the vectors of W lanes in [0, size), C at a time, from c on. A body
// that is not inlined would reload its captures in the inner loop.
template <int W, int C, class Body>
inline __attribute__((always_inline)) void in_vectors(int64_t size, Body body) {
    int64_t c = 0;
    for (; c + C * W <= size; c += C * W) body(c, std::integral_constant<int, C>{});
    if constexpr (C > 1) {
        for (; c < size; c += W) body(c, std::integral_constant<int, 1>{});
    }
}

// Computes scores [bs / W][R][W] = q K^T; q [D][R], keys [D][bs].
template <class Pool, int W, int R>
void score(const float* q, const typename Pool::Code* keys, Ahead<typename Pool::Code> next, float* scores, int64_t bs,
           int64_t D) {
    typedef typename Vec<W>::F F;
    constexpr int kVectorsPerLine = !Pool::kScaled ? 1 : W < 8 ? 8 : 64 / W;  // D is a multiple of 8
    in_vectors<W, together(R, 16 / W)>(bs, [&](int64_t c, auto count) __attribute__((always_inline)) {
        constexpr int C = decltype(count)::value;
        F acc[C][R] = {};
        for (int64_t d = 0; d < D; d += kVectorsPerLine) {
            next.template fetch<C * W * kVectorsPerLine>(c * D + d * C * W);
            for (int i = 0; i < kVectorsPerLine; i++) {
                for (int v = 0; v < C; v++) {
                    const F k = Pool::template load<W>(keys + (d + i) * bs + c + v * W);
                    for (int r = 0; r < R; r++) acc[v][r] += k * q[(d + i) * R + r];
                }
            }
        }
        for (int v = 0; v < C; v++) {
            const int64_t at = c + v * W;
            if constexpr (Pool::kScaled) {
                const F scale = load<W>(scales<Pool>(keys, bs, D) + at) * Pool::kUnit;
                for (int r = 0; r < R; r++) acc[v][r] *= scale;
            }
            for (int r = 0; r < R; r++) store<W>(scores + at * R + r * W, acc[v][r]);
        }
    });
}

// Replaces scores by weights e^(score - peak), times the scales of the values; sets `shrink` to the factors for the
// outputs so far.
template <class Pool, int W, int R>
void weigh(float* scores, const Visible* visible, const float* value_scales, float* peak, float* lane_weight,
           float* shrink, int64_t bs) {
    typedef typename Vec<W>::F F;
    typedef typename Vec<W>::I I;
    for (int r = 0; r < R; r++) {
        F top = splat<W>(kFloor);
        const Visible see = visible[r];
        for (int64_t c = 0; c < bs; c += W) {
            F s = load<W>(scores + c * R + r * W);
            if (see.first > c || see.last < c + W - 1) {
                const I lane = iota<W>() + static_cast<int32_t>(c);
                s = (lane < see.first) | (lane > see.last) ? splat<W>(-__builtin_inff()) : s;
                store<W>(scores + c * R + r * W, s);
            }
            top = maximum<W>(s, top);
        }
        const float high = maximum<W>(top);
        shrink[r] = peak[r];
        peak[r] = high > peak[r] ? high : peak[r];
        shrink[r] -= peak[r];
    }
    for (int r = 0; r < kRows; r += 4) store<4>(shrink + r, exponential<4>(load<4>(shrink + r)));
    for (int r = 0; r < R; r++) {
        F total = load<W>(lane_weight + r * W) * shrink[r];
        for (int64_t c = 0; c < bs; c += W) {
            F p = exponential<W>(load<W>(scores + c * R + r * W) - peak[r]);
            total += p;
            if constexpr (Pool::kScaled) p *= load<W>(value_scales + c) * Pool::kUnit;
            store<W>(scores + c * R + r * W, p);
        }
        store<W>(lane_weight + r * W, total);
    }
}

// Computes out [R][D] = out * shrink + weights V over tokens [first, last]; values [bs][D], weights [bs / WS][R][WS].
template <class Pool, int W, int R>
void gather(const float* weights, const typename Pool::Code* values, Ahead<typename Pool::Code> next,
            const float* shrink, float* out, int64_t ws, Visible tokens, int64_t bs, int64_t D) {
    typedef typename Vec<W>::F F;
    in_vectors<W, together(R, 4)>(D, [&](int64_t c, auto count) __attribute__((always_inline)) {
        constexpr int C = decltype(count)::value;
        F acc[C][R];
        for (int v = 0; v < C; v++) {
            for (int r = 0; r < R; r++) acc[v][r] = load<W>(out + r * D + c + v * W) * shrink[r];
        }
        for (int64_t j = tokens.first; j <= tokens.last;) {
            const float* w = weights + j / ws * ws * R + j % ws;
            const int64_t end = smaller(tokens.last + 1, (j / ws + 1) * ws);
            for (; j < end; j++, w++) {
                next.template fetch<C * W>(bs * D + c * bs + j * C * W);
                for (int v = 0; v < C; v++) {
                    const F value = Pool::template load<W>(values + j * D + c + v * W);
                    if (ws == kLanes) {
                        for (int r = 0; r < R; r++) acc[v][r] += value * w[r * kLanes];
                    } else {
                        for (int r = 0; r < R; r++) acc[v][r] += value * w[r * ws];
                    }
                }
            }
        }
        for (int v = 0; v < C; v++) {
            for (int r = 0; r < R; r++) store<W>(out + r * D + c + v * W, acc[v][r]);
        }
    });
}

template <class Pool>
struct Tile {
    typedef const typename Pool::Code* Codes;
    typedef Ahead<typename Pool::Code> Next;
    void (*score)(const float*, Codes, Next, float*, int64_t, int64_t);
    void (*weigh)(float*, const Visible*, const float*, float*, float*, float*, int64_t);
    void (*gather)(const float*, Codes, Next, const float*, float*, int64_t, Visible, int64_t, int64_t);
};

template <class Pool, int WS, int WD, int... R>
Tile<Pool> choose(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr Tile<Pool> tiles[] = {
        {score<Pool, WS, R + 1>, weigh<Pool, WS, R + 1>, gather<Pool, WD, R + 1>}...};
    return tiles[rows - 1];
}

// The lanes used for sizes that do not fill the widest registers, such as 8 tokens per block or heads of 72 dimensions.
constexpr int kNarrow = kLanes < 8 ? kLanes : 8;
static int64_t lanes(int64_t size) { return size % kLanes == 0 ? kLanes : kNarrow; }

template <class Pool>
Tile<Pool> choose(int64_t rows, int64_t bs, int64_t D) {
    constexpr auto sizes = std::make_integer_sequence<int, kRows>{};
    const bool full = lanes(bs) == kLanes, wide = lanes(D) == kLanes;
    if (full) return wide ? choose<Pool, kLanes, kLanes>(rows, sizes) : choose<Pool, kLanes, kNarrow>(rows, sizes);
    return wide ? choose<Pool, kNarrow, kLanes>(rows, sizes) : choose<Pool, kNarrow, kNarrow>(rows, sizes);
}

}  // namespace
