// Attention over the paged KV pool, and the store that fills it. The layout is told in attention.py.
//
// A row is one query head of one token. Rows that share a kv head are handled together in register tiles. Each row walks
// the blocks in position order with an online softmax; every kSplit positions it starts afresh and the part is merged
// into the total. Splits lie at fixed positions and a block that is wholly masked for a row changes nothing in it, not
// one bit; so a row's result depends neither on the batch, nor on the chunk it came in, nor on the number of threads.
#include <omp.h>

#include <cstdlib>

#include "vector.h"

namespace {

constexpr int kRows = 12;        // of a register tile
constexpr int kItemRows = 24;    // a work item: a few tokens' heads over one kv head
constexpr int64_t kSplit = 256;  // positions
constexpr float kFloor = -1e30f;  // below every score; finite, so that floor - floor is 0

struct Call {
    const float* q;
    int64_t q_stride;
    const float* kv;
    int64_t block_stride;
    float* out;
    const int32_t *query_start, *seq_lens, *table;
    int64_t table_stride, B, H, Hk, D, bs;
    float scale;
    int64_t window;  // 0: none
    const float* sinks;

    int64_t group() const { return H / Hk; }
    int64_t item_tokens() const { return larger(1, kItemRows / group()); }
    int64_t item_rows() const { return item_tokens() * group(); }
    int64_t split_blocks() const { return larger(1, kSplit / bs); }
    const float* keys(int64_t block, int64_t head) const { return kv + block * block_stride + head * bs * D; }
};

// Tokens [first, first + tokens) of a request against one kv head.
struct Item {
    int64_t request, head, row, tokens, position;  // row among the T, position of the first token

    int64_t oldest(const Call& c) const { return c.window ? larger(0, position - c.window + 1) : 0; }
    int64_t newest() const { return position + tokens - 1; }
};

// The state of an online softmax over rows: outputs [rows, D] not yet divided by the weights' sum.
struct Softmax {
    float *out, *peak, *weight;

    static int64_t floats(const Call& c) { return c.item_rows() * (c.D + 2); }
    static Softmax at(float* memory, const Call& c) {
        return {memory, memory + c.item_rows() * c.D, memory + c.item_rows() * (c.D + 1)};
    }
};

// Grows and is kept; a call after the first allocates nothing.
struct Scratch {
    float* memory = nullptr;
    int64_t capacity = 0;
    ~Scratch() { std::free(memory); }
    float* take(int64_t floats) {
        if (floats > capacity) {
            std::free(memory);
            capacity = ceil_div(floats, 1024) * 1024;
            memory = static_cast<float*>(std::aligned_alloc(64, capacity * sizeof(float)));
        }
        return memory;
    }
};

// What a row sees of a block: lanes [first, last].
struct Visible {
    int32_t first, last;
};

// scores [bs / W][R][W] = q K^T; q [D][R], keys [D][bs]. Fetches the next block's keys along the way.
template <int W, int R>
void score(const float* q, const float* keys, const float* next, float* scores, int64_t bs, int64_t D) {
    typedef typename Vec<W>::F F;
    for (int64_t c = 0; c < bs; c += W) {
        F acc[R] = {};
        for (int64_t d = 0; d < D; d++) {
            const F k = load<W>(keys + d * bs + c);
            __builtin_prefetch(next + c * D + d * W);
            for (int r = 0; r < R; r++) acc[r] += k * q[d * R + r];
        }
        for (int r = 0; r < R; r++) store<W>(scores + c * R + r * W, acc[r]);
    }
}

// Turns scores into weights e^(score - peak); leaves in `shrink` what the former outputs are to be multiplied by.
template <int W, int R>
void weigh(float* scores, const Visible* visible, float* peak, float* lane_weight, float* shrink, int64_t bs) {
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
            const F p = exponential<W>(load<W>(scores + c * R + r * W) - peak[r]);
            store<W>(scores + c * R + r * W, p);
            total += p;
        }
        store<W>(lane_weight + r * W, total);
    }
}

