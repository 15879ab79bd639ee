// Attention of one new token per sequence over 16-bit keys and values, for a step of few requests, including the
// operations before it: norms of heads, the rotation and the store into the pool. The bits are those of
// triton/rope_store.py and triton/attention/ordered_decode.py.
//
// DIM, GROUP, BLOCK, BFLOAT16: as in attention_codes.cuh. A program computes an item for one KV head. There are too few
// programs to hide each other's latency, so each starts to copy keys and values while the kernel that computes q, k and
// v still runs. That is safe: after the first kernel, which waits for all earlier ones, no kernel of a step writes the
// keys of earlier tokens, the items or the block tables. Keys and values are copied in rounds of two tiles, 16 tokens
// per warp; a warp multiplies its own keys, then 16 dimensions of all values. Keys and values are the left operands of
// mma, queries and weights the right ones. If the rows of queries are no multiple of eight, the new key is the row
// after them, normalised and rotated with them; otherwise the warp with the new token's position processes it.
#include "instructions.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROUND = 16 * WARPS;
constexpr float RAISED = 1.0f;
#include "attention_softmax.cuh"

constexpr bool ROOM = GROUP % 8;                // whether the new key fits after the queries
constexpr int NT = (GROUP + 7) / 8;             // number of sets of eight rows
constexpr int WORDS = DIM / 8;                  // words of a row per lane: the n-th has 2 of dimensions 8 n to 8 n + 7
constexpr int CHUNKS = DIM / 8;                 // chunks of 16 bytes per token
constexpr int MT = DIM <= 128 ? 1 : DIM / 128;  // tiles of 16 dimensions per warp
constexpr int STAGES = DIM <= 128 ? 2 : 1;      // rounds in flight: one is slower, at any length
constexpr int WEIGHT_ROW = ROUND + 8;           // elements per row, with padding so that eight rows use different banks

// Kernel arguments; must match kernels/cuda/attention_few.py.
struct Product {
    const u16* qkv; const u16* q_norm; const u16* k_norm;  // norms may be null
    const float* cos; const float* sin;
    u16* kv; u16* out;
    float* sums; float* stats; int* finished;  // DecodeScratch
    const int* items; const int* num_items; const int* table;
    const void* sinks;                         // may be null
    i64 row_stride, table_stride, block_stride, kv_stride, head_stride;
    float scale, eps;
    int kv_heads, window_piece, sinks_float;
};

struct Shared {
    alignas(128) u8 keys[STAGES][ROUND * DIM * 2];
    alignas(128) u8 values[STAGES][ROUND * DIM * 2];
    alignas(16) u16 weights[8 * NT][WEIGHT_ROW];
    alignas(16) float top[8 * NT][WARPS];
    alignas(16) u32 total[8 * NT][WARPS];
    bool last;
};
// Returns the offset of a token's chunk in a round, in bytes; the same chunk of eight tokens is in different banks.
DEV int place(int token, int chunk) { return token * (2 * DIM) + ((chunk ^ (token & 7)) << 4); }
DEV u16 narrow(float v) { return (u16)pack(v, 0.0f); }
DEV float add(float a, float b) { return __fadd_rn(a, b); }

