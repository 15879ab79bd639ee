// y = x W^T + b over packed panels W [ceil(N/P)][K][P]: lanes are output channels, x is broadcast.
//
// Every y[m, n] is one chain of fused multiply-adds over k = 0..K-1 in every tile, so its bits do not depend on M. With
// few rows the weights stream from memory once, at memory bandwidth: while a tile computes on a panel, it prefetches a
// share of the next panel, from several positions at once. A core has few buffers for lines that software prefetches,
// but its hardware prefetcher has more of them and runs ahead of every sequence that it detects, up to the end of a
// page. With a single sequence it cannot run far enough ahead.
#include <vector>

#include "codes.h"
#include "products.h"
#include "team.h"
#include "vector.h"

namespace {

typedef Vec<kLanes>::F F;
#if defined(__AVX512F__)
constexpr int kPanel = 32, kTile = 12;  // accumulators: 12 rows x 2 registers of the 32
#elif defined(__AVX__)
constexpr int kPanel = 16, kTile = 6;  // 6 x 2 of 16
#else
constexpr int kPanel = 16, kTile = 6;  // 6 x 4 of 32
#endif
constexpr int kVectors = kPanel / kLanes;
constexpr int kLine = 16;  // floats in a cache line
constexpr int kLinesPerK = kPanel / kLine;
constexpr int kStreams = 4;  // sequences in which a panel is prefetched; with one, 16 rows take 1.3 times as long
constexpr int64_t kRowBlockBytes = 1 << 19;  // maximum bytes of x that stay in L2 cache while panels pass

struct Shape {
    int64_t K, N;
};

// Stores a row of sums, `width` of them, with the bias added.
inline void store_row(F (&sums)[kVectors], float* row, int64_t width, const float* bias) {
    if (width == kPanel) {
        for (int v = 0; v < kVectors; v++) {
            if (bias) sums[v] += load<kLanes>(bias + v * kLanes);
            store<kLanes>(row + v * kLanes, sums[v]);
        }
    } else {
        for (int64_t n = 0; n < width; n++) row[n] = sums[n / kLanes][n % kLanes] + (bias ? bias[n] : 0.0f);
    }
}

// ASK: number of cache lines to prefetch, from `next` on, while k advances by kStreams: one, or the same number in each
// stream. `apart`: floats from one stream to the next.
template <int T, int ASK>
void tile(const float* x, const float* panel, float* y, int64_t width, const float* bias, const float* next,
          int64_t apart, Shape s) {
    F acc[T][kVectors] = {};
    // Three rows share a base register: x86 addresses base, base + stride and base + 2 * stride.
    constexpr int kBases = (T + 2) / 3;
    const float* base[kBases];
    for (int b = 0; b < kBases; b++) base[b] = x + 3 * b * s.K;
    const auto step = [&] {
        F w[kVectors];
        for (int v = 0; v < kVectors; v++) w[v] = load<kLanes>(panel + v * kLanes);
        panel += kPanel;
        for (int t = 0; t < T; t++) {
            const float value = base[t / 3][(t % 3) * s.K];
            for (int v = 0; v < kVectors; v++) acc[t][v] += w[v] * value;
        }
        for (int b = 0; b < kBases; b++) base[b]++;
    };
    int64_t k = 0;
    if constexpr (ASK > 0) {
        constexpr int kLines = ceil_div(ASK, kStreams);  // cache lines per stream
        for (; k + kStreams <= s.K; k += kStreams) {
#pragma GCC unroll 8
            for (int i = 0; i < kStreams; i++) {
                if (i < ASK) {
                    for (int a = 0; a < kLines; a++) __builtin_prefetch(next + i * apart + a * kLine, 0, 2);
                }
                step();
            }
            next += kLines * kLine;
        }
    }
    for (; k < s.K; k++) step();
    for (int t = 0; t < T; t++) store_row(acc[t], y + t * s.N, width, bias);
}

typedef void (*Tile)(const float*, const float*, float*, int64_t, const float*, const float*, int64_t, Shape);

template <int ASK, int... T>
constexpr Tile choose(int rows, std::integer_sequence<int, T...>) {
    constexpr Tile tiles[] = {tile<T + 1, ASK>...};
    return tiles[rows - 1];
}

template <int ASK>
constexpr Tile choose(int64_t rows) {
    return choose<ASK>(static_cast<int>(rows), std::make_integer_sequence<int, kTile>{});
}

// Multiplies rows [0, M) with one panel, in tiles of nearly equal height. With more tiles the next panel is prefetched
// more slowly, since loads that wait for memory take buffers from loads of L2 cache.
void panel_product(const float* x, int64_t M, const float* panel, float* y, int64_t width, const float* bias,
                   const float* next, Shape s) {
    const int64_t tiles = ceil_div(M, kTile), share = s.K / kStreams * kLine;  // floats of a stream with one line per k
    int64_t row = 0;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t rows = M / tiles + (i < M % tiles);
        Tile run;
        if (tiles == 1) {
            run = choose<kLinesPerK * kStreams>(rows);
        } else if (tiles < kLinesPerK * kStreams && i < kLinesPerK) {
            run = choose<kStreams>(rows);
        } else if (tiles >= kLinesPerK * kStreams && i < kLinesPerK * kStreams) {
            run = choose<1>(rows);
        } else {
            run = choose<0>(rows);
        }
        run(x + row * s.K, panel, y + row * s.N, width, bias, next, kLinesPerK * share, s);
        next += share;
        row += rows;
    }
}

