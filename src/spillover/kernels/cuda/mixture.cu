// The two products of a mixture's experts, whose weights are kept as codes: FORMAT is Mxfp4, Fp8, Int with the bits of a
// code and the inputs of a group, or Gguf with the bits of a code and what there is for 32 inputs.
//
// A row of weights is read in steps of 128 inputs: lane t of four takes the 32 inputs that begin at 32 t, so its codes
// are 16 bytes that share a scale (MXFP4) or 32 bytes (FP8), and are unpacked to what a tensor core takes as its left
// operand. Which inputs meet in one instruction, 16 at a time, is a matter of where they lie; activations are kept in
// the order of the instructions (`place`), their rows padded with zeros to whole steps. Inputs are summed in chunks of
// some steps, each from nothing, and chunks in their order: whether they have warps of their own makes no difference
// to the bits, nor does the number of tokens, nor whether the instruction is mma or wgmma. Integers of a step may be of
// several groups, so the four lanes share every 32 inputs (4 bits) or 16 (8 bits), and groups are summed each from
// nothing, as chunks are. A group of Gguf has up to three sums, one after another: of its halves, and of the activations
// alone (a product with ones), which its offset is multiplied by.
//
// Codes go through shared memory, where each lane finds its own: more bytes are on their way than registers would hold.
#include "mixture_formats.cuh"

