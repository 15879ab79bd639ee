// Products with integer weights stored as codes, for compute capability 9.0: w = scale * (code - zero) + offset.
//
// A tile is 16 channels by a step of 128 inputs, contiguous: codes, then scales (kernels/cuda/coded_linear.py packs
// it). A lane's 32-bit words of codes are its left operands of mma.m16n8k16: one word for 16 inputs of 4 bits, two for
// 8. Codes less their zeros, times UNIT, are exact in bfloat16 and float16. The inputs of a group (128 / GROUPS, or the
// whole step) are summed from zero and, times the group's scale, added to the sum of a chunk in float32. FOLDED left
// operands are weights instead, rounded to bfloat16, and a chunk is one sum. A chunk is a number of steps, and sums of
// chunks are added in order. Chunks are a constant of the matrix, so the bits do not depend on which warps compute them,
// on the number of rows of x, or on whether mma or wgmma multiplies.
//
// Defined at compilation: BITS per code, GROUPS per step (1, 2, 4 or 8), SCALES (below), ZEROS (a byte per channel and
// group; otherwise the zero is half the range of a code), MIDDLE (where offsets exist, the number that a code at half
// of its range stands for), X_BF16 (otherwise x is float16).
#include "instructions.cuh"

enum { HALF, BFLOAT, SINGLE, PAIR, SUPER, SIGNED, FOLDED_BFLOAT };  // SCALES
constexpr bool OFFSETS = SCALES == PAIR || SCALES == SUPER;
constexpr bool FOLDED = SCALES == FOLDED_BFLOAT;  // bfloat16 scales are factors of left operands
static_assert(!FOLDED || (BITS == 4 && X_BF16 && !ZEROS), "scales are folded where this is exact up to one rounding");
constexpr int STEP = 128;
constexpr int VECTORS = BITS / 2;  // vectors of 16 bytes per lane in the codes of a tile
constexpr int CODE_BYTES = VECTORS * 512;
// Bytes per pair of channels and group: two scales; or two float16 (scale, offset); or two (scale, offset) as bytes,
// with float16 factors, two (scale, offset), for the pair's step; or two signed bytes as scales, likewise.
constexpr int PAIR_BYTES = SCALES == SINGLE || SCALES == PAIR ? 8 : SCALES == SIGNED ? 2 : 4;
constexpr int FACTOR_BYTES = SCALES == SUPER ? 64 : SCALES == SIGNED ? 32 : 0;
constexpr int ZEROS_AT = CODE_BYTES + FACTOR_BYTES + GROUPS * 8 * PAIR_BYTES;
constexpr int TILE = ZEROS_AT + (ZEROS ? GROUPS * 16 : 0);
constexpr int CHUNKS = 8;  // maximum number of chunks

// Kernel arguments; must match kernels/cuda/coded_linear.py.
struct Product {
    Map map;            // x as [depth / 64][rows][64]
    const u16* x;       // [rows][depth], rows x_stride elements apart
    const u8* tiles;    // [channels / 16][steps][TILE]
    const u16* bias;    // [channels], or null
    float* sums;        // sums of x over groups, [steps][GROUPS][sums_row]; used with OFFSETS
    u16* out;
    i64 x_stride;
    int rows, channels, steps, chunk, sums_row, stages;  // chunk: steps per chunk
    int halves, gated;  // pairs have a channel of each half; gated: out is silu(first half) * second half
    int spread;         // blocks per cluster, which share the chunks of a tile: 1, 2, 4 or 8
};

DEV float low_number(u32 v) { return X_BF16 ? __uint_as_float(v << 16) : from_half(v & 0xFFFF); }
DEV u32 rounded(float low, float high) { return X_BF16 ? to_bf16x2(low, high) : to_half2(low, high); }
DEV u32 word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