// Adds words of this lane and of the lane `FAR` away, which keep KEPT sums each of twice as many words.
template <int KEPT, int FAR> DEV void exchange(float (&v)[WORDS]) {
    bool upper = threadIdx.x & FAR;
#pragma unroll
    for (int w = 0; w < KEPT; w++) {
        float mine = v[w], other = v[w + KEPT];
        v[w] = add(upper ? other : mine, __shfl_xor_sync(~0u, upper ? mine : other, FAR));
    }
}
template <int COUNT> DEV float sum(const float* v) {
    if constexpr (COUNT == 1) return v[0];
    else return add(sum<COUNT / 2>(v), sum<COUNT / 2>(v + COUNT / 2));
}
// Returns the sum of squares of a row that four lanes share, neighbours first, in the order of triton/norm.py.
DEV float sum_of_squares(const u32 (&row)[WORDS]) {
    float v[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        float low = low_of(row[w]), high = high_of(row[w]);
        v[w] = add(multiply(low, low), multiply(high, high));
    }
    exchange<WORDS / 2, 1>(v);
    exchange<WORDS / 4, 2>(v);
    float mine = sum<WORDS / 4>(v), both = add(mine, __shfl_xor_sync(~0u, mine, 2));
    return add(both, __shfl_xor_sync(~0u, both, 1));
}
DEV void norm_row(u32 (&row)[WORDS], const u32 (&norm)[WORDS], float eps) {
    float factor = inverse_root(add(multiply(sum_of_squares(row), 1.0f / DIM), eps));
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        u32 scaled = pack(multiply(low_of(row[w]), factor), multiply(high_of(row[w]), factor));
        row[w] = pack(multiply(low_of(scaled), low_of(norm[w])), multiply(high_of(scaled), high_of(norm[w])));
    }
}
DEV float turned(float mine, float cos, float other, float sin) { return multiply_add(mine, cos, multiply(other, sin)); }
DEV void turn_row(u32 (&row)[WORDS], const float2 (&cos)[WORDS / 2], const float2 (&sin)[WORDS / 2]) {
#pragma unroll
    for (int w = 0; w < WORDS / 2; w++) {
        u32 low = row[w], high = row[w + WORDS / 2];
        float2 c = cos[w], s = sin[w];
        row[w] = pack(turned(low_of(low), c.x, low_of(high), -s.x), turned(high_of(low), c.y, high_of(high), -s.y));
        row[w + WORDS / 2] = pack(turned(low_of(high), c.x, low_of(low), s.x), turned(high_of(high), c.y, high_of(low), s.y));
    }
}
DEV float largest(const float* of) { return fmaxf(fmaxf(of[0], of[1]), fmaxf(of[2], of[3])); }

extern "C" __global__ __launch_bounds__(THREADS, 1) void attention_few(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(room);
    Shared& shared = *(Shared*)room;
    launch_dependents();
    int index = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads, heads = p.kv_heads * GROUP;
    const int* item = p.items + index * FIELDS;
    int row = item[0], slot = item[1], begin = item[2], end = item[3], oldest = max(item[4], 0), parts = item[5],
        part = item[6], first = item[7], position = item[9] - 1;  // position: of the new token
    if (index >= *p.num_items) {
        if (blockIdx.x == 0) wait_before();  // this kernel must not complete before the previous one
        return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    const int* table = p.table + slot * p.table_stride;
    u16* slab = p.kv + kv_head * p.head_stride;
    u32 keys = shared_address(shared.keys[0]), values = shared_address(shared.values[0]);
    auto block_at = [&](int n) { return slab + (u32)table[min(max(n / BLOCK, oldest / BLOCK), (end - 1) / BLOCK)] * p.block_stride; };
    // Starts the copies of this warp's tokens of a round, except for the new token.
    auto send = [&](int round, const u16* block) {
        int start = begin + round * ROUND + 16 * warp;
        const u16* from = block + (start % BLOCK * DIM + lane * 8);
        u32 at = round % STAGES * (ROUND * DIM * 2);
        if (start < end)
#pragma unroll
            for (int j = 0; j < CHUNKS / 2; j++) {
                int token = (j * 32 + lane) / CHUNKS;
                if (start + token != position) copy_async(keys + at + place(16 * warp + token, lane % CHUNKS), from + j * 256);
            }
        copies_commit();
        if (start / TILE * TILE < end)
#pragma unroll
            for (int j = 0; j < CHUNKS / 2; j++) {
                int token = (j * 32 + lane) / CHUNKS, n = start + token;
                if (n != position)
                    copy_async_or_zeros(values + at + place(16 * warp + token, lane % CHUNKS), from + p.kv_stride + j * 256,
                                        n >= oldest && n < end);
            }
        copies_commit();
    };
    const u16* blocks[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) blocks[i] = block_at(begin + i * ROUND + 16 * warp);
#pragma unroll
    for (int i = 0; i < STAGES; i++) send(i, blocks[i]);
    bool owner = end > position && (position - begin) % ROUND / 16 == warp;
    u16* home = block_at(position) + position % BLOCK * DIM;
    float2 cos[WORDS / 2], sin[WORDS / 2];
#pragma unroll
    for (int w = 0; w < WORDS / 2; w++) {
        i64 at = (i64)position * (DIM / 2) + 8 * w + 2 * t;
        cos[w] = *(const float2*)(p.cos + at), sin[w] = *(const float2*)(p.sin + at);
    }
    u32 norms[NT][WORDS], key_norm[WORDS], q[NT][WORDS], key[WORDS];
    if (p.q_norm)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                norms[n][w] = *(const u32*)((8 * n + g < GROUP ? p.q_norm : p.k_norm) + 8 * w + 2 * t);
    if (!ROOM && p.q_norm && owner)
#pragma unroll
        for (int w = 0; w < WORDS; w++) key_norm[w] = *(const u32*)(p.k_norm + 8 * w + 2 * t);
    wait_before();

    const u16* mine = p.qkv + row * p.row_stride;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const u16* from = mine + (8 * n + g < GROUP ? kv_head * GROUP + 8 * n + g : heads + kv_head) * DIM + 2 * t;
#pragma unroll
        for (int w = 0; w < WORDS; w++) q[n][w] = *(const u32*)(from + 8 * w);
    }
    if (!ROOM && owner)
#pragma unroll
        for (int w = 0; w < WORDS; w++) key[w] = *(const u32*)(mine + (heads + kv_head) * DIM + 8 * w + 2 * t);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (owner && lane < CHUNKS) value = *(const uint4*)(mine + (heads + p.kv_heads + kv_head) * DIM + 8 * lane);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (p.q_norm) norm_row(q[n], norms[n], p.eps);
        turn_row(q[n], cos, sin);
    }
    if (!ROOM && owner) {
        if (p.q_norm) norm_row(key, key_norm, p.eps);
        turn_row(key, cos, sin);
    }

    // Sums over all completed pieces, and over the piece being read, for queries 2 t and 2 t + 1 of each eight.
    Row whole[NT][2], piece[NT][2];
    float acc[MT][NT][4] = {}, piece_acc[MT][NT][4] = {};