DEV float low_bf16(u32 v) { return __uint_as_float(v << 16); }
DEV float high_bf16(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
typedef FORMAT F;
constexpr int PARTS = 4 / F::GROUPS;  // of 32 inputs, that a group has of a step
constexpr int WORDS = 1 + F::HALVES + F::OFFSETS;  // of a group, each the factor of a sum
constexpr int SUMS = F::GROUPS * WORDS;            // of a chunk
constexpr u32 ONES = 0x3C003C00;                   // float16

// What a kernel takes; kernels/cuda/mixture.py has the same.
struct Product {
    const u16* x;                              // activations, [tokens or pairs][depth]
    const u8* codes; const u8* scales; const u16* bias;  // a stack of experts; bias: or null
    i64 stride, scale_stride, bias_stride;     // elements between experts
    const int* slots;                          // where in the stack an expert lies, -1: nowhere; null: the stack has all
    const int* ids; const float* shares;       // of the pairs, [tokens][k]
    const int* places; const int* order;       // tiles of pairs sorted by expert: see sort_by_expert
    u16* out;
    float limit;                               // of the clamped activation
    int clamped, sum, scale_row, rows, depth, k;  // sum: out has a row a token, else a row a pair
};
DEV int slot_of(const Product& p, int expert) { return p.slots && expert >= 0 ? load_fresh(p.slots + expert) : expert; }
DEV int padded(int width) { return (width + 127) & ~127; }  // of a row of activations

// One expert's matrix as a warp reads it: 16 rows, of which lane g has the g-th pair: two neighbours, or with `halves`
// one of the first half of the rows and one of the second. `apart` rows lie between the two of a pair.
struct Matrix {
    const u8* codes;
    const void* scales;
    const u16* bias;
    int row_bytes, scale_row, groups, steps, chunks;  // groups: of 32 inputs
    i64 apart;
    bool halves;
};
DEV Matrix matrix_of(const Product& p, i64 slot, bool halves) {
    int groups = p.depth / 32;
    return {p.codes + slot * p.stride, p.scales + slot * p.scale_stride * F::SCALE_BYTES,
            p.bias ? p.bias + slot * p.bias_stride : nullptr, p.depth * F::VECTORS / 2, p.scale_row, groups,
            (groups + 3) / 4, (groups + 4 * F::CHUNK - 1) / (4 * F::CHUNK), halves ? p.rows / 2 : 1, halves};
}
DEV i64 first_row(const Matrix& m, int strip, int g) { return m.halves ? strip * 8 + g : strip * 16 + 2 * g; }
// The factor of a chunk's sums for the two rows of a pair.
DEV float2 sum_factors(const Matrix& m, i64 row, int chunk) {
    if (F::CHUNK != 1 || F::INTEGERS) return make_float2(1, 1);
    int block = row / 128;
    float low = F::sum_factor(m.scales, block, m.scale_row, chunk);
    return make_float2(low, m.halves ? F::sum_factor(m.scales, block + ((int)m.apart + 127) / 128, m.scale_row, chunk) : low);
}
DEV float2 biases(const Matrix& m, i64 row) {
    return m.bias ? make_float2(low_bf16(m.bias[row]), low_bf16(m.bias[row + m.apart])) : make_float2(0, 0);
}

DEV float gated(float gate, float up, float limit, bool clamped) {
    if (!clamped) return gate * (1.0f / (1.0f + fast_exp(-gate))) * up;
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
    return (up + 1.0f) * (gate * (1.0f / (1.0f + fast_exp(-gate * 1.702f))));
}
// One activation of a row for the second product.
DEV void store_activation(const Product& p, i64 row, int column, float gate, float up) {
    p.out[row * padded(p.rows / 2) + F::place(column)] = (u16)F::activations(gated(gate, up, p.limit, p.clamped), 0);
}
DEV void store_padding(const Product& p, i64 row) {
    int width = padded(p.rows / 2);
#pragma unroll 1
    for (int c = p.rows / 2; c < width; c++) p.out[row * width + F::place(c)] = 0;
}

// Shared memory of a warp's 16 rows for one step. MXFP4: a lane's vectors of its two rows, then a word of scales for each
// row. FP8 and 8 bits: 128 bytes of each row, whose units of 16 bytes are swizzled by the row; 4 bits: 64 bytes, likewise,
// so that ldmatrix gives each of four lanes its word of every unit. Behind integers the words of their groups.
constexpr int SLOT = F::VECTORS * 1024 + F::SLOT_SCALES;
struct Lines { const u8 *codes, *scales; i64 apart; int four, groups; };  // scales: of the row that this lane brings
DEV Lines lines_of(const Matrix& m, int strip) {
    int lane = threadIdx.x & 31;
    i64 row = first_row(m, strip, F::VECTORS == 1 ? lane / 4 : lane / 8);
    i64 scales = F::INTEGERS ? first_row(m, strip, lane / 4) : row;
    return {m.codes + row * m.row_bytes,
            (const u8*)m.scales + (scales + ((lane & 1) ? m.apart : 0)) * (F::INTEGERS ? m.scale_row * 4 : m.scale_row),
            m.apart * m.row_bytes, (m.halves ? 4 : 8) * m.row_bytes, m.groups};
}
// The words of groups, [row of a pair][pair][group][word].
DEV void bring_words(u32 to, const Lines& lines, int step) {
    int lane = threadIdx.x & 31, row = (lane & 1) * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        int word = i + (lane >> 1 & 1);
        if (word < SUMS) copy_word_async(to + (row * SUMS + word) * 4, lines.scales + (step * SUMS + word) * 4);
    }
}
// Past the end the last group is brought again: every code is finite, and the activations there are zeros.
DEV void bring_codes(u32 to, const Lines& lines, int step) {
    int lane = threadIdx.x & 31;
    if constexpr (F::VECTORS == 1) {
        int t = lane & 3, g = lane / 4;
        const u8* from = lines.codes + min(step * 4 + t, lines.groups - 1) * 16;
        int unit = F::INTEGERS ? g * 4 + (t ^ g / 2) : lane;
        copy_async(to + unit * 16, from);
        copy_async(to + (32 + unit) * 16, from + lines.apart);
        if (F::INTEGERS) bring_words(to + 1024, lines, step);
        else if (t < 2) copy_word_async(to + 1024 + (t * 8 + g) * 4, lines.scales + step * 4);
    } else {  // four whole rows of 128 bytes an instruction: memory is read in whole lines
        int unit = lane & 7, pair = lane / 8;
        const u8* from = lines.codes + min(step * 4 + unit / 2, lines.groups - 1) * 32 + (unit & 1) * 16;
        u32 at = to + pair * 128 + (unit ^ pair) * 16;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            copy_async(at + r * 1024, from + (r ? lines.apart : 0));
            copy_async((at ^ 64) + 512 + r * 1024, from + lines.four + (r ? lines.apart : 0));
        }
        if (F::INTEGERS) bring_words(to + 2048, lines, step);
    }
}
struct Codes { uint4 v[2][F::VECTORS]; u32 factor[2][F::GROUPS]; float2 sum[SUMS]; };  // sum: factors of groups' sums
DEV Codes read_codes(u32 from) {
    int lane = threadIdx.x & 31, t = lane & 3, g = lane / 4;
    Codes c;
    if constexpr (F::INTEGERS) {
        int row = lane & 7, unit = lane / 8;
        u32 at = F::VECTORS == 1 ? from + row * 64 + (unit ^ row / 2) * 16 : from + row * 128 + (unit ^ row) * 16;
        u32 words[2][SUMS];
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < F::VECTORS; i++) c.v[r][i] = load_matrices((at ^ i * 64) + r * F::VECTORS * 512);
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                words[r][i] = load_shared_word(from + F::VECTORS * 1024 + ((r * 8 + g) * SUMS + i) * 4);
                if (i % WORDS == 0) c.factor[r][i / WORDS] = F::factor(words[r][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) c.sum[i] = make_float2(F::group_factor(words[0][i]), F::group_factor(words[1][i]));
    } else {
        u32 at = F::VECTORS == 1 ? from + lane * 16 : from + g * 128 + (2 * t ^ g) * 16;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < F::VECTORS; i++) c.v[r][i] = load_shared((at ^ i * 16) + r * F::VECTORS * 512);
            c.factor[r][0] = F::SCALE_BYTES == 1 ? F::factor(load_shared_byte(from + F::VECTORS * 1024 + (r * 8 + g) * 4 + t)) : 0;
        }
    }
    return c;
}

