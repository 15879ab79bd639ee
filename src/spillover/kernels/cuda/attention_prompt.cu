// Attention of a prompt over KV codes: a program (block of threads) computes 64 queries of one head. Its four warps
// multiply with wgmma. Queries are the columns of scores [keys, queries]; threads 0 to 63 each keep the values of one
// column, its largest score and the sum of its weights.
#include "attention_codes.cuh"

constexpr int QUERIES = 64, PARTS = 2;  // PARTS: programs per tile of 128 queries
constexpr int NT = QUERIES / 8;
struct Shared {
    alignas(1024) u8 q[DIM / 64][QUERIES * 128];  // float16 [QUERIES][64], units of 16 bytes swizzled
    alignas(1024) u8 weights[QUERIES * 128];      // likewise, [QUERIES][TILE]
    Tiles tiles;
    float top[WARPS][QUERIES];
    u32 total[WARPS][QUERIES];
    float base[QUERIES], shrink[QUERIES], mine[QUERIES], theirs[QUERIES];
};
// Combines each of a lane's 16 values over the eight lanes with the same t; lane 4 g + t gets results 2 g and 2 g + 1.
template <int KEPT = 8, class T, class F>
DEV void combine(T (&v)[16], F f) {
    bool upper = threadIdx.x & 2 * KEPT;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        T sent = upper ? v[i] : v[KEPT + i], own = upper ? v[KEPT + i] : v[i];
        v[i] = f(own, __shfl_xor_sync(~0u, sent, 2 * KEPT));
    }
    if constexpr (KEPT > 2) combine<KEPT / 2>(v, f);
}

KERNEL(2) attention_codes_prompt(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(room);
    static_assert(sizeof(Shared) <= 60 << 10, "attention.py asks for that");
    Shared& shared = *(Shared*)room;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3, column = threadIdx.x;
    int heads = p.kv_heads * GROUP, head = blockIdx.x % heads, kv_head = head / GROUP;
    int part = p.programs / heads - 1 - blockIdx.x / heads;  // a prompt's last rows take longest and start first
    launch_dependents();
    wait_before();
    int request = p.tiles[part / PARTS * 2], offset = p.tiles[part / PARTS * 2 + 1] + part % PARTS * QUERIES;
    int first_row = p.query_start[request] + offset, count = p.query_start[request + 1] - p.query_start[request];
    if (offset >= count) return;
    int rows = min(count - offset, QUERIES), length = p.seq_lens[request], position = length - count + offset;
    int end = min(position + QUERIES, length), oldest = p.window ? max(position - p.window + 1, 0) : 0;
    int begin = oldest / TILE * TILE;
    float factor = multiply(p.scale, LOG2E);
    Codes codes = codes_of(p, p.slots ? p.slots[request] : request, kv_head, begin, oldest, end, shared.tiles);
#pragma unroll
    for (int j = 0; j < QUERIES * (DIM / 8) / THREADS; j++) {
        int r = (j * THREADS + threadIdx.x) / (DIM / 8), unit = threadIdx.x % (DIM / 8);
        uint4 v = *(const uint4*)(p.q + ((i64)(first_row + min(r, rows - 1)) * p.q_stride + head * DIM + unit * 8));
        uint4 made = {query_operand(v.x), query_operand(v.y), query_operand(v.z), query_operand(v.w)};
        *(uint4*)(shared.q[unit / 8] + r * 128 + ((unit & 7) ^ (r & 7)) * 16) = made;
    }
    shared_is_ready();
    __syncthreads();
    // Descriptors of swizzled rows of 128 bytes, in groups of eight rows that are 1,024 bytes apart.
    constexpr u64 ROWS = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16;
    u64 query_table = ROWS | shared_address(shared.q[0]) >> 4, weight_table = ROWS | shared_address(shared.weights) >> 4;

    Row whole = {NOTHING, 0}, piece = whole;  // sums of this thread's column
    float acc[MT][NT][4] = {}, piece_acc[MT][NT][4] = {};
    auto add_piece = [&]() {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 mine = *(float2*)&shared.mine[8 * n + 2 * t], theirs = *(float2*)&shared.theirs[8 * n + 2 * t];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[m][n][i] = multiply_add(acc[m][n][i], i % 2 ? mine.y : mine.x,
                                                multiply(piece_acc[m][n][i], i % 2 ? theirs.y : theirs.x));
        }
    };
    for (int index = 0; index < codes.tiles; index++) {
        int start = begin + index * TILE;
        int block = block_of(codes, start + 3 * TILE);
        float2 key_scales = codes.key_scales, value_scales = codes.value_scales;
        load_scales(codes, codes.key_scales, codes.value_scales, start + TILE, codes.next);
        copies_wait<2>();  // for these keys: the next keys and these values may be in flight
        __syncwarp();
        float scores[NT][4];
        u32 keys = codes.keys + (index & 1) * (TILE * DIM) + lane * 16;
        u32 a[2][8];
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint4 r = load_transposed(keys + i * 512);
            if (i >= 2) wgmma_wait<1>();  // frees the operands of two iterations ago
            u32(&b)[8] = a[i & 1];
            spread(b, r);
            u64 at = query_table + (i / 2 * (QUERIES * 128) + i % 2 * 64) / 16;
            wgmma_fence();
            wgmma<false, NT>(scores, b[0], b[1], b[2], b[3], at, i > 0);
            wgmma<false, NT>(scores, b[4], b[5], b[6], b[7], at + 2, 1);
            wgmma_commit();
        }
        __syncwarp();
        if (index + 2 < codes.tiles) copy_keys(codes, index, start + 2 * TILE, codes.after);
        copies_commit();
        wgmma_ends<NT>(scores);
        scale_scores(scores, key_scales);
        int token = start + 16 * warp + 2 * g;  // first of this lane's two tokens
        if (start + TILE > position + 1 || p.window) {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int behind = position + 8 * n + 2 * t + i % 2 - (token + i / 2);
                    bool seen = behind >= 0 && (!p.window || behind < p.window);
                    scores[n][i] = seen ? scores[n][i] : NOTHING;
                }
            value_scales.x = token >= oldest && token < end ? value_scales.x : 0.0f;
            value_scales.y = token + 1 >= oldest && token + 1 < end ? value_scales.y : 0.0f;
        }
        float tops[16];