#pragma unroll
    for (int n = 0; n < NT; n++) whole[n][0] = whole[n][1] = piece[n][0] = piece[n][1] = {NOTHING, 0};
    float factor = multiply(p.scale, LOG2E);
    for (int round = 0, start = begin; start < end; round++, start += ROUND) {
        u32 at = round % STAGES * (ROUND * DIM * 2);
        copies_wait<2 * STAGES - 1>();  // this round's keys have been copied
        __syncwarp();
        if (owner && start + ROUND > position) {
            int token = position - start;
            if (g == GROUP % 8)
#pragma unroll
                for (int w = 0; w < WORDS; w++) {
                    u32 of = ROOM ? q[NT - 1][w] : key[w];
                    *(u32*)(shared.keys[0] + at + place(token, w) + 4 * t) = of;
                    *(u32*)(home + 8 * w + 2 * t) = of;
                }
            if (lane < CHUNKS) {
                *(uint4*)(shared.values[0] + at + place(token, lane)) = value;
                *(uint4*)(home + p.kv_stride + 8 * lane) = value;
            }
            __syncwarp();
        }
        float scores[NT][4] = {};
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            uint4 a = load_matrices(keys + at + place(16 * warp + (lane & 15), 2 * i + lane / 16));
#pragma unroll
            for (int n = 0; n < NT; n++) mma<BFLOAT16>(scores[n], a.x, a.y, a.z, a.w, q[n][2 * i], q[n][2 * i + 1]);
        }
        int token = start + 16 * warp + g;
        bool low = token >= oldest && token < end, high = token + 8 >= oldest && token + 8 < end;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                scores[n][j] = low ? scores[n][j] : NOTHING, scores[n][2 + j] = high ? scores[n][2 + j] : NOTHING;
                float top = fmaxf(scores[n][j], scores[n][2 + j]);