// A code of up to 8 bits is the low bits of a number of the type of x whose other bits are zero: code * 2**-133 in
// bfloat16, code * 2**-24 in float16. Times a power of two that the type holds, this is code * UNIT. Sums are of
// products with such operands; a power of two changes no rounding, and store_sums divides by UNIT.
constexpr float UNIT = FOLDED ? 0x1p-33f : X_BF16 ? 0x1p-6f : 0x1p-9f;
constexpr u32 TO_UNIT = X_BF16 ? 0x7F007F00u : 0x78007800u;         // two factors, from the lowest bits
constexpr u32 FOURTH_TO_UNIT = X_BF16 ? 0x7D007D00u : 0x68006800u;  // from the fourth bit on: a 16th of that
constexpr u32 LESS_HALF = BITS == 4 ? (X_BF16 ? 0xBE00BE00u : 0xA400A400u) : (X_BF16 ? 0xC000C000u : 0xB400B400u);
DEV u32 fma2(u32 a, u32 b, u32 c) { return X_BF16 ? fma_bf16x2(a, b, c) : fma_half2(a, b, c); }
// FOLDED: powers of two that scales are multiplied by, which suit scales from 2**-90 to 2**27.
constexpr u32 FOLDED_TO_UNIT = 0x71807180u, FOLDED_FOURTH = 0x6F806F80u, FOLDED_LESS = 0xB080B080u;  // 2**100, 2**96, -2**-30

// The factors of a step's scales and offsets for a lane's two channels (SUPER and SIGNED).
struct Factors { float scale[2], offset[2]; };
DEV Factors read_factors(const u8* tile, int g) {
    Factors r = {};
    const u8* at = tile + CODE_BYTES;
    uint2 two = make_uint2(0, 0);
    if (SCALES == SUPER) two = *(const uint2*)(at + g * 8);
    if (SCALES == SIGNED) two.x = *(const u32*)(at + g * 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 own = i ? two.y : two.x;
        if (SCALES == SUPER) r.scale[i] = from_half(own & 0xFFFF), r.offset[i] = from_half(own >> 16) * UNIT;
        if (SCALES == SIGNED) r.scale[i] = from_half(two.x >> 16 * i & 0xFFFF);
    }
    return r;
}
// Returns factor * (byte `which` of a word), exact as float16 times 8 bits fits into float32: the byte becomes the low
// bits of 2**23, which the sum subtracts again. Flipping the top bit of SIGNED bytes raises them by 128.
DEV float times_byte(float factor, u32 word, int which) {
    constexpr float LARGE = 8388608.0f;
    if (SCALES == SIGNED) word ^= 0x80808080u;
    float product = fmaf(factor, __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + which)), -factor * LARGE);
    return SCALES == SIGNED ? fmaf(factor, -128.0f, product) : product;
}
// A group's numbers for a lane's two channels: factors of codes in the lowest bits and from the fourth bit on, what is
// added to these products, scales, and offsets * UNIT.
struct Group { u32 low[2], fourth[2], less[2]; float scale[2], offset[2]; };
DEV Group read_group(const u8* tile, const Factors& factors, int group, int g) {
    Group r;
    const u8* at = tile + CODE_BYTES + FACTOR_BYTES + (group * 8 + g) * PAIR_BYTES;
    u32 zeros = ZEROS ? *(const u16*)(tile + ZEROS_AT + (group * 8 + g) * 2) : 0;
    uint2 two = make_uint2(0, 0);  // .x: the lane's first channel, or both; .y: its second
    if (SCALES == SINGLE || SCALES == PAIR) two = *(const uint2*)at;
    else if (SCALES == SIGNED) two.x = *(const u16*)at;
    else two.x = *(const u32*)at;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 own = i ? two.y : two.x;
        r.less[i] = ZEROS ? fma2((zeros >> 8 * i & 255) * 0x00010001u, TO_UNIT ^ 0x80008000u, 0) : LESS_HALF;
        r.offset[i] = 0;
        r.low[i] = TO_UNIT, r.fourth[i] = FOURTH_TO_UNIT;
        if (FOLDED) {
            const u32 both = __byte_perm(two.x, 0, i ? 0x3232 : 0x1010);
            r.low[i] = fma2(both, FOLDED_TO_UNIT, 0), r.fourth[i] = fma2(both, FOLDED_FOURTH, 0);
            r.less[i] = fma2(both, FOLDED_LESS, 0);
        }
        if (SCALES == HALF) r.scale[i] = from_half(two.x >> 16 * i & 0xFFFF);
        if (SCALES == BFLOAT || FOLDED) r.scale[i] = __uint_as_float(i ? two.x & 0xFFFF0000u : two.x << 16);
        if (SCALES == SINGLE) r.scale[i] = __uint_as_float(own);
        if (SCALES == PAIR) r.scale[i] = from_half(own & 0xFFFF), r.offset[i] = from_half(own >> 16) * UNIT;
        if (SCALES == SUPER)
            r.scale[i] = times_byte(factors.scale[i], two.x, 2 * i), r.offset[i] = times_byte(factors.offset[i], two.x, 2 * i + 1);
        if (SCALES == SIGNED) r.scale[i] = times_byte(factors.scale[i], two.x, i);
        // Codes are relative to half of their range, so the offset is moved accordingly.
        if (OFFSETS) r.offset[i] = fmaf(r.scale[i], (float)MIDDLE * UNIT, r.offset[i]);
    }
    return r;
}