#pragma unroll
        for (int i = 0; i < 16; i++) tops[i] = fmaxf(scores[i / 2][i % 2], scores[i / 2][2 + i % 2]);
        combine(tops, [](float a, float b) { return fmaxf(a, b); });
        *(float2*)&shared.top[warp][8 * g + 2 * t] = make_float2(tops[0], tops[1]);
        copies_wait<1>();  // for these values: only the keys after the next may be in flight
        __syncthreads();   // largest scores and values have been stored
        if (index + 1 < codes.tiles) copy_values(codes, index + 1, start + TILE, codes.next);
        copies_commit();
        bool begins = piece_begins(start, p.window_piece);
        float shrink = 0.0f;
        if (column < QUERIES) {
            float top = fmaxf(fmaxf(shared.top[0][column], shared.top[1][column]), fmaxf(shared.top[2][column], shared.top[3][column]));
            top = multiply(top, factor);
            if (begins) {
                Change c = add_row(whole, piece);
                shared.mine[column] = c.mine, shared.theirs[column] = c.theirs;
            }
            float higher = begins ? top : fmaxf(piece.highest, top), base = base_of(higher);
            shrink = begins ? 0.0f : power_of_two(piece.highest - base);
            piece.highest = higher;
            shared.base[column] = base, shared.shrink[column] = shrink;
        }
        __syncthreads();
        float2 raised = make_float2(multiply(value_scales.x, RAISED), multiply(value_scales.y, RAISED));
        u32 sums[16];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 base = *(float2*)&shared.base[8 * n + 2 * t];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int r = 8 * n + 2 * t + j;
                float low = power_of_two(multiply_add(scores[n][j], factor, -(j ? base.y : base.x)));
                float high = power_of_two(multiply_add(scores[n][2 + j], factor, -(j ? base.y : base.x)));
                sums[2 * n + j] = whole_number(low) + whole_number(high);
                *(u32*)(shared.weights + r * 128 + ((2 * warp + g / 4) ^ (r & 7)) * 16 + (g & 3) * 4) =
                    to_half2(multiply(low, raised.x), multiply(high, raised.y));
            }
        }
        combine(sums, [](u32 a, u32 b) { return a + b; });
        shared.total[warp][8 * g + 2 * t] = sums[0], shared.total[warp][8 * g + 2 * t + 1] = sums[1];
        if (begins) add_piece();
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 by = *(float2*)&shared.shrink[8 * n + 2 * t];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) piece_acc[m][n][i] = multiply(piece_acc[m][n][i], i % 2 ? by.y : by.x);
        }
        shared_is_ready();
        __syncthreads();
        if (column < QUERIES) {
            u32 sum = shared.total[0][column] + shared.total[1][column] + shared.total[2][column] + shared.total[3][column];
            piece.weight = multiply_add(piece.weight, shrink, sum_of(sum));
        }
        u32 v[2][2][MT][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            load_values(v[half], codes.values + (index & 1) * (TILE * DIM), half, warp, 4);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    u32(&b)[4] = v[half][i][m];
                    wgmma<false, NT>(piece_acc[m], b[0], b[1], b[2], b[3], weight_table + half * 4 + i * 2, 1);
                }
            wgmma_commit();
        }
#pragma unroll
        for (int m = 0; m < MT; m++) wgmma_ends<NT>(piece_acc[m]);
        codes.next = codes.after, codes.after = block;
    }
    if (column < QUERIES) {
        Change c = add_row(whole, piece);
        shared.mine[column] = c.mine, shared.theirs[column] = c.theirs;
        float2 f = last_factors(p, whole, head);
        shared.base[column] = f.x, shared.shrink[column] = f.y;
    }
    __syncthreads();
    add_piece();
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int r = 8 * n + 2 * t + j;
            if (r >= rows) continue;
            float2 f = make_float2(shared.base[r], shared.shrink[r]);
#pragma unroll
            for (int m = 0; m < MT; m++)
                *(u32*)(p.out + ((i64)(first_row + r) * heads + head) * DIM + m * 64 + 16 * warp + 2 * g) =
                    pack(finished(p, acc[m][n][j], f), finished(p, acc[m][n][2 + j], f));
        }
}
