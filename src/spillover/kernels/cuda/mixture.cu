// The two products of a mixture's experts, with weights stored as codes. FORMAT is Mxfp4, Fp8, Int with the bits of a
// code and the inputs of a group, or Gguf with the bits of a code and the numbers that exist for 32 inputs.
//
// A row of weights is read in steps of 128 inputs: lane t of four reads the 32 inputs from 32 t on, so its codes are 16
// bytes that share a scale (MXFP4) or 32 bytes (FP8). They are unpacked to the left operand of a tensor core. Which 16
// inputs one instruction multiplies depends on where they are stored: activations are stored in the order of the
// instructions (`place`), their rows padded with zeros to whole steps. Inputs are summed in chunks of some steps, each
// from zero, and chunks are added in order: the bits do not depend on whether chunks have separate warps, on the number
// of tokens, or on whether mma or wgmma is used. A step of integers may contain several groups, so the four lanes share
// every 32 inputs (4 bits) or 16 (8 bits), and each group is summed from zero, as chunks are. A group of Gguf has up to
// three sums, one after another: those of its halves, and that of the activations alone (a product with ones), by which
// its offset is multiplied.
//
// Codes are copied through shared memory, since more bytes are in flight than registers would hold.
#include "mixture_codes.cuh"
#include "mixture_tiles.cuh"

#define KERNEL(THREADS, BLOCKS) extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void

// For a few tokens: a warp computes chunks of 16 rows for one pair. An item is a chunk's codes and activations.
constexpr int ITEM = F::CHUNK * (SLOT + 256);
DEV void bring_item_codes(u32 to, const Matrix& m, int strip, int chunk) {
    Lines lines = lines_of(m, strip);
#pragma unroll
    for (int i = 0; i < F::CHUNK; i++)
        if (chunk * F::CHUNK + i < m.steps) bring_codes(to + i * SLOT, lines, chunk * F::CHUNK + i);
}
DEV void bring_item_x(u32 to, const u16* x, int chunk, int steps) {
    int units = min(F::CHUNK, steps - chunk * F::CHUNK) * 16;
    for (int u = threadIdx.x & 31; u < units; u += 32) copy_async(to + F::CHUNK * SLOT + u * 16, x + (chunk * F::CHUNK * 128 + u * 8));
}
// Computes a pair of rows' sums over a chunk, or over each group of integers with their factors; in lanes with t = 0.
DEV void item_product(float2 (&sums)[SUMS], float2 (&factors)[SUMS], u32 from, const Matrix& m, int chunk) {
    float acc[4] = {};
    auto from_nothing = [&] { acc[0] = acc[1] = acc[2] = acc[3] = 0; };
    auto ends = [&](const Codes& c, int i) { sums[i] = make_float2(acc[0], acc[2]), factors[i] = c.sum[i]; };
#pragma unroll
    for (int i = 0; i < F::CHUNK; i++) {
        int step = chunk * F::CHUNK + i;
        if (step >= m.steps) break;
        Codes c = read_codes(from + i * SLOT);
        u32 x = from + F::CHUNK * SLOT + i * 256 + (threadIdx.x & 31) / 8 * 16;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 low[4], high[4];
            F::unpack(low, c.v[0], j, c.factor[0][j / PARTS]);
            F::unpack(high, c.v[1], j, c.factor[1][j / PARTS]);
            uint4 b = load_matrices(x + j * 64);
            int first = j / PARTS * WORDS;  // index of the group's first sum
            if (F::INTEGERS && j % PARTS == 0) from_nothing();
            mma<F::BF16>(acc, low[0], high[0], low[1], high[1], b.x, b.y);
            if (F::HALVES) ends(c, first), from_nothing();
            mma<F::BF16>(acc, low[2], high[2], low[3], high[3], b.z, b.w);
            if (F::INTEGERS && j % PARTS == PARTS - 1) ends(c, first + F::HALVES);
            if (F::OFFSETS) {
                from_nothing();
                mma<F::BF16>(acc, ONES, ONES, ONES, ONES, b.x, b.y);
                mma<F::BF16>(acc, ONES, ONES, ONES, ONES, b.z, b.w);
                ends(c, first + WORDS - 1);
            }
        }
    }
    if (!F::INTEGERS) sums[0] = make_float2(acc[0], acc[2]);
}
DEV float4 with_factors(float2 v, float2 f) { return make_float4(v.x, v.y, f.x, f.y); }
DEV void add_chunk(float2& total, float4 v) { total.x = fmaf(v.x, v.z, total.x), total.y = fmaf(v.y, v.w, total.y); }

