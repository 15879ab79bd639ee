// Attention of one new token per sequence over KV codes. As in triton/attention/ordered_decode.py a program computes an
// item for one KV head, whose GROUP queries are the columns of NT instructions of mma.m16n8k16.
#include "attention_codes.cuh"

constexpr int WEIGHT_ROW = TILE / 2 + 4;  // words per row of weights, padded so that eight rows use different banks

template <int NT> struct Shared {
    Tiles tiles;
    alignas(128) u32 weights[8 * NT][WEIGHT_ROW];
    float top[WARPS][8 * NT];
    u32 total[WARPS][8 * NT];
    bool last;
};

template <int NT>
DEV void attend(const Product& p, u8* room) {
    static_assert(sizeof(Shared<NT>) <= (NT == 1 ? 36 : 38) << 10, "attention.py asks for that");
    Shared<NT>& shared = *(Shared<NT>*)room;
    launch_dependents();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    int heads = p.kv_heads * GROUP;
    float factor = multiply(p.scale, LOG2E);
    wait_before();
    int works = *p.num_items * p.kv_heads;
    for (int work = blockIdx.x; work < works; work += p.programs) {
        const int* item = p.items + (i64)(work / p.kv_heads) * FIELDS;
        int kv_head = work % p.kv_heads;
        int row = item[0], slot = item[1], begin = item[2], end = item[3], oldest = max(item[4], 0), parts = item[5],
            part = item[6], first = item[7];
        __syncthreads();  // shared memory is no longer read for the previous item
        Codes codes = codes_of(p, slot, kv_head, begin, oldest, end, shared.tiles);

        // Queries as float16: each word is two adjacent dimensions of the g-th query of each eight.
        u32 q[NT][DIM / 8];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int member = 8 * n + g, real = min(member, GROUP - 1);  // loads without branches do not wait for each other
            const u16* from = p.q + ((i64)row * p.q_stride + (kv_head * GROUP + real) * DIM + 2 * t);
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) {
                u32 v = *(const u32*)(from + i * 8);
                q[n][i] = member < GROUP ? query_operand(v) : 0u;
            }
        }

        // Sums over all completed pieces, and over the piece being read, for queries 2 t and 2 t + 1 of each eight.
        Row whole[NT][2], piece[NT][2];
        float acc[MT][NT][4] = {}, piece_acc[MT][NT][4] = {};
#pragma unroll
        for (int n = 0; n < NT; n++) whole[n][0] = whole[n][1] = piece[n][0] = piece[n][1] = {NOTHING, 0};
        for (int index = 0; index < codes.tiles; index++) {
            int start = begin + index * TILE;
            int block = block_of(codes, start + 3 * TILE);
            float2 key_scales = codes.key_scales, value_scales = codes.value_scales;
            load_scales(codes, codes.key_scales, codes.value_scales, start + TILE, codes.next);
            copies_wait<2>();  // for these keys: the next keys and these values may be in flight
            __syncwarp();
            float scores[NT][4] = {};
            u32 keys = codes.keys + (index & 1) * (TILE * DIM) + lane * 16;
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) {
                u32 a[8];
                spread(a, load_transposed(keys + i * 512));
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    mma<false>(scores[n], a[0], a[1], a[2], a[3], q[n][i * 4], q[n][i * 4 + 1]);
                    mma<false>(scores[n], a[4], a[5], a[6], a[7], q[n][i * 4 + 2], q[n][i * 4 + 3]);
                }
            }
            __syncwarp();
            if (index + 2 < codes.tiles) copy_keys(codes, index, start + 2 * TILE, codes.after);
            copies_commit();
            scale_scores(scores, key_scales);
            if (start + TILE > end || start < oldest) {
                int token = start + 16 * warp + 2 * g;  // first of this lane's two tokens
                bool low = token >= oldest && token < end, high = token + 1 >= oldest && token + 1 < end;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) scores[n][i] = (i < 2 ? low : high) ? scores[n][i] : NOTHING;
                value_scales = make_float2(low ? value_scales.x : 0.0f, high ? value_scales.y : 0.0f);
            }
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float top = fmaxf(scores[n][j], scores[n][2 + j]);
#pragma unroll
                    for (int far = 4; far < 32; far *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, far));
                    if (g == 0) shared.top[warp][8 * n + 2 * t + j] = top;
                }
            copies_wait<1>();  // for these values: only the keys after the next may be in flight
            __syncthreads();   // largest scores and values have been stored, the previous values have been multiplied
            if (index + 1 < codes.tiles) copy_values(codes, index + 1, start + TILE, codes.next);
            copies_commit();

            bool begins = piece_begins(start, p.window_piece);
            if (begins) add_piece(whole, piece, acc, piece_acc);
            float shrink[NT][2];
            float2 raised = make_float2(multiply(value_scales.x, RAISED), multiply(value_scales.y, RAISED));
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int r = 8 * n + 2 * t + j;
                    float top = fmaxf(fmaxf(shared.top[0][r], shared.top[1][r]), fmaxf(shared.top[2][r], shared.top[3][r]));
                    top = multiply(top, factor);
                    float higher = begins ? top : fmaxf(piece[n][j].highest, top), base = base_of(higher);
                    shrink[n][j] = begins ? 0.0f : power_of_two(piece[n][j].highest - base);
                    piece[n][j].highest = higher;
                    float low = power_of_two(multiply_add(scores[n][j], factor, -base));
                    float high = power_of_two(multiply_add(scores[n][2 + j], factor, -base));
                    u32 sum = whole_number(low) + whole_number(high);