// out [R][D] = out * shrink + weights V over tokens [first, last]; values [bs][D], weights [bs / WS][R][WS].
template <int W, int R>
void gather(const float* weights, const float* values, const float* next, const float* shrink, float* out, int64_t ws,
            Visible tokens, int64_t D) {
    typedef typename Vec<W>::F F;
    for (int64_t c = 0; c < D; c += W) {
        F acc[R];
        for (int r = 0; r < R; r++) acc[r] = load<W>(out + r * D + c) * shrink[r];
        for (int64_t j = tokens.first; j <= tokens.last;) {
            const float* w = weights + j / ws * ws * R + j % ws;
            const int64_t end = smaller(tokens.last + 1, (j / ws + 1) * ws);
            for (; j < end; j++, w++) {
                const F v = load<W>(values + j * D + c);
                __builtin_prefetch(next + j * D + c);
                if (ws == kLanes) {
                    for (int r = 0; r < R; r++) acc[r] += v * w[r * kLanes];
                } else {
                    for (int r = 0; r < R; r++) acc[r] += v * w[r * ws];
                }
            }
        }
        for (int r = 0; r < R; r++) store<W>(out + r * D + c, acc[r]);
    }
}

struct Tile {
    void (*score)(const float*, const float*, const float*, float*, int64_t, int64_t);
    void (*weigh)(float*, const Visible*, float*, float*, float*, int64_t);
    void (*gather)(const float*, const float*, const float*, const float*, float*, int64_t, Visible, int64_t);
};

template <int WS, int WD, int... R>
Tile choose(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr Tile tiles[] = {{score<WS, R + 1>, weigh<WS, R + 1>, gather<WD, R + 1>}...};
    return tiles[rows - 1];
}

// A block of 8 tokens, or a head of 72 dimensions, does not fill the widest registers.
constexpr int kNarrow = kLanes < 8 ? kLanes : 8;
static int64_t lanes(int64_t size) { return size % kLanes == 0 ? kLanes : kNarrow; }

Tile choose(int64_t rows, const Call& c) {
    constexpr auto sizes = std::make_integer_sequence<int, kRows>{};
    const bool full = lanes(c.bs) == kLanes, wide = lanes(c.D) == kLanes;
    if (full) return wide ? choose<kLanes, kLanes>(rows, sizes) : choose<kLanes, kNarrow>(rows, sizes);
    return wide ? choose<kNarrow, kLanes>(rows, sizes) : choose<kNarrow, kNarrow>(rows, sizes);
}

int64_t attend_floats(const Call& c) { return c.item_rows() * c.D + kRows * c.bs + c.item_rows() * kLanes; }

