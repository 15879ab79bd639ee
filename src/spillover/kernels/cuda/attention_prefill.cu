// Attention of a prompt over 16-bit keys and values, for compute capability 9.0, in the order of sums of
// triton/attention/softmax.py, with the same bits as triton/attention/ordered_prefill.py.
//
// DIM, GROUP, BLOCK, BFLOAT16: as in attention_codes.cuh. A program computes 128 queries of one head: with 64, keys and
// values would come through the cache more slowly than they are multiplied. One warp copies tiles of keys and values,
// STAGES ahead; each of two warpgroups multiplies them with 64 queries. While a warpgroup computes the exponentials of
// a tile's scores, the tensor cores multiply its previous tile's weights with values, and work for the other warpgroup.
#include "instructions.cuh"

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;  // registers can be released only by whole warpgroups
constexpr float RAISED = 1.0f;
#include "attention_softmax.cuh"

constexpr int QUERIES = 64, STAGES = 4;        // QUERIES: queries per warpgroup
constexpr int HALF = TILE * 128;               // bytes of 64 dimensions of a tile: swizzled rows of 128 bytes
constexpr int BYTES = DIM / 64 * HALF;         // bytes per tile
constexpr int RUN = BLOCK < TILE ? BLOCK : TILE;  // tokens of a tile that are in one block
constexpr int BOXES = TILE / RUN * (DIM / 64);    // boxes in which a tile is copied, one per lane

// Kernel arguments; must match kernels/cuda/attention_prefill.py.
struct Product {
    Map kv;  // the pool as rows of DIM elements
    const u16* q; u16* out;
    const int* table; const void* sinks;                                              // sinks may be null
    const int* tiles; const int* query_start; const int* seq_lens; const int* slots;  // slots may be null
    i64 q_stride, table_stride;
    int block_rows, kv_rows, head_rows;  // strides in rows of the pool
    float scale;
    int programs, kv_heads, window, window_piece, sinks_float;
};