#pragma unroll
                    for (int far = 4; far < 32; far *= 2) sum += __shfl_xor_sync(~0u, sum, far);
                    if (g == 0) shared.total[warp][r] = sum;
                    shared.weights[r][8 * warp + g] = to_half2(multiply(low, raised.x), multiply(high, raised.y));
                }
            __syncthreads();
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int r = 8 * n + 2 * t + j;
                    u32 sum = shared.total[0][r] + shared.total[1][r] + shared.total[2][r] + shared.total[3][r];
                    piece[n][j].weight = multiply_add(piece[n][j].weight, shrink[n][j], sum_of(sum));
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        piece_acc[m][n][j] = multiply(piece_acc[m][n][j], shrink[n][j]);
                        piece_acc[m][n][2 + j] = multiply(piece_acc[m][n][2 + j], shrink[n][j]);
                    }
                }
            u32 weights = shared_address(shared.weights[lane & 7]) + lane / 8 * 16;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 a[2][MT][4];
                load_values(a, codes.values + (index & 1) * (TILE * DIM), half, MT * warp, 1);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint4 b = load_matrices(weights + n * (8 * WEIGHT_ROW * 4) + half * 64);
#pragma unroll
                    for (int m = 0; m < MT; m++) mma<false>(piece_acc[m][n], a[0][m][0], a[0][m][1], a[0][m][2], a[0][m][3], b.x, b.y);
#pragma unroll
                    for (int m = 0; m < MT; m++) mma<false>(piece_acc[m][n], a[1][m][0], a[1][m][1], a[1][m][2], a[1][m][3], b.z, b.w);
                }
            }
            codes.next = codes.after, codes.after = block;
        }
        add_piece(whole, piece, acc, piece_acc);
        copies_wait<0>();

        bool alone = parts == 1;
        int place = ((first + part) * p.kv_heads + kv_head) * GROUP;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int member = 8 * n + 2 * t + j;
                if (member >= GROUP) continue;
                Row row_sums = whole[n][j];
                float2 f = make_float2(0, 0);
                if (alone) f = last_factors(p, row_sums, kv_head * GROUP + member);
                else if (warp == 0 && g == 0) ((float2*)p.stats)[place + member] = make_float2(row_sums.highest, row_sums.weight);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    int d = (warp * MT + m) * 16 + 2 * g;
                    float low = acc[m][n][j], high = acc[m][n][2 + j];
                    if (alone)
                        *(u32*)(p.out + ((i64)row * heads + kv_head * GROUP + member) * DIM + d) =
                            pack(finished(p, low, f), finished(p, high, f));
                    else *(float2*)(p.sums + (i64)(place + member) * DIM + d) = make_float2(low, high);
                }
            }
        if (alone) continue;
        __syncthreads();  // all sums of this program are written before it increments the counter
        if (threadIdx.x == 0) {
            int* counter = p.finished + slot * p.kv_heads + kv_head;
            shared.last = count_up(counter) == parts - 1;
            if (shared.last) *counter = 0;
        }
        __syncthreads();
        if (shared.last) add_up(p, row, first, parts, kv_head);
    }
}

// Named by the queries of a program, and the programs per multiprocessor: three have more registers, four hide more
// latency where there are many programs.
KERNEL(3) attention_codes_8_3(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); attend<1>(p, room); }
KERNEL(4) attention_codes_8_4(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); attend<1>(p, room); }
KERNEL(3) attention_codes_16_3(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); attend<2>(p, room); }