#define KERNEL(THREADS, BLOCKS) extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void

// A few tokens: a warp takes chunks of one pair's 16 rows, each with as much of the pair's activations.
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
// The sums of a pair of rows over one chunk, or over each group of integers with their factors; in lanes whose t is 0.
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
            int first = j / PARTS * WORDS;  // of the group's sums
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

// out[pair] = act(gate_up[expert] @ x[token] + bias): a block 16 rows of one pair's expert.
KERNEL(128, 6) experts_gate_up_pairs(const __grid_constant__ Product p) {
    constexpr int EACH = F::EACH_UP, TURN = 4 * EACH;
    DYNAMIC_SHARED(room);  // [TURN] items; the sums of a chunk's 8 pairs take the place of its item
    int strips = p.rows / 16, pair = blockIdx.x / strips, strip = blockIdx.x % strips;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    u32 at = shared_address(room) + warp * EACH * ITEM;
    wait_before();
    launch_dependents();  // not sooner: experts_down_pairs reads what was there before this kernel
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

// rows[pair] = down[expert] @ x[pair] + bias; out is these, or the sums of share * row of each token: a block 16 rows
// of one token, all its experts' chunks. Codes are brought before the kernel that makes x has ended.
KERNEL(512, 2) experts_down_pairs(const __grid_constant__ Product p) {
    constexpr int EACH = F::EACH_DOWN;
    DYNAMIC_SHARED(room);  // [16 warps][EACH] items, then sums of chunks [k][chunks][SUMS][8], of pairs [k][8]
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

// A tile: positions first .. end of the sorted pairs, at most as many as a tile has, all of one expert.
struct Tile { int slot, first, end; };

// Tiles of at most T positions: a block 128 rows, a warp 16 of them. N: the tile's positions, rounded up. A stage of
// shared memory has a step's activations, two tables of T rows of 128 bytes whose units of 16 bytes are swizzled as
// wgmma has it, and a slot of codes for each warp.
template <int N, int T, int STAGES, bool DOWN>
DEV void tile_product(const Product& p, const Tile& tile, u8* shared) {
    constexpr int NT = N / 8, X = T * 256, COPIES = (N + 15) / 16;
    constexpr bool GROUPS = WGMMA && N >= 32;
    u32 room = shared_address(shared);
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    int strips = p.rows / 16, own = blockIdx.x % ((strips + 7) / 8) * 8 + warp, strip = min(own, strips - 1);
    Matrix m = matrix_of(p, tile.slot, !DOWN && !p.clamped);
    i64 row = first_row(m, strip, g);
    Lines lines = lines_of(m, strip);
    u32 codes = room + STAGES * X + warp * SLOT;
    // A thread brings the same unit of 16 bytes of every 16th position.
    int unit = threadIdx.x & 15, position = threadIdx.x / 16, width = padded(p.depth);
    u32 to = room + unit / 8 * (T * 128) + position * 128 + ((unit & 7) ^ (position & 7)) * 16;
    int from[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        int at = tile.first + position + i * 16;
        from[i] = at < tile.end ? (DOWN ? at : p.order[at] / p.k) : -1;
    }
    auto bring_x = [&](int step, int stage) {
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (from[i] >= 0) copy_async(to + stage * X + i * 2048, p.x + ((i64)from[i] * width + step * 128 + unit * 8));
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        if (i < m.steps) bring_codes(codes + i * 8 * SLOT, lines, i);
    if (DOWN) wait_before();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < m.steps) bring_x(i, i);
        copies_commit();
    }
    float total[NT][4] = {}, acc[NT][4];
    auto from_nothing = [&] {
#pragma unroll
        for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    };
    auto add = [&](int n, const float (&sums)[4], float2 by) {
#pragma unroll
        for (int i = 0; i < 4; i++) total[n][i] = fmaf(sums[i], i < 2 ? by.x : by.y, total[n][i]);
    };
    auto add_sums = [&](float2 by) {
#pragma unroll
        for (int n = 0; n < NT; n++) add(n, acc[n], by);
    };
    // Adds offsets times the sums of 32 activations, which `at` has.
    auto add_offsets = [&](u32 at, float2 by) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float sums[4] = {};
            uint4 v = load_matrices(at + n * 1024);
            mma<F::BF16>(sums, ONES, ONES, ONES, ONES, v.x, v.y);
            mma<F::BF16>(sums, ONES, ONES, ONES, ONES, v.z, v.w);
            add(n, sums, by);
        }
    };
    // Where this lane finds its part of 32 activations of eight positions.
    auto x_at = [&](u32 x, int j) { return x + j / 2 * (T * 128) + (lane & 7) * 128 + ((j % 2 * 4 + lane / 8) ^ (lane & 7)) * 16; };
    float2 f = make_float2(1, 1), next_f = sum_factors(m, row, 0);
    for (int step = 0, stage = 0, into = STAGES - 1, left = 0; step < m.steps; step++) {
        copies_wait<STAGES - 2>();
        if (GROUPS) shared_is_ready();
        __syncthreads();
        int later = step + STAGES - 1;
        if (later < m.steps) {
            bring_codes(codes + into * 8 * SLOT, lines, later);
            bring_x(later, into);
        }
        copies_commit();
        bool begins = left == 0;
        if (begins) left = F::CHUNK;
        left--;
        if (F::CHUNK == 1) f = next_f, next_f = sum_factors(m, row, min(step + 1, m.steps - 1));
        Codes c = read_codes(codes + stage * 8 * SLOT);
        u32 x = room + stage * X;
        if constexpr (GROUPS) {
            u32 low[2][4], high[2][4];
            // Rows of 128 bytes, eight of them 1,024 bytes apart from the next, swizzled.
            u64 table = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | x >> 4;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j >= 2) wgmma_wait<1>();  // what was unpacked two turns ago is not needed any more
                F::unpack(low[j & 1], c.v[0], j, c.factor[0][j / PARTS]);
                F::unpack(high[j & 1], c.v[1], j, c.factor[1][j / PARTS]);
                u32(&a)[4] = low[j & 1], (&b)[4] = high[j & 1];
                u64 at = table + (j / 2 * T * 128 + j % 2 * 64) / 16;
                wgmma_fence();
                wgmma<F::BF16, NT>(acc, a[0], b[0], a[1], b[1], at, j % PARTS > 0 || !begins);
                if constexpr (F::HALVES) {
                    wgmma_commit();
                    wgmma_ends<NT>(acc);
                    add_sums(c.sum[j * WORDS]);
                    wgmma_fence();
                }
                wgmma<F::BF16, NT>(acc, a[2], b[2], a[3], b[3], at + 2, !F::HALVES);
                wgmma_commit();
                if constexpr (F::GROUPS > 1)
                    if (j % PARTS == PARTS - 1) {
                        wgmma_ends<NT>(acc);
                        add_sums(c.sum[j / PARTS * WORDS + F::HALVES]);
                    }
                if constexpr (F::OFFSETS) add_offsets(x_at(x, j), c.sum[j * WORDS + WORDS - 1]);
            }
            if constexpr (F::GROUPS == 1) wgmma_ends<NT>(acc);
        } else {
            if (begins) from_nothing();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 a[4], b[4];
                F::unpack(a, c.v[0], j, c.factor[0][j / PARTS]);
                F::unpack(b, c.v[1], j, c.factor[1][j / PARTS]);
                u32 at = x_at(x, j);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint4 v = load_matrices(at + n * 1024);
                    mma<F::BF16>(acc[n], a[0], b[0], a[1], b[1], v.x, v.y);
                    if constexpr (F::HALVES) {
                        add(n, acc[n], c.sum[j * WORDS]);
                        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
                    }
                    mma<F::BF16>(acc[n], a[2], b[2], a[3], b[3], v.z, v.w);
                }
                if constexpr (F::GROUPS > 1)
                    if (j % PARTS == PARTS - 1) {
                        add_sums(c.sum[j / PARTS * WORDS + F::HALVES]);
                        from_nothing();
                    }
                if constexpr (F::OFFSETS) add_offsets(at, c.sum[j * WORDS + WORDS - 1]);
            }
        }
        if constexpr (F::GROUPS == 1)
            if (left == 0 || step + 1 == m.steps) add_sums(F::INTEGERS ? c.sum[0] : f);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        into = into + 1 == STAGES ? 0 : into + 1;
    }
    constexpr int ROW = 68;  // gates and ups of 64 columns, and as much more as keeps lanes in different banks
    float2 b = biases(m, row), *sums = (float2*)shared;
    if (!DOWN) __syncthreads();  // nobody reads codes or activations any more
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int index = n * 8 + 2 * t + i, at = tile.first + index;
            float low = total[n][i] + b.x, high = total[n][i + 2] + b.y;
            if (!DOWN) sums[index * ROW + warp * 8 + g] = make_float2(low, high);
            else if (own < strips && at < tile.end)
                ((u32*)(p.out + (i64)p.order[at] * p.rows))[strip * 8 + g] = to_bf16x2(low, high);
        }
    if (DOWN) return;
    __syncthreads();
    // A thread stores four of a row that lie together.
    int inner = p.rows / 2, first = blockIdx.x % ((strips + 7) / 8) * 64, i = unit / 2, half = unit & 1;