// Computes out[pair] = act(gate_up[expert] @ x[token] + bias): one block per 16 rows of a pair's expert.
KERNEL(128, 6) experts_gate_up_pairs(const __grid_constant__ Product p) {
    constexpr int EACH = F::EACH_UP, TURN = 4 * EACH;
    DYNAMIC_SHARED(room);  // [TURN] items; the sums of a chunk's 8 pairs of rows overwrite its item
    int strips = p.rows / 16, pair = blockIdx.x / strips, strip = blockIdx.x % strips;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    u32 at = shared_address(room) + warp * EACH * ITEM;
    wait_before();
    launch_dependents();  // not earlier: experts_down_pairs reads data written before this kernel
    int slot = slot_of(p, load_fresh(p.ids + pair));
    if (slot < 0) return;
    Matrix m = matrix_of(p, slot, !p.clamped);
    const u16* x = p.x + (i64)(pair / p.k) * padded(p.depth);
    i64 row = first_row(m, strip, g);
    float2 total = make_float2(0, 0), b = biases(m, first_row(m, strip, threadIdx.x & 7));
    for (int base = 0; base < m.chunks; base += TURN) {
        float2 f[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int chunk = base + warp * EACH + i;
            if (chunk < m.chunks) {
                bring_item_codes(at + i * ITEM, m, strip, chunk);
                bring_item_x(at + i * ITEM, x, chunk, m.steps);
                f[i] = sum_factors(m, row, chunk);
            }
            copies_commit();
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int chunk = base + warp * EACH + i;
            switch (EACH - 1 - i) { case 3: copies_wait<3>(); break; case 2: copies_wait<2>(); break; case 1: copies_wait<1>(); break; default: copies_wait<0>(); }
            __syncwarp();
            if (chunk < m.chunks) {
                float2 v[SUMS], by[SUMS] = {f[i]};
                item_product(v, by, at + i * ITEM, m, chunk);
                __syncwarp();
                if (t == 0)
#pragma unroll
                    for (int e = 0; e < SUMS; e++) ((float4*)(room + (warp * EACH + i) * ITEM))[e * 8 + g] = with_factors(v[e], by[e]);
            }
        }
        __syncthreads();
        if (threadIdx.x < 8)
#pragma unroll
            for (int c = 0; c < TURN; c++)
                if (base + c < m.chunks)
#pragma unroll
                    for (int e = 0; e < SUMS; e++) add_chunk(total, ((float4*)(room + c * ITEM))[e * 8 + threadIdx.x]);
        if (base + TURN < m.chunks) __syncthreads();
    }
    if (threadIdx.x < 8) store_activation(p, pair, strip * 8 + threadIdx.x, total.x + b.x, total.y + b.y);
    if (threadIdx.x == 8 && strip + 1 == strips) store_padding(p, pair);
}