// Makes the left operand of the step's j-th 16 inputs: rows g and g + 8, two inputs from 2 t and two from 8 + 2 t on.
DEV void operand(u32 (&a)[4], const uint4 (&v)[VECTORS], int j, const Group& group) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (BITS == 4) {
            u32 w = word_of(v[j / 4], j % 4) >> 8 * (i / 2);
            a[i] = i & 1 ? fma2(w & 0x00F000F0u, group.fourth[1], group.less[1]) : fma2(w & 0x000F000Fu, group.low[0], group.less[0]);
        } else {
            u32 w = word_of(v[j / 2], j % 2 * 2 + i / 2);
            a[i] = fma2(i & 1 ? __byte_perm(w, 0, 0x4341) : w & 0x00FF00FFu, TO_UNIT, group.less[i & 1]);
        }
    }
}
DEV void read_codes(uint4 (&v)[VECTORS], u32 at) {  // at: the lane's first ones
#pragma unroll
    for (int i = 0; i < VECTORS; i++) v[i] = load_shared(at + i * 512);
}

DEV float gate(float first, float second) {  // rounded as when products and activation are separate kernels
    first = low_number(rounded(first, 0)), second = low_number(rounded(second, 0));
    return low_number(rounded(first * (1.0f / (1.0f + fast_exp(-first))), 0)) * second;
}
// Stores a lane's sums of eight rows by a strip of 16 channels: rows 2 t and 2 t + 1, then those of its second channel.
DEV void store_sums(const Product& p, const float* c, int strip, int row) {
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3, half = p.channels / 2;
    int first = p.halves ? strip * 8 + g : strip * 16 + 2 * g, second = p.halves ? first + half : first + 1;
    float b0 = p.bias ? low_number(p.bias[first]) : 0, b1 = p.bias ? low_number(p.bias[second]) : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        i64 at = row + 2 * t + i;
        if (at >= p.rows) continue;
        float low = fmaf(c[i], 1 / UNIT, b0), high = fmaf(c[i + 2], 1 / UNIT, b1);
        if (p.gated) p.out[at * half + first] = (u16)rounded(gate(low, high), 0);
        else if (!p.halves) *(u32*)(p.out + at * p.channels + first) = rounded(low, high);
        else {
            u32 both = rounded(low, high);
            p.out[at * p.channels + first] = (u16)both, p.out[at * p.channels + second] = (u16)(both >> 16);
        }
    }
}

#define KERNEL(THREADS, BLOCKS) extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void

// Adds a group's sums of codes times x (dot), and of x (sums), to those of a chunk; with EVERY = 2, of even rows only.
template <int EVERY = 1>
DEV void add_group(float (&acc)[4], const float (&dot)[4], const Group& group, float2 sums) {
#pragma unroll
    for (int e = 0; e < 4; e += EVERY) {
        acc[e] = fmaf(dot[e], group.scale[e / 2], acc[e]);
        if (OFFSETS) acc[e] = fmaf(e & 1 ? sums.y : sums.x, group.offset[e / 2], acc[e]);
    }
}

// Sums x over groups, by the same instruction as few_rows uses: one warp per 8 rows of a step.
KERNEL(128, 8) group_sums(const __grid_constant__ Product p) {
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3, unit = blockIdx.x * 4 + threadIdx.x / 32;
    int step = unit % p.steps, row = unit / p.steps * 8;
    constexpr u32 ONES = X_BF16 ? 0x3F803F80u : 0x3C003C00u;
    launch_dependents();
    wait_before();
    if (row >= p.sums_row) return;
    const u16* x = p.x + min(row + g, p.rows - 1) * p.x_stride + step * STEP + 2 * t;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        float c[4] = {};
#pragma unroll
        for (int j = 0; j < 8 / GROUPS; j++) {
            const u16* at = x + (group * (8 / GROUPS) + j) * 16;
            mma<X_BF16>(c, ONES, ONES, ONES, ONES, *(const u32*)at, *(const u32*)(at + 8));
        }
        if (g == 0) *(float2*)(p.sums + (i64)(step * GROUPS + group) * p.sums_row + row + 2 * t) = make_float2(c[0], c[1]);
    }
}