// One item over the blocks of one split, from nothing.
void attend(const Call& c, const Item& item, int64_t split, float* scratch, Softmax state) {
    const int64_t G = c.group(), D = c.D, bs = c.bs, rows = item.tokens * G, ws = lanes(bs);
    const int64_t tiles = ceil_div(rows, kRows);
    float* q = scratch;  // by tile, [D][rows of the tile], scaled
    float* scores = q + c.item_rows() * D;
    float* lane_weight = scores + kRows * bs;
    int64_t tile_start[kItemRows + 2] = {};
    for (int64_t t = 0; t < tiles; t++) tile_start[t + 1] = tile_start[t] + rows / tiles + (t < rows % tiles);
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = tile_start[t], R = tile_start[t + 1] - first;
        for (int64_t r = 0; r < R; r++) {
            const int64_t row = first + r;
            const float* from = c.q + (item.row + row / G) * c.q_stride + (item.head * G + row % G) * D;
            for (int64_t d = 0; d < D; d++) q[first * D + d * R + r] = from[d] * c.scale;
        }
    }
    for (int64_t i = 0; i < rows * D; i++) state.out[i] = 0.0f;
    for (int64_t i = 0; i < rows * ws; i++) lane_weight[i] = 0.0f;
    for (int64_t i = 0; i < rows; i++) state.peak[i] = kFloor;

    const int32_t* table = c.table + item.request * c.table_stride;
    const int64_t begin = larger(split * c.split_blocks(), item.oldest(c) / bs);
    const int64_t end = smaller((split + 1) * c.split_blocks(), item.newest() / bs + 1);
    const int64_t value_offset = c.Hk * bs * D;
    for (int64_t b = begin; b < end; b++) {
        const float* keys = c.keys(table[b], item.head);
        const float* next = c.keys(table[b + 1 < end ? b + 1 : b], item.head);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = tile_start[t], R = tile_start[t + 1] - first;
            Visible visible[kRows], any{static_cast<int32_t>(bs), -1};
            for (int64_t r = 0; r < R; r++) {
                const int64_t at = item.position + (first + r) / G - b * bs;  // the row's own lane, if in this block
                visible[r].last = static_cast<int32_t>(smaller(at, bs - 1));
                visible[r].first = static_cast<int32_t>(c.window ? larger(0, at - c.window + 1) : 0);
                if (visible[r].first > visible[r].last) continue;
                any.first = visible[r].first < any.first ? visible[r].first : any.first;
                any.last = visible[r].last > any.last ? visible[r].last : any.last;
            }
            if (any.first > any.last) continue;
            const Tile run = choose(R, c);
            float shrink[kRows] = {};
            run.score(q + first * D, keys, next, scores, bs, D);
            run.weigh(scores, visible, state.peak + first, lane_weight + first * ws, shrink, bs);
            run.gather(scores, keys + value_offset, next + value_offset, shrink, state.out + first * D, ws, any, D);
            next = keys;  // fetched already
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float* w = lane_weight + r * ws;
        state.weight[r] = ws == kLanes ? sum<kLanes>(load<kLanes>(w)) : sum<kNarrow>(load<kNarrow>(w));
    }
}

void begin_total(const Call& c, const Item& item, Softmax total) {
    const int64_t G = c.group(), rows = item.tokens * G;
    for (int64_t i = 0; i < rows * c.D; i++) total.out[i] = 0.0f;
    for (int64_t r = 0; r < rows; r++) {
        total.peak[r] = c.sinks ? c.sinks[item.head * G + r % G] : kFloor;
        total.weight[r] = c.sinks ? 1.0f : 0.0f;
    }
}

void merge(const Call& c, const Item& item, Softmax total, Softmax part) {
    typedef Vec<4>::F F;
    for (int64_t r = 0; r < item.tokens * c.group(); r++) {
        const float peak = part.peak[r] > total.peak[r] ? part.peak[r] : total.peak[r];
        const F factor = exponential<4>(F{total.peak[r] - peak, part.peak[r] - peak, 0.0f, 0.0f});
        const float a = factor[0], b = factor[1];
        total.peak[r] = peak;
        total.weight[r] = total.weight[r] * a + part.weight[r] * b;
        float *to = total.out + r * c.D, *from = part.out + r * c.D;
        for (int64_t d = 0; d < c.D; d++) to[d] = to[d] * a + from[d] * b;
    }
}

void finish(const Call& c, const Item& item, Softmax total) {
    const int64_t G = c.group();
    for (int64_t r = 0; r < item.tokens * G; r++) {
        float* to = c.out + ((item.row + r / G) * c.H + item.head * G + r % G) * c.D;
        const float factor = 1.0f / total.weight[r];
        for (int64_t d = 0; d < c.D; d++) to[d] = total.out[r * c.D + d] * factor;
    }
}

// Item i of those counted by `starts` [B + 1]; a request's latest tokens, the longest work, come first.
Item find(const Call& c, const int64_t* starts, int64_t i) {
    int64_t low = 0, high = c.B - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (starts[middle] <= i) low = middle;
        else high = middle - 1;
    }
    const int64_t tiles = (starts[low + 1] - starts[low]) / c.Hk, inner = i - starts[low];
    const int64_t tile = tiles - 1 - inner / c.Hk, queries = c.query_start[low + 1] - c.query_start[low];
    const int64_t first = tile * c.item_tokens();
    return {low, inner % c.Hk, c.query_start[low] + first, smaller(c.item_tokens(), queries - first),
            c.seq_lens[low] - queries + first};
}

