// Arguments of the kernels of mixture.cu, and loads of the codes of an expert's weights from memory to registers.
#pragma once
#include "mixture_formats.cuh"

DEV float low_bf16(u32 v) { return __uint_as_float(v << 16); }
DEV float high_bf16(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
typedef FORMAT F;
constexpr int PARTS = 4 / F::GROUPS;  // parts of 32 inputs of a group within a step
constexpr int WORDS = 1 + F::HALVES + F::OFFSETS;  // words per group, each the factor of a sum
constexpr int SUMS = F::GROUPS * WORDS;            // sums per chunk
constexpr u32 ONES = 0x3C003C00;                   // two float16 ones

// Kernel arguments; must match kernels/cuda/mixture.py.
struct Product {
    const u16* x;                              // activations, [tokens or pairs][depth]
    const u8* codes; const u8* scales; const u16* bias;  // a stack of experts; bias may be null
    i64 stride, scale_stride, bias_stride;     // elements between experts
    const int* slots;                          // index of an expert in the stack, -1: not in it; null: all are in it
    const int* ids; const float* shares;       // experts and shares of the pairs, [tokens][k]
    const int* places; const int* order;       // tiles of pairs sorted by expert: see sort_by_expert
    u16* out;
    float limit;                               // limit of the clamped activation
    int clamped, sum, scale_row, rows, depth, k;  // sum: out has one row per token, otherwise one per pair
};
DEV int slot_of(const Product& p, int expert) { return p.slots && expert >= 0 ? load_fresh(p.slots + expert) : expert; }
DEV int padded(int width) { return (width + 127) & ~127; }  // width of a row of activations

// One expert's matrix as a warp reads it: 16 rows, of which lane g has the g-th pair: two neighbours, or with `halves`
// one of the first half of the rows and one of the second. The rows of a pair are `apart` rows apart.
struct Matrix {
    const u8* codes;
    const void* scales;
    const u16* bias;
    int row_bytes, scale_row, groups, steps, chunks;  // groups: number of groups of 32 inputs
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
// Returns the factors of a chunk's sums for the two rows of a pair.
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
// Stores one activation of a row for the second product.
DEV void store_activation(const Product& p, i64 row, int column, float gate, float up) {
    p.out[row * padded(p.rows / 2) + F::place(column)] = (u16)F::activations(gated(gate, up, p.limit, p.clamped), 0);
}
DEV void store_padding(const Product& p, i64 row) {
    int width = padded(p.rows / 2);
#pragma unroll 1
    for (int c = p.rows / 2; c < width; c++) p.out[row * width + F::place(c)] = 0;
}

// Bytes of shared memory of a warp's 16 rows for one step. MXFP4: a lane's vectors of its two rows, then a word of
// scales per row. FP8 and 8 bits: 128 bytes per row, in units of 16 bytes swizzled by the row; 4 bits: 64 bytes, also
// swizzled, so that ldmatrix gives each of four lanes its word of every unit. Integers: then the words of their groups.
constexpr int SLOT = F::VECTORS * 1024 + F::SLOT_SCALES;
struct Lines { const u8 *codes, *scales; i64 apart; int four, groups; };  // scales: of the row that this lane copies
DEV Lines lines_of(const Matrix& m, int strip) {
    int lane = threadIdx.x & 31;
    i64 row = first_row(m, strip, F::VECTORS == 1 ? lane / 4 : lane / 8);
    i64 scales = F::INTEGERS ? first_row(m, strip, lane / 4) : row;
    return {m.codes + row * m.row_bytes,
            (const u8*)m.scales + (scales + ((lane & 1) ? m.apart : 0)) * (F::INTEGERS ? m.scale_row * 4 : m.scale_row),
            m.apart * m.row_bytes, (m.halves ? 4 : 8) * m.row_bytes, m.groups};
}
// Copies the words of groups, [row of a pair][pair][group][word].
DEV void bring_words(u32 to, const Lines& lines, int step) {
    int lane = threadIdx.x & 31, row = (lane & 1) * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        int word = i + (lane >> 1 & 1);
        if (word < SUMS) copy_word_async(to + (row * SUMS + word) * 4, lines.scales + (step * SUMS + word) * 4);
    }
}
// Copies codes of a step. Past the end the last group is repeated, as all codes are finite and activations there zero.
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
    } else {  // four whole rows of 128 bytes per instruction, so that whole cache lines are read
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
struct Codes { uint4 v[2][F::VECTORS]; u32 factor[2][F::GROUPS]; float2 sum[SUMS]; };  // sum: factors of group sums
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