// Weights in float32: panels [K][kPanel].
struct Floats {
    static const void* panel(const void* w, int64_t index, Shape s) {
        return static_cast<const float*>(w) + index * kPanel * s.K;
    }
    static void product(const float* x, int64_t M, const void* panel, float* y, int64_t width, const float* bias,
                        const void* next, Shape s) {
        panel_product(x, M, static_cast<const float*>(panel), y, width, bias, static_cast<const float*>(next), s);
    }
};

// Weights in FP8: panels of float32 scales [blocks of kScaled rows of K][kPanel], and of codes [K][kPanel]. They are
// widened to the floats scale * code, so the bits of a product are those of its dequantised weights.
struct Fp8 {
    static constexpr int64_t kScaled = 128, kAhead = 2048;  // kAhead: bytes by which codes are prefetched

    static const void* panel(const void* w, int64_t index, Shape s) {
        return static_cast<const uint8_t*>(w) + index * kPanel * (ceil_div(s.K, kScaled) * 4 + s.K);
    }
    template <int T>
    static void tile(const float* x, const void* panel, float* y, int64_t width, const float* bias, Shape s) {
        F acc[T][kVectors] = {};
        const float* scales = static_cast<const float*>(panel);
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(scales + ceil_div(s.K, kScaled) * kPanel);
        for (int64_t begin = 0; begin < s.K; begin += kScaled, scales += kPanel) {
            F by[kVectors];
            for (int v = 0; v < kVectors; v++) by[v] = load<kLanes>(scales + v * kLanes) * Fp8Pool::kUnit;
            const int64_t end = smaller(s.K, begin + kScaled);
            for (int64_t k = begin; k < end; k++, codes += kPanel) {
                F w[kVectors];
                __builtin_prefetch(codes + kAhead);
                for (int v = 0; v < kVectors; v++) w[v] = Fp8Pool::load<kLanes>(codes + v * kLanes) * by[v];
                for (int t = 0; t < T; t++) {
                    const float value = x[t * s.K + k];
                    for (int v = 0; v < kVectors; v++) acc[t][v] += w[v] * value;
                }
            }
        }
        for (int t = 0; t < T; t++) store_row(acc[t], y + t * s.N, width, bias);
    }
    template <int... T>
    static auto choose(int64_t rows, std::integer_sequence<int, T...>) {
        typedef void (*Tile)(const float*, const void*, float*, int64_t, const float*, Shape);
        static constexpr Tile tiles[] = {tile<T + 1>...};
        return tiles[rows - 1];
    }
    // Widens a panel of codes to floats, which a tile of rows would do anew.
    static const float* widened(const void* panel, Shape s) {
        static thread_local std::vector<float> memory;
        memory.resize(s.K * kPanel + kLine);
        float* floats = memory.data() + (-(reinterpret_cast<intptr_t>(memory.data()) / 4) & (kLine - 1));
        const float* scales = static_cast<const float*>(panel);
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(scales + ceil_div(s.K, kScaled) * kPanel);
        for (int64_t k = 0; k < s.K; k++, codes += kPanel) {
            __builtin_prefetch(codes + kAhead);
            for (int v = 0; v < kVectors; v++) {
                const F by = load<kLanes>(scales + k / kScaled * kPanel + v * kLanes) * Fp8Pool::kUnit;
                store<kLanes>(floats + k * kPanel + v * kLanes, Fp8Pool::load<kLanes>(codes + v * kLanes) * by);
            }
        }
        return floats;
    }
    static void product(const float* x, int64_t M, const void* panel, float* y, int64_t width, const float* bias,
                        const void*, Shape s) {
        const int64_t tiles = ceil_div(M, kTile);
        if (tiles > 2) {
            const float* floats = widened(panel, s);
            return panel_product(x, M, floats, y, width, bias, floats, s);
        }
        for (int64_t i = 0, row = 0; i < tiles; i++) {
            const int64_t rows = M / tiles + (i < M % tiles);
            choose(rows, std::make_integer_sequence<int, kTile>{})(x + row * s.K, panel, y + row * s.N, width, bias, s);
            row += rows;
        }
    }
};