struct Shared {
    alignas(1024) u8 q[CONSUMERS / 128][DIM / 64][QUERIES * 128];  // rows have the layout of those of tiles
    alignas(1024) u8 keys[STAGES][BYTES];
    alignas(1024) u8 values[STAGES][BYTES];
    u64 full[2][STAGES], empty[2][STAGES];  // [0] for keys, [1] for values
};
struct Ring {  // the barriers of the stages of keys or values; tile i uses stage i % STAGES
    u32 full, empty;
    __device__ __forceinline__ void wait_full(int i) const { await(full + 8 * (i % STAGES), i / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(int i) const { await(empty + 8 * (i % STAGES), i / STAGES & 1 ^ 1); }
    __device__ __forceinline__ void release(int i) const { if ((threadIdx.x & 31) == 0) arrive(empty + 8 * (i % STAGES)); }
};

// The tokens that a tile of queries attends to.
struct Keys { int begin, oldest, end, tiles; };
DEV Keys keys_of(const Product& p, int position, int queries, int length) {
    int end = min(position + queries, length), oldest = p.window ? max(position - p.window + 1, 0) : 0;
    int begin = oldest / TILE * TILE;
    return {begin, oldest, end, (end - begin + TILE - 1) / TILE};
}

// Starts the copies of the tiles, one after another.
DEV void copy_tiles(const Product& p, Shared& shared, const int* table, int kv_head, const Keys& keys, Ring ring_keys, Ring ring_values) {
    int lane = threadIdx.x & 31, box = lane % BOXES, run = box / (DIM / 64), half = box % (DIM / 64);
    bool copies_keys = lane < BOXES, copies_values = lane >= BOXES && lane < 2 * BOXES;
    int first = kv_head * p.head_rows + (copies_values ? p.kv_rows : 0);
    auto row_of = [&](int start) {
        int n = start + run * RUN;
        return table[min(max(n / BLOCK, keys.oldest / BLOCK), (keys.end - 1) / BLOCK)] * p.block_rows + first + n % BLOCK;
    };
    u32 to = half * HALF + run * RUN * 128;
    auto copy = [&](const Ring& ring, u8* stages, int i, int row, bool mine) {
        ring.wait_empty(i);
        u32 full = ring.full + 8 * (i % STAGES);
        if (lane == 0) expect(full, BYTES);
        __syncwarp();
        if (mine) copy_tile(shared_address(stages) + i % STAGES * BYTES + to, p.kv, half * 64, row, full);
    };
    int next = row_of(keys.begin);
    for (int i = 0; i < keys.tiles; i++) {
        int row = next;
        next = row_of(keys.begin + (i + 1) * TILE);
        copy(ring_keys, shared.keys[0], i, row, copies_keys);
        copy(ring_values, shared.values[0], i, row, copies_values);
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void attention_prefill(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(room);
    Shared& shared = *(Shared*)room;
    int warp = uniform(threadIdx.x / 32), lane = threadIdx.x & 31;
    Ring ring_keys = {shared_address(shared.full[0]), shared_address(shared.empty[0])};
    Ring ring_values = {shared_address(shared.full[1]), shared_address(shared.empty[1])};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) make_barrier(ring_keys.full + 8 * i, 1), make_barrier(ring_keys.empty + 8 * i, CONSUMERS / 32);
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    wait_before();
    int heads = p.kv_heads * GROUP, head = blockIdx.x % heads, tile = p.programs / heads - 1 - blockIdx.x / heads;
    // The last rows of a prompt take longest, so they are started first.
    int request = uniform(p.tiles[2 * tile]), offset = uniform(p.tiles[2 * tile + 1]);
    int begin = uniform(p.query_start[request]), count = uniform(p.query_start[request + 1]) - begin, length = uniform(p.seq_lens[request]);
    if (offset >= count) return;
    int position = length - count + offset;
    Keys keys = keys_of(p, position, 2 * QUERIES, length);
    if (warp >= CONSUMERS / 32) {
        give_registers<24>();
        const int* table = p.table + (p.slots ? p.slots[request] : request) * p.table_stride;
        if (warp == CONSUMERS / 32) copy_tiles(p, shared, table, head / GROUP, keys, ring_keys, ring_values);
        return;
    }
    take_registers<240>();
    offset += warp / 4 * QUERIES, position += warp / 4 * QUERIES;
    Keys own = keys_of(p, position, QUERIES, length);
    int rows = count - offset, first = (own.begin - keys.begin) / TILE, last = rows > 0 ? first + own.tiles : first;
    int g = lane / 4, t = lane & 3, r = warp % 4 * 16 + g;  // this lane has rows r and r + 8
    i64 row = begin + offset;
    auto pass_by = [&](int from, int to) {
        for (int i = from; i < to; i++) {
            ring_keys.wait_full(i), ring_keys.release(i);
            ring_values.wait_full(i), ring_values.release(i);
        }
    };
    pass_by(0, first);
    if (rows > 0) {
        u32 weights[TILE / 16][4];
        u8* queries = shared.q[warp / 4][0];
#pragma unroll
        for (int j = 0; j < DIM / 16; j++) {
            int unit = j * 128 + threadIdx.x % 128, to = unit / (DIM / 8), d = unit % (DIM / 8);
            *(uint4*)(queries + d / 8 * (QUERIES * 128) + to * 128 + ((d ^ to) & 7) * 16) =
                *(const uint4*)(p.q + (row + min(to, rows - 1)) * p.q_stride + head * DIM + 8 * d);
        }
        shared_is_ready();
        sync_warpgroup();
        u64 query_operand = tile_operand(shared_address(queries));
        Row whole[2] = {{NOTHING, 0}, {NOTHING, 0}}, piece[2] = {{NOTHING, 0}, {NOTHING, 0}};
        Change change[2];
        u32 sum[2];
        float scores[TILE / 8][4], acc[DIM / 8][4] = {}, piece_acc[DIM / 8][4] = {}, shrink[2];
        float factor = multiply(p.scale, LOG2E);
        bool begins;
        auto begin_scores = [&](int i) {
            ring_keys.wait_full(i);
            u64 operand = tile_operand(shared_address(shared.keys[0]) + i % STAGES * BYTES);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < DIM / 16; k++)
                wgmma<BFLOAT16>(scores, query_operand + (k / 4 * (QUERIES * 128) + k % 4 * 32) / 16, operand + (k / 4 * HALF + k % 4 * 32) / 16, k > 0);
            wgmma_commit();
        };
        auto begin_values = [&](int i) {
            int start = keys.begin + i * TILE;
            ring_values.wait_full(i);
            u8* stage = shared.values[i % STAGES];
            if (start < keys.oldest || start + TILE > keys.end) {  // others are cleared, as 0 times them may be NaN
                for (int unit = threadIdx.x % 128; unit < BYTES / 16; unit += 128) {
                    int token = start + unit / 8 % TILE;
                    if (token < keys.oldest || token >= keys.end) *(uint4*)(stage + 16 * unit) = make_uint4(0, 0, 0, 0);
                }
                shared_is_ready();
                sync_warpgroup();
            }
            u64 operand = rows_operand(shared_address(stage), HALF);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < TILE / 16; k++)
                wgmma<BFLOAT16, DIM / 8, true>(piece_acc, weights[k][0], weights[k][1], weights[k][2], weights[k][3], operand + k * 2048 / 16, 1);
            wgmma_commit();
        };
        // Turns scores into weights, and sets `shrink`, the factors of the sums so far.
        auto take_scores = [&](int i) {
            int start = keys.begin + i * TILE;
            begins = piece_begins(start, p.window_piece);
            if (start + TILE > position + 1 || p.window)
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int behind = position + r + j / 2 * 8 - (start + 8 * n + 2 * t + j % 2);
                        scores[n][j] = behind >= 0 && (!p.window || behind < p.window) ? scores[n][j] : NOTHING;
                    }
            float top[2], base[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                top[j] = fmaxf(scores[0][2 * j], scores[0][2 * j + 1]);
#pragma unroll
                for (int n = 1; n < TILE / 8; n++) top[j] = fmaxf(top[j], fmaxf(scores[n][2 * j], scores[n][2 * j + 1]));
            }
#pragma unroll
            for (int far = 1; far < 4; far *= 2)  // over the four lanes that share a row
#pragma unroll
                for (int j = 0; j < 2; j++) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], far));
            if (begins) change[0] = add_row(whole[0], piece[0]), change[1] = add_row(whole[1], piece[1]);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                top[j] = multiply(top[j], factor);
                if (!begins) top[j] = fmaxf(piece[j].highest, top[j]);
                base[j] = base_of(top[j]);
                shrink[j] = begins ? 0.0f : power_of_two(piece[j].highest - base[j]);
            }
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) scores[n][j] = power_in_order(multiply_add(scores[n][j], factor, -base[j / 2]));
            piece[0].highest = top[0], piece[1].highest = top[1];
            part_ways(scores[TILE / 8 - 1][3] == 3.0f);  // never true: a power is at most one
        };
        // Adds the weights of a tile; four lanes share a row.
        auto add_weights = [&] {
#pragma unroll
            for (int far = 1; far < 4; far *= 2)
#pragma unroll
                for (int j = 0; j < 2; j++) sum[j] += __shfl_xor_sync(~0u, sum[j], far);
#pragma unroll
            for (int j = 0; j < 2; j++) piece[j].weight = multiply_add(piece[j].weight, shrink[j], sum_of(sum[j]));
        };
        auto add_to_whole = [&] {
#pragma unroll
            for (int n = 0; n < DIM / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    acc[n][j] = multiply_add(acc[n][j], change[j / 2].mine, multiply(piece_acc[n][j], change[j / 2].theirs));
        };
        auto take_weights = [&] {
            if (begins) add_to_whole();
            if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
                for (int n = 0; n < DIM / 8; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) piece_acc[n][j] = multiply(piece_acc[n][j], shrink[j / 2]);
            sum[0] = sum[1] = 0;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[j / 2] += whole_number(scores[n][j]);
#pragma unroll
            for (int k = 0; k < TILE / 16; k++)
#pragma unroll
                for (int j = 0; j < 4; j++) weights[k][j] = pack(scores[2 * k + j / 2][j % 2 * 2], scores[2 * k + j / 2][j % 2 * 2 + 1]);
        };
        begin_scores(first);
        wgmma_ends(scores);
        ring_keys.release(first);
        take_scores(first);
        take_weights();
        for (int i = first + 1; i < last; i++) {
            begin_scores(i);
            begin_values(i - 1);
            add_weights();
            wgmma_wait<1>();
            wgmma_settle(scores);
            ring_keys.release(i);
            take_scores(i);
            wgmma_ends(piece_acc);
            ring_values.release(i - 1);
            take_weights();
        }
        begin_values(last - 1);
        add_weights();
        wgmma_ends(piece_acc);
        ring_values.release(last - 1);
        change[0] = add_row(whole[0], piece[0]), change[1] = add_row(whole[1], piece[1]);
        add_to_whole();
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (r + j * 8 >= rows) continue;
            float2 f = last_factors(p, whole[j], head);
            u16* out = p.out + ((row + r + j * 8) * heads + head) * DIM + 2 * t;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++)
                *(u32*)(out + 8 * n) = pack(finished(p, acc[n][2 * j], f), finished(p, acc[n][2 * j + 1], f));
        }
    }
    pass_by(last, keys.tiles);
}