#pragma unroll
                for (int far = 4; far < 32; far *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, far));
                if (g == 0) shared.top[8 * n + 2 * t + j][warp] = top;
            }
        copies_wait<2 * STAGES - 2>();  // this round's values have been copied
        __syncthreads();

        bool begins[2] = {piece_begins(start, p.window_piece), piece_begins(start + TILE, p.window_piece)};
        float highest[2][NT][2], shrink[2][NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int r = 8 * n + 2 * t + j;
                float before = piece[n][j].highest, base[2];
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    float top = multiply(largest(shared.top[r] + 4 * tile), factor);
                    highest[tile][n][j] = begins[tile] ? top : fmaxf(before, top);
                    base[tile] = base_of(highest[tile][n][j]);
                    shrink[tile][n][j] = begins[tile] ? 0.0f : power_of_two(before - base[tile]);
                    before = highest[tile][n][j];
                }
                float own = warp < WARPS / 2 ? base[0] : base[1];
                float a = power_of_two(multiply_add(scores[n][j], factor, -own));
                float b = power_of_two(multiply_add(scores[n][2 + j], factor, -own));
                u32 sum = whole_number(a) + whole_number(b);
#pragma unroll
                for (int far = 4; far < 32; far *= 2) sum += __shfl_xor_sync(~0u, sum, far);
                if (g == 0) shared.total[r][warp] = sum;
                shared.weights[r][16 * warp + g] = narrow(a), shared.weights[r][16 * warp + g + 8] = narrow(b);
            }
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            if (start + tile * TILE >= end) break;
            if (begins[tile]) add_piece(whole, piece, acc, piece_acc);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u32* of = shared.total[8 * n + 2 * t + j] + 4 * tile;
                    float by = shrink[tile][n][j];
                    piece[n][j] = {highest[tile][n][j],
                                   multiply_add(piece[n][j].weight, by, sum_of(of[0] + of[1] + of[2] + of[3]))};
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        piece_acc[m][n][j] = multiply(piece_acc[m][n][j], by);
                        piece_acc[m][n][2 + j] = multiply(piece_acc[m][n][2 + j], by);
                    }
                }
            if (warp * MT * 16 >= DIM) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {  // 32 tokens
                uint4 b[NT];
#pragma unroll
                for (int n = 0; n < NT; n++)
                    b[n] = load_matrices(shared_address(shared.weights[8 * n + (lane & 7)] + tile * TILE + half * 32 + lane / 8 * 8));
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        int of = tile * TILE + half * 32 + k * 16 + lane / 16 * 8 + (lane & 7);
                        uint4 a = load_transposed(values + at + place(of, 2 * (warp * MT + m) + (lane >> 3 & 1)));
#pragma unroll
                        for (int n = 0; n < NT; n++)
                            mma<BFLOAT16>(piece_acc[m][n], a.x, a.y, a.z, a.w, k ? b[n].z : b[n].x, k ? b[n].w : b[n].y);
                    }
            }
        }
        if (start + ROUND < end) {
            __syncthreads();  // this round's copies and sums are no longer read
            send(round + STAGES, block_at(start + STAGES * ROUND + 16 * warp));
        }
    }
    add_piece(whole, piece, acc, piece_acc);
    copies_wait<0>();

    bool alone = parts == 1;
    i64 to = (i64)(first + part) * heads + kv_head * GROUP;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int member = 8 * n + 2 * t + j;
            if (member >= GROUP) continue;
            Row sums = whole[n][j];
            float2 f = make_float2(0, 0);
            if (alone) f = last_factors(p, sums, kv_head * GROUP + member);
            else if (warp == 0 && g == 0) ((float2*)p.stats)[to + member] = make_float2(sums.highest, sums.weight);
#pragma unroll
            for (int i = 0; i < 2 * MT; i++) {
                int m = i / 2, d = (warp * MT + m) * 16 + i % 2 * 8 + g;
                if (d >= DIM) continue;
                float sum = acc[m][n][i % 2 * 2 + j];
                if (alone) p.out[((i64)row * heads + kv_head * GROUP + member) * DIM + d] = narrow(finished(p, sum, f));
                else p.sums[(to + member) * DIM + d] = sum;
            }
        }
    if (alone) return;
    __syncthreads();  // all sums of this program are written before it increments the counter
    if (threadIdx.x == 0) {
        int* counter = p.finished + slot * p.kv_heads + kv_head;
        shared.last = count_up(counter) == parts - 1;
        if (shared.last) *counter = 0;
    }
    __syncthreads();
    if (shared.last) add_up(p, row, first, parts, kv_head);
}
