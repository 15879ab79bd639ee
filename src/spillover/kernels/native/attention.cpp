// Attention over the paged KV pool, and the store that fills it. attention.py describes the layout.
//
// A row is one query head of one token. Rows that share a KV head are computed together in register tiles. Each row
// visits the blocks in position order with an online softmax; every kSplit positions a new partial softmax begins, and
// the completed one is merged into the total. Splits begin at fixed positions, and a block that is fully masked for a
// row does not change a single bit of it. So a row's result does not depend on the batch, on the chunk of the prompt or
// on the number of threads.
//
// For the same reason a sequence may be computed a range of splits at a time, with the totals kept between calls.
// Blocks that are not in the pool are then read from the stage to which they were copied.
#include <cstdlib>

#include "attention_tile.h"
#include "team.h"

namespace {

constexpr int kItemRows = 24;    // rows of a work item: the heads of a few tokens over one KV head
constexpr int64_t kSplit = 256;  // positions per split

// Blocks [first, last) of the only request, which are not in the pool: contiguous, or each at its own address.
struct Stage {
    const void* kv;
    int64_t block_stride, first, last;
    const int64_t* addresses;
    int64_t offset;  // offset in bytes of the layer within a block that has an address

    template <class Code>
    const Code* block(int64_t b) const {
        if (addresses) return reinterpret_cast<const Code*>(addresses[b - first] + offset);
        return static_cast<const Code*>(kv) + (b - first) * block_stride;
    }
};

// Splits [first, last), and the totals of the rows, item after item: initialised at split 0, and finished if `ends`.
struct Range {
    int64_t first, last;
    float* totals;
    bool ends;
};

struct Call {
    const float* q;
    int64_t q_stride;
    const void* kv;
    int64_t block_stride;
    float* out;
    const int32_t *query_start, *seq_lens, *table;
    int64_t table_stride, B, H, Hk, D, bs;
    float scale;
    int64_t window;  // 0: none
    const float* sinks;
    Stage stage;