thread_local Scratch tl_scratch, tl_parts, tl_starts;

}  // namespace

extern "C" void attention(const float* q, int64_t q_stride, const float* kv, int64_t block_stride, float* out,
                          const int32_t* query_start, const int32_t* seq_lens, const int32_t* table,
                          int64_t table_stride, int64_t B, int64_t H, int64_t Hk, int64_t D, int64_t bs, float scale,
                          int64_t window, const float* sinks) {
    const Call c{q,  q_stride, kv, block_stride, out, query_start, seq_lens, table, table_stride,
                 B,  H,        Hk, D,            bs,  scale,       window,   sinks};
    auto* starts = reinterpret_cast<int64_t*>(tl_starts.take(2 * (B + 1)));
    int64_t longest = 0;
    starts[0] = 0;
    for (int64_t b = 0; b < B; b++) {
        const int64_t queries = query_start[b + 1] - query_start[b];
        starts[b + 1] = starts[b] + ceil_div(queries, c.item_tokens()) * Hk;
        longest = larger(longest, queries ? seq_lens[b] : 0);
    }
    const int64_t items = starts[B], splits = ceil_div(ceil_div(longest, bs), c.split_blocks());
    const int64_t state_floats = Softmax::floats(c);
    // Too few items to go round: the splits of one are shared out, kept in `parts` and merged afterwards.
    const bool share = splits > 1 && items < 4 * omp_get_max_threads();
    float* parts = share ? tl_parts.take(items * splits * state_floats) : nullptr;

#pragma omp parallel if (items > 1 || share)
    {
        float* scratch = tl_scratch.take(attend_floats(c) + 2 * state_floats + 64);
        float* states = scratch + ceil_div(attend_floats(c), 16) * 16;
        const Softmax total = Softmax::at(states, c), part = Softmax::at(states + state_floats, c);
        if (share) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t unit = 0; unit < items * splits; unit++) {
                const Item item = find(c, starts, unit / splits);
                const int64_t split = unit % splits, first = split * c.split_blocks() * bs;
                if (first > item.newest() || first + c.split_blocks() * bs <= item.oldest(c)) continue;
                attend(c, item, split, scratch, Softmax::at(parts + unit * state_floats, c));
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items; i++) {
            const Item item = find(c, starts, i);
            const int64_t span = c.split_blocks() * bs;
            begin_total(c, item, total);
            for (int64_t split = item.oldest(c) / span; split <= item.newest() / span; split++) {
                if (share) {
                    merge(c, item, total, Softmax::at(parts + (i * splits + split) * state_floats, c));
                } else {
                    attend(c, item, split, scratch, part);
                    merge(c, item, total, part);
                }
            }
            finish(c, item, total);
        }
    }
}

// k and v [T, Hk, D], rows a stride apart, to their places in the pool.
extern "C" void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* kv,
                         int64_t block_stride, const int64_t* positions, const int32_t* rows, const int32_t* table,
                         int64_t table_stride, int64_t T, int64_t Hk, int64_t D, int64_t bs) {
#pragma omp parallel for collapse(2) if (T * Hk * D > 1 << 11)
    for (int64_t h = 0; h < Hk; h++) {
        for (int64_t t = 0; t < T; t++) {
            const int64_t block = table[rows[t] * table_stride + positions[t] / bs], lane = positions[t] % bs;
            float* keys = kv + block * block_stride + h * bs * D + lane;
            float* values = kv + block * block_stride + (Hk + h) * bs * D + lane * D;
            const float *from_k = k + t * k_stride + h * D, *from_v = v + t * v_stride + h * D;
            for (int64_t d = 0; d < D; d++) keys[d * bs] = from_k[d];
            for (int64_t d = 0; d < D; d++) values[d] = from_v[d];
        }
    }
}