#pragma unroll 1
    for (int index = position; index < tile.end - tile.first; index += 16) {
        float h[2][2];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = F::column(i, half, e);
            float2 v = sums[index * ROW + column];
            h[e / 2][e & 1] = first + column < inner ? gated(v.x, v.y, p.limit, p.clamped) : 0;
        }
        u16* out = p.out + F::unit_place((i64)(tile.first + index) * padded(inner), first, i, half);
        *(uint2*)out = make_uint2(F::activations(h[0][0], h[0][1]), F::activations(h[1][0], h[1][1]));
    }
    if (strip + 1 == strips)
        for (int at = tile.first + lane; at < tile.end; at += 32) store_padding(p, at);
}
template <int T, int STAGES, bool DOWN>
DEV void tiles(const Product& p, u8* room) {
    launch_dependents();
    const int* place = p.places + blockIdx.x / ((p.rows / 16 + 7) / 8) * 3;
    Tile tile = {slot_of(p, load_fresh(place)), load_fresh(place + 1), load_fresh(place + 2)};
    if (tile.slot < 0) {
        if (DOWN) wait_before();  // this kernel ends no sooner than the one before it
        return;
    }
    tile.end = min(tile.end, tile.first + T);
    int count = tile.end - tile.first;
    if constexpr (T > 64) if (count > 64) return tile_product<T, T, STAGES, DOWN>(p, tile, room);
    if constexpr (T > 16) {
        if (count > 32) return tile_product<64, T, STAGES, DOWN>(p, tile, room);
        if (count > 16) return tile_product<32, T, STAGES, DOWN>(p, tile, room);
    }
    if (T > 64 || count > 8) return tile_product<16, T, STAGES, DOWN>(p, tile, room);
    if constexpr (T <= 64) tile_product<8, T, STAGES, DOWN>(p, tile, room);
}

KERNEL(256, 3) experts_gate_up_16(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<16, F::STAGES_16, false>(p, room); }
KERNEL(256, 2) experts_gate_up_64(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<64, F::STAGES_64, false>(p, room); }
KERNEL(256, 1) experts_gate_up_128(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<128, F::STAGES_128, false>(p, room); }
KERNEL(256, 3) experts_down_16(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<16, F::STAGES_16, true>(p, room); }
KERNEL(256, 2) experts_down_64(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<64, F::STAGES_64, true>(p, room); }
KERNEL(256, 1) experts_down_128(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); tiles<128, F::STAGES_128, true>(p, room); }