    int64_t group() const { return H / Hk; }
    int64_t item_tokens() const { return larger(1, kItemRows / group()); }
    int64_t item_rows() const { return item_tokens() * group(); }
    int64_t split_blocks() const { return larger(1, kSplit / bs); }
    // Size of one head's keys, or values, in a block, in elements of the pool.
    template <class Pool>
    int64_t head_size() const { return bs * D + (Pool::kScaled ? bs * 4 : 0); }
    template <class Pool>
    const typename Pool::Code* keys(const int32_t* blocks, int64_t b, int64_t head) const {
        typedef typename Pool::Code Code;
        const Code* block =
            b < stage.last ? stage.block<Code>(b) : static_cast<const Code*>(kv) + blocks[b] * block_stride;
        return block + head * head_size<Pool>();
    }
};

// A few consecutive new tokens of a request against one KV head.
struct Item {
    int64_t request, head, row, tokens, position;  // row (of T) and position are those of the first token

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

// Memory that grows as needed and is kept, so that later calls do not allocate.
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

int64_t attend_floats(const Call& c) { return c.item_rows() * c.D + kRows * c.bs + c.item_rows() * kLanes; }

// Computes one item over the blocks of one split, with a new softmax.
template <class Pool>
void attend(const Call& c, const Item& item, int64_t split, float* scratch, Softmax state) {
    const int64_t G = c.group(), D = c.D, bs = c.bs, rows = item.tokens * G, ws = lanes(bs);
    const int64_t tiles = ceil_div(rows, kRows);
    float* q = scratch;  // per tile [D][rows of the tile], scaled
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
    const int64_t value_offset = c.Hk * c.head_size<Pool>();
    for (int64_t b = begin; b < end; b++) {
        const typename Pool::Code* keys = c.keys<Pool>(table, b, item.head);
        const typename Pool::Code* following = c.keys<Pool>(table, b + 1 < end ? b + 1 : b, item.head);
        Ahead<typename Pool::Code> next{following, following + value_offset};
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
            const Tile<Pool> run = choose<Pool>(R, bs, D);
            float shrink[kRows] = {};
            run.score(q + first * D, keys, next, scores, bs, D);
            run.weigh(scores, visible, scales<Pool>(keys + value_offset, bs, D), state.peak + first,
                      lane_weight + first * ws, shrink, bs);
            run.gather(scores, keys + value_offset, next, shrink, state.out + first * D, ws, any, bs, D);
            next = {keys, keys + value_offset};  // the following block has been prefetched by the first tile
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

// Returns item i; `starts` [B + 1]: first items of the requests. A request's latest tokens, with most work, come first.
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

template <class Pool>
void run(const Call& c, const Range* range) {
    auto* starts = reinterpret_cast<int64_t*>(tl_starts.take(2 * (c.B + 1)));
    int64_t longest = 0;
    starts[0] = 0;
    for (int64_t b = 0; b < c.B; b++) {
        const int64_t queries = c.query_start[b + 1] - c.query_start[b];
        starts[b + 1] = starts[b] + ceil_div(queries, c.item_tokens()) * c.Hk;
        longest = larger(longest, queries ? c.seq_lens[b] : 0);
    }
    const int64_t span = c.split_blocks() * c.bs;  // positions of a split
    const int64_t from = range ? range->first : 0;
    const int64_t to = range ? smaller(range->last, ceil_div(longest, span)) : ceil_div(longest, span);
    const int64_t items = starts[c.B], splits = larger(0, to - from), state_floats = Softmax::floats(c);
    // If there are too few items for all threads, their splits are computed concurrently into `parts`, and then merged.
    const bool shared = splits > 1 && items < 4 * team_size;
    float* parts = shared ? tl_parts.take(items * splits * state_floats) : nullptr;
    const auto memory = [&] { return tl_scratch.take(attend_floats(c) + 2 * state_floats + 64); };
    if (shared) {
        share(items * splits, [&](int64_t unit, int) {
            const Item item = find(c, starts, unit / splits);
            const int64_t split = from + unit % splits, first = split * span;
            if (first > item.newest() || first + span <= item.oldest(c)) return;
            attend<Pool>(c, item, split, memory(), Softmax::at(parts + unit * state_floats, c));
        });
    }
    share(items, [&](int64_t i, int) {
        float* scratch = memory();
        float* states = scratch + ceil_div(attend_floats(c), 16) * 16;
        const Softmax part = Softmax::at(states + state_floats, c);
        const Item item = find(c, starts, i);
        const Softmax total = Softmax::at(range ? range->totals + i * state_floats : states, c);
        if (from == 0) begin_total(c, item, total);
        const int64_t begin = larger(from, item.oldest(c) / span), end = smaller(to, item.newest() / span + 1);
        for (int64_t split = begin; split < end; split++) {
            if (shared) {
                merge(c, item, total, Softmax::at(parts + (i * splits + split - from) * state_floats, c));
            } else {
                attend<Pool>(c, item, split, scratch, part);
                merge(c, item, total, part);
            }
        }
        if (!range || range->ends) finish(c, item, total);
    });
}

enum Kind : int64_t { kFloat, kFp8, kInt8 };  // the numbers of POOL_KINDS in attention.py

void run(const Call& c, const Range* range, int64_t kind) {
    (kind == kFloat ? run<FloatPool> : kind == kFp8 ? run<Fp8Pool> : run<Int8Pool>)(c, range);
}

template <class Pool, int W>
void store_head(const float* k, const float* v, typename Pool::Code* keys, typename Pool::Code* values, int64_t lane,
                int64_t D, int64_t bs) {
    if constexpr (Pool::kScaled) {
        const float key_scale = row_scale<Pool, W>(k, D), value_scale = row_scale<Pool, W>(v, D);
        std::memcpy(keys + bs * D + 4 * lane, &key_scale, 4);
        std::memcpy(values + bs * D + 4 * lane, &value_scale, 4);
        for (int64_t d = 0; d < D; d += W) {
            uint8_t codes[W];
            encode_row<Pool, W>(k + d, key_scale, codes, W);
            for (int i = 0; i < W; i++) keys[(d + i) * bs + lane] = codes[i];
        }
        encode_row<Pool, W>(v, value_scale, values + lane * D, D);
    } else {
        for (int64_t d = 0; d < D; d++) keys[d * bs + lane] = k[d];
        for (int64_t d = 0; d < D; d++) values[lane * D + d] = v[d];
    }
}

template <class Pool>
void store_rows(const float* k, int64_t k_stride, const float* v, int64_t v_stride, void* kv, int64_t block_stride,
                const int64_t* positions, const int32_t* rows, const int32_t* table, int64_t table_stride, int64_t T,
                int64_t Hk, int64_t D, int64_t bs) {
    const int64_t head_size = bs * D + (Pool::kScaled ? bs * 4 : 0);
    const auto store = lanes(D) == kLanes ? store_head<Pool, kLanes> : store_head<Pool, kNarrow>;
    share(Hk * T, [=](int64_t i, int) {
        const int64_t h = i / T, t = i % T, block = table[rows[t] * table_stride + positions[t] / bs];
        auto* keys = static_cast<typename Pool::Code*>(kv) + block * block_stride + h * head_size;
        store(k + t * k_stride + h * D, v + t * v_stride + h * D, keys, keys + Hk * head_size, positions[t] % bs, D,
              bs);
    }, T * Hk * D > 1 << 10);
}

}  // namespace

extern "C" void attention(const float* q, int64_t q_stride, const void* kv, int64_t block_stride, float* out,
                          const int32_t* query_start, const int32_t* seq_lens, const int32_t* table,
                          int64_t table_stride, int64_t B, int64_t H, int64_t Hk, int64_t D, int64_t bs, float scale,
                          int64_t window, const float* sinks, int64_t kind) {
    const Call c{q, q_stride, kv, block_stride, out, query_start, seq_lens, table,
                 table_stride, B, H, Hk, D, bs, scale, window, sinks, {}};
    run(c, nullptr, kind);
}

// Computes splits [first_split, last_split) of one request whose blocks [stage_first, stage_last) are in the stage. The
// sums are kept in `totals`, item_rows * (D + 2) floats per item, until a call with `ends` writes them to out.
extern "C" void attention_range(const float* q, int64_t q_stride, const void* kv, int64_t block_stride, float* out,
                                const int32_t* query_start, const int32_t* seq_lens, const int32_t* table,
                                int64_t table_stride, int64_t B, int64_t H, int64_t Hk, int64_t D, int64_t bs,
                                float scale, int64_t window, const float* sinks, int64_t kind, const void* stage,
                                int64_t stage_stride, int64_t stage_first, int64_t stage_last, int64_t first_split,
                                int64_t last_split, float* totals, int64_t ends) {
    const Call c{q, q_stride, kv, block_stride, out, query_start, seq_lens, table,
                 table_stride, B, H, Hk, D, bs, scale, window, sinks,
                 {stage, stage_stride, stage_first, stage_last, nullptr, 0}};
    const Range range{first_split, last_split, totals, ends != 0};
    run(c, &range, kind);
}

// Computes one request whose first `cold` blocks are in main memory; this layer is at `offset` from a block's address.
extern "C" void attention_in_place(const float* q, int64_t q_stride, const void* kv, int64_t block_stride, float* out,
                                   const int32_t* query_start, const int32_t* seq_lens, const int32_t* table,
                                   int64_t table_stride, int64_t B, int64_t H, int64_t Hk, int64_t D, int64_t bs,
                                   float scale, int64_t window, const float* sinks, int64_t kind,
                                   const int64_t* addresses, int64_t offset, int64_t cold) {
    const Call c{q, q_stride, kv, block_stride, out, query_start, seq_lens, table,
                 table_stride, B, H, Hk, D, bs, scale, window, sinks, {nullptr, 0, 0, cold, addresses, offset}};
    run(c, nullptr, kind);
}

extern "C" int64_t attention_total_floats(int64_t T, int64_t H, int64_t Hk, int64_t D) {
    Call c{};
    c.H = H, c.Hk = Hk, c.D = D;
    return ceil_div(T, c.item_tokens()) * Hk * Softmax::floats(c);
}

// Writes k and v [T, Hk, D], whose rows are a stride apart, to their slots in the pool.
extern "C" void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, void* kv,
                         int64_t block_stride, const int64_t* positions, const int32_t* rows, const int32_t* table,
                         int64_t table_stride, int64_t T, int64_t Hk, int64_t D, int64_t bs, int64_t kind) {
    (kind == kFloat ? store_rows<FloatPool> : kind == kFp8 ? store_rows<Fp8Pool> : store_rows<Int8Pool>)(
        k, k_stride, v, v_stride, kv, block_stride, positions, rows, table, table_stride, T, Hk, D, bs);
}