// Multiplies up to 8 NT rows: a block has WC strips of 16 channels, one warp each, and WK teams of such warps along the
// inputs. A team has a ring of stages, each with the rows of x (boxes of 64 columns, swizzled) and tiles of TURN steps;
// sums of chunks are combined in shared memory. A block multiplies several tiles one after another, and copies those of
// the next one while it multiplies. ONE: x has one row, and groups have 32 inputs with offsets.
constexpr int TURN = 2;  // steps per stage; a chunk is a multiple of it
template <int NT, int WC, int WK, bool ONE = false>
DEV void few_rows(const Product& p, u8* room) {
    constexpr int ROWS = NT * 8, PARTS = CHUNKS * WC * NT * 32, BUFFERS = NT == 1 ? 2 : 1;  // of sums of chunks
    constexpr bool OWN_SUMS = OFFSETS && NT == 1;  // otherwise group_sums has computed them
    constexpr int SUMS = OFFSETS && !OWN_SUMS ? GROUPS * ROWS * 4 : 0, STRIP = TURN * TILE, TILES = WC * STRIP + TURN * SUMS;
    constexpr u32 ONES = X_BF16 ? 0x3F803F80u : 0x3C003C00u;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, team = warp / WC, member = warp % WC, stages = p.stages;
    int row_tiles = (p.rows + ROWS - 1) / ROWS, strips = p.channels / 16, tiles = row_tiles * ((strips + WC - 1) / WC);
    int box = NT == 1 ? min(ROWS, p.rows) : ROWS, x_bytes = (TURN * box * 256 + 1023) & ~1023;
    u32 memory = shared_address(room), xs = memory + team * stages * x_bytes;
    u32 ring = memory + WK * stages * x_bytes + team * stages * TILES;
    u32 full = memory + WK * stages * (x_bytes + TILES) + team * stages * 16, empty = full + stages * 8;
    float4* parts = (float4*)(room + WK * stages * (x_bytes + TILES + 16));
    int share = p.chunk * (CHUNKS / WK), begin = team * share, steps = max(0, min(share, p.steps - begin));
    bool leads = member == 0 && lane == 0;

    if (leads) {
#pragma unroll 1
        for (int i = 0; i < stages; i++) make_barrier(full + i * 8, 1), make_barrier(empty + i * 8, WC);
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    // What is copied next: a tile, its first channels and rows, and the steps of it that are not copied yet.
    i64 strip_bytes = (i64)p.steps * TILE;
    struct Next { int tile, left, layer, row, last; const u8* from; };
    auto first_of = [&](int tile) {
        int strip = tile / row_tiles * WC;
        return Next{steps ? tile : tiles, steps, begin * 2, tile % row_tiles * ROWS, strips - 1 - strip, p.tiles + strip * strip_bytes + (i64)begin * TILE};
    };
    Next next = first_of(blockIdx.x), next_x = next;
    auto bring_tiles = [&](Next& n, u32 to, u32 barrier) {
        int bytes = min(TURN, n.left) * TILE;
        expect(barrier, TURN * (box * 256 + SUMS) + WC * bytes);
#pragma unroll
        for (int m = 0; m < WC; m++) copy_range(to + m * STRIP, n.from + min(m, n.last) * strip_bytes, bytes, barrier);
    };
    auto bring_x = [&](const Next& n, u32 to, u32 to_sums, u32 barrier) {
        copy_box(to, p.map, n.row, n.layer, barrier);
        if (SUMS)
            for (int g = 0; g < TURN * GROUPS; g++)  // memory for a whole turn exists after the last step
                copy_range(to_sums + g * ROWS * 4, p.sums + (i64)(n.layer / 2 * GROUPS + g) * p.sums_row + n.row, ROWS * 4, barrier);
    };
    auto advance = [&](Next& n) {
        n.from += STRIP, n.layer += TURN * 2, n.left -= TURN;
        if (n.left <= 0) n = first_of(n.tile + gridDim.x);
    };
    if (leads)
#pragma unroll 1
        for (int i = 0; i < stages && next.tile < tiles; i++) bring_tiles(next, ring + i * TILES, full + i * 8), advance(next);
    wait_before();
    if (leads)
#pragma unroll 1
        for (int i = 0; i < stages && next_x.tile < tiles; i++)
            bring_x(next_x, xs + i * x_bytes, ring + i * TILES + WC * STRIP, full + i * 8), advance(next_x);

    // Offset of a lane's row of the matrices of x in each box; rows past the end repeat the last row.
    constexpr int BOXES = NT == 1 ? 2 * TURN : 1;
    u32 rows_at[NT][BOXES];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            int at = i * box + min(n * 8 + (lane & 7), box - 1);
            rows_at[n][i] = kept(at * 128 + ((lane / 8) ^ (at & 7)) * 16);
        }
    // ONE: one matrix holds the row's inputs of the eight groups of a turn, which are summed together.
    u32 groups_at = ONE ? kept((lane & 7) / 2 * 128 + (((lane & 1) * 4 + lane / 8) ^ (lane & 7) / 2) * 16) : 0;
    u32 own_codes = kept(member * STRIP + lane * 16), own_numbers = kept(memory - member * STRIP);
    int stage = 0, buffer = 0;
    u32 phase = 0, last_phase = 0, x = kept(xs), at = kept(ring), barrier = kept(full), last_x = 0, last = 0, last_barrier = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float acc[NT][4] = {}, total[NT][4] = {};
        int left = p.chunk, chunk = team * (CHUNKS / WK), row = tile % row_tiles * ROWS, strip = tile / row_tiles * WC;
#pragma unroll 1
        for (int i = 0; i < steps; i += TURN) {
            await(barrier, phase);
            const u8* here = room + (at - own_numbers);
            float row_sums[4] = {};
            if (ONE) {
                uint4 m = load_matrices(x + groups_at);
                mma<X_BF16>(row_sums, ONES, ONES, ONES, ONES, m.x, m.y);
                mma<X_BF16>(row_sums, ONES, ONES, ONES, ONES, m.z, m.w);
            }
#pragma unroll
            for (int turn = 0; turn < TURN; turn++) {
                if (turn > 0 && i + turn >= steps) break;
                uint4 v[VECTORS];
                read_codes(v, at + own_codes + turn * TILE);
                const Factors factors = read_factors(here + turn * TILE, lane / 4);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const Group numbers = read_group(here + turn * TILE, factors, group, lane / 4);
                    float dot[NT][4] = {}, own[4] = {};
                    auto& sums_of = FOLDED ? acc : dot;
#pragma unroll
                    for (int j = group * (8 / GROUPS); j < (group + 1) * (8 / GROUPS); j += 2) {
                        u32 a[4], b[4];
                        operand(a, v, j, numbers);
                        if (GROUPS < 8) operand(b, v, j + 1, numbers);  // otherwise it belongs to the next group
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            int in = turn * 2 + j / 4;
                            u32 from = NT == 1 ? rows_at[n][in % BOXES] : rows_at[n][0] + in * (ROWS * 128);
                            uint4 m = load_matrices(x + (from ^ (j % 4 * 32)));
                            mma<X_BF16>(sums_of[n], a[0], a[1], a[2], a[3], m.x, m.y);
                            if (GROUPS < 8) mma<X_BF16>(sums_of[n], b[0], b[1], b[2], b[3], m.z, m.w);
                            if (OWN_SUMS && !ONE) {
                                mma<X_BF16>(own, ONES, ONES, ONES, ONES, m.x, m.y);
                                if (GROUPS < 8) mma<X_BF16>(own, ONES, ONES, ONES, ONES, m.z, m.w);
                            }
                        }
                    }
#pragma unroll
                    for (int n = 0; n < NT && !FOLDED; n++) {
                        float2 sums = make_float2(own[0], own[1]);
                        if (ONE) sums.x = __shfl_sync(~0u, row_sums[group & 1], (turn * GROUPS + group) / 2);
                        if (SUMS)
                            sums = *(const float2*)(room + (at - memory) + WC * STRIP + turn * SUMS
                                                    + (group * ROWS + n * 8 + (lane & 3) * 2) * 4);
                        add_group<ONE ? 2 : 1>(acc[n], dot[n], numbers, sums);
                    }
                }
            }
            __syncwarp();
            if (WC == 1) {
                if (leads && next.tile < tiles)
                    bring_tiles(next, at, barrier), bring_x(next, x, at + WC * STRIP, barrier), advance(next);
            } else {
                if (lane == 0) arrive(barrier + stages * 8);
                // Refill the stage that all warps have read in the previous iteration.
                if (leads && last && next.tile < tiles) {
                    await(last_barrier + stages * 8, last_phase);
                    bring_tiles(next, last, last_barrier), bring_x(next, last_x, last + WC * STRIP, last_barrier), advance(next);
                }
                last_x = x, last = at, last_barrier = barrier, last_phase = phase;
            }
            x += x_bytes, at += TILES, barrier += 8;
            if (++stage == stages) stage = 0, phase ^= 1, x = xs, at = ring, barrier = full;
            left -= TURN;
            if (left == 0 || i + TURN >= steps) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    if (WK > 1)
                        parts[buffer * PARTS + ((chunk * WC + member) * NT + n) * 32 + lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
#pragma unroll
                    for (int e = 0; e < 4; e++) total[n][e] += acc[n][e], acc[n][e] = 0;
                }
                left = p.chunk, chunk++;
            }
        }
        if (WK == 1) {
#pragma unroll
            for (int n = 0; n < NT && strip + member < strips; n++) store_sums(p, total[n], strip + member, row + n * 8);
            continue;
        }
        __syncthreads();
        int chunks = (p.steps + p.chunk - 1) / p.chunk;