template <class Form>
void products(const Product* list, int64_t count, int64_t N, int64_t K) {
    struct Block {  // rows of a product
        const Product* product;
        int64_t first, rows;
    };
    static thread_local std::vector<Block> memory;
    const Shape s{K, N};
    const int64_t num_panels = ceil_div(N, kPanel), threads = team_size;
    memory.clear();
    for (const Product* p = list; p < list + count; p++) {
        if (p->M == 0) continue;
        // Split the rows if x exceeds its share of the cache, and further while there are too few panels for all
        // threads.
        int64_t blocks = ceil_div(p->M * K * 4, kRowBlockBytes);
        while (num_panels * blocks * count < 4 * threads && p->M / (blocks * 2) >= 2 * kTile) blocks *= 2;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = p->M * block / blocks;
            memory.push_back({p, first, p->M * (block + 1) / blocks - first});
        }
    }
    const Block* blocks = memory.data();
    const int64_t units = static_cast<int64_t>(memory.size()) * num_panels;
    const auto panel = [&](int64_t unit) {
        return Form::panel(blocks[unit / num_panels].product->w, unit % num_panels, s);
    };
    share(units, [&](int64_t unit, int thread) {
        const Block& block = blocks[unit / num_panels];
        const Product& p = *block.product;
        const int64_t n = unit % num_panels * kPanel;
        // Prefetch the next unit of this thread's range, if any: prefetching another thread's would waste bandwidth.
        const bool last = unit + 1 == units || unit + 1 == range_begin(units, thread + 1, threads);
        Form::product(p.x + block.first * K, block.rows, panel(unit), p.y + block.first * N + n, smaller(kPanel, N - n),
                      p.bias ? p.bias + n : nullptr, panel(last ? unit : unit + 1), s);
    });
}

}  // namespace

extern "C" int64_t panel_width() { return kPanel; }

void linear_products(const Product* list, int64_t count, int64_t N, int64_t K) { products<Floats>(list, count, N, K); }
void fp8_products(const Product* list, int64_t count, int64_t N, int64_t K) { products<Fp8>(list, count, N, K); }

extern "C" void fp8_linear(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N,
                           int64_t K) {
    const Product product{x, panels, bias, y, M};
    fp8_products(&product, 1, N, K);
}

extern "C" void linear(const float* x, const float* panels, const float* bias, float* y, int64_t M, int64_t N,
                       int64_t K) {
    const Product product{x, panels, bias, y, M};
    linear_products(&product, 1, N, K);
}

extern "C" void embedding(const int64_t* ids, const float* panels, float* y, int64_t T, int64_t K) {
    share(T, [=](int64_t t, int) {
        const float* column = panels + ids[t] / kPanel * kPanel * K + ids[t] % kPanel;
        for (int64_t k = 0; k < K; k++) y[t * K + k] = column[k * kPanel];
    }, T > 8);
}