// Computes rows[pair] = down[expert] @ x[pair] + bias; out is these, or each token's sum of share * row: one block per
// 16 rows of a token, for the chunks of all its experts. Codes are copied while the kernel that computes x still runs.
KERNEL(512, 2) experts_down_pairs(const __grid_constant__ Product p) {
    constexpr int EACH = F::EACH_DOWN;
    DYNAMIC_SHARED(room);  // [16 warps][EACH] items, then sums of chunks [k][chunks][SUMS][8] and of pairs [k][8]
    __shared__ int slots[64];
    __shared__ float shares[64];
    int strips = p.rows / 16, token = blockIdx.x / strips, strip = blockIdx.x % strips;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    int chunks = matrix_of(p, 0, false).chunks, items = p.k * chunks;
    u32 at = shared_address(room) + warp * EACH * ITEM;
    float4* parts = (float4*)(room + 16 * EACH * ITEM);
    float2* sums = (float2*)(parts + items * SUMS * 8);
    if (threadIdx.x < p.k) {
        slots[threadIdx.x] = slot_of(p, load_fresh(p.ids + token * p.k + threadIdx.x));
        shares[threadIdx.x] = __int_as_float(load_fresh((const int*)p.shares + token * p.k + threadIdx.x));
    }
    __syncthreads();
    float2 f[EACH];
    auto bring = [&](int index, int i, bool codes, bool x) {
        int item = warp + index * 16;
        if (item >= items) return;
        int e = item / chunks, chunk = item % chunks;
        if (slots[e] < 0) return;
        Matrix m = matrix_of(p, slots[e], false);
        if (codes) {
            bring_item_codes(at + i * ITEM, m, strip, chunk);
            f[i] = sum_factors(m, first_row(m, strip, g), chunk);
        }
        if (x) bring_item_x(at + i * ITEM, p.x + (i64)(token * p.k + e) * padded(p.depth), chunk, m.steps);
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) bring(i, i, true, false);
    wait_before();
    launch_dependents();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        bring(i, i, false, true);
        copies_commit();
    }
    for (int base = 0; warp + base * 16 < items; base += EACH)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int item = warp + (base + i) * 16;
            copies_wait<EACH - 1>();
            __syncwarp();
            if (item < items && slots[item / chunks] >= 0) {
                float2 v[SUMS], by[SUMS] = {f[i]};
                item_product(v, by, at + i * ITEM, matrix_of(p, 0, false), item % chunks);
                if (t == 0)
#pragma unroll
                    for (int e = 0; e < SUMS; e++) parts[(item * SUMS + e) * 8 + g] = with_factors(v[e], by[e]);
                __syncwarp();
            }
            bring(base + i + EACH, i, true, true);
            copies_commit();
        }
    __syncthreads();
    if (threadIdx.x < 8 * p.k) {
        int e = threadIdx.x / 8, own = threadIdx.x & 7;
        if (slots[e] >= 0) {
            Matrix m = matrix_of(p, slots[e], false);
            float2 total = make_float2(0, 0), b = biases(m, first_row(m, strip, own));
#pragma unroll 8
            for (int c = 0; c < chunks * SUMS; c++) add_chunk(total, parts[(e * chunks * SUMS + c) * 8 + own]);
            u32 rounded = to_bf16x2(total.x + b.x, total.y + b.y);
            if (p.sum) sums[threadIdx.x] = make_float2(low_bf16(rounded), high_bf16(rounded));
            else ((u32*)(p.out + (i64)(token * p.k + e) * p.rows))[strip * 8 + own] = rounded;
        }
    }
    if (!p.sum) return;
    __syncthreads();
    if (threadIdx.x < 8) {
        float2 total = make_float2(0, 0);
#pragma unroll 8
        for (int e = 0; e < p.k; e++) {
            total.x = fmaf(sums[e * 8 + threadIdx.x].x, shares[e], total.x);
            total.y = fmaf(sums[e * 8 + threadIdx.x].y, shares[e], total.y);
        }
        ((u32*)(p.out + (i64)token * p.rows))[strip * 8 + threadIdx.x] = to_bf16x2(total.x, total.y);
    }
}

KERNEL(256, 3) experts_gate_up_16(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<16, F::STAGES_16, false>(p, room); }
KERNEL(256, 2) experts_gate_up_64(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<64, F::STAGES_64, false>(p, room); }
KERNEL(256, 1) experts_gate_up_128(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<128, F::STAGES_128, false>(p, room); }
KERNEL(256, 3) experts_down_16(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<16, F::STAGES_16, true>(p, room); }
KERNEL(256, 2) experts_down_64(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<64, F::STAGES_64, true>(p, room); }
KERNEL(256, 1) experts_down_128(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<128, F::STAGES_128, true>(p, room); }