#pragma unroll 1
        for (int unit = warp; unit < WC * NT; unit += WC * WK) {
            int which = unit / NT, n = unit % NT;
            if (strip + which >= strips) break;
            float sum[4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                if (c < chunks) {
                    float4 part = parts[buffer * PARTS + ((c * WC + which) * NT + n) * 32 + lane];
                    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
                }
            store_sums(p, sum, strip + which, row + n * 8);
        }
        // With two buffers, what is read here is overwritten after the next __syncthreads.
        if (BUFFERS == 2) buffer ^= 1;
        else if (tile + (int)gridDim.x < tiles) __syncthreads();
    }
}
#define FEW(NT, WC, WK, BLOCKS) \
    KERNEL(WC * WK * 32, BLOCKS) few_rows_##NT##_##WC##_##WK(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); few_rows<NT, WC, WK>(p, room); }
KERNEL(256, 3) few_rows_1_1_8(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(room);
    if (OFFSETS && GROUPS == 4 && p.rows == 1) few_rows<1, 1, 8, OFFSETS && GROUPS == 4>(p, room);
    else few_rows<1, 1, 8>(p, room);
}
FEW(1, 2, 4, 3)
FEW(2, 2, 4, 2)
FEW(2, 4, 2, 2)

#include "coded_many.cuh"

// Lookup of rows of the weight, such as embeddings: one block per step of a row. Tiles must not be in halves.
struct Looked {
    const i64* ids;   // [rows]
    const u8* tiles;
    u16* out;         // [rows][steps * STEP]
    int steps;
};
KERNEL(128, 8) look_up(const __grid_constant__ Looked p) {
    int step = blockIdx.x % p.steps, k = threadIdx.x, channel = (int)(p.ids[blockIdx.x / p.steps] % 16), g = channel / 2;
    const u8* tile = p.tiles + (p.ids[blockIdx.x / p.steps] / 16 * p.steps + step) * TILE;
    Group group = read_group(tile, read_factors(tile, g), k / (STEP / GROUPS), g);
    // Where `operand` reads the code of input k: a lane's vector, its word, and a byte or half a byte of that.
    int lane = g * 4 + k % 8 / 2, half = k / 8 % 2, odd = k & 1;
    int at = BITS == 4 ? k / 64 * 512 + lane * 16 + k / 16 % 4 * 4 + odd * 2 + half
                       : k / 32 * 512 + lane * 16 + k / 16 % 2 * 8 + half * 4 + odd * 2 + channel % 2;
    int code = BITS == 4 ? tile[at] >> channel % 2 * 4 & 15 : tile[at];
    int zero = ZEROS ? tile[ZEROS_AT + k / (STEP / GROUPS) * 16 + channel] : 1 << (BITS - 1);
    float scale = group.scale[channel % 2], offset = group.offset[channel % 2] / UNIT;
    p.out[((i64)blockIdx.x * STEP) + k] = (u16)rounded(fmaf(scale, (float)(code - zero), offset), 0);
}
