// Products with integer weights stored as codes, for compute capability 9.0: w = scale * (code - zero) + offset.
//
// A tile is 16 channels by a step of 128 inputs, contiguous: codes, then scales (kernels/cuda/coded_linear.py packs
// it). A lane's 32-bit words of codes are its left operands of mma.m16n8k16: one word for 16 inputs of 4 bits, two for
// 8. Codes less their zeros are small integers, exact in bfloat16 and float16. The inputs of a group (128 / GROUPS, or
// the whole step) are summed from zero and, times the group's scale, added to the sum of a chunk in float32. A chunk is
// a number of steps, and sums of chunks are added in order. Chunks are a constant of the matrix, so the bits do not
// depend on which warps compute them, on the number of rows of x, or on whether mma or wgmma multiplies.
//
// Defined at compilation: BITS per code, GROUPS per step (1, 2, 4 or 8), SCALES (below), ZEROS (a byte per channel and
// group; otherwise the zero is half the range of a code), MIDDLE (where offsets exist, the number that a code at half
// of its range stands for), X_BF16 (otherwise x is float16).
#include "instructions.cuh"

enum { HALF, BFLOAT, SINGLE, PAIR, SUPER, SIGNED };  // SCALES
constexpr bool OFFSETS = SCALES == PAIR || SCALES == SUPER;
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

// Bits of two numbers to which codes are added: 128 + code in bfloat16, 1024 + code in float16.
constexpr u32 BASE = X_BF16 ? 0x43004300u : 0x64006400u;
DEV u32 masked(u32 codes, u32 mask) { return and_or(codes, mask, BASE); }
DEV u32 add2(u32 a, u32 b) { return X_BF16 ? fma_bf16x2(a, 0x3F803F80u, b) : hadd2(a, b); }

// A group's numbers for a lane's two channels: `less`, which is added to BASE plus the codes, scales and offsets.
struct Group { u32 less[2]; float scale[2], offset[2]; };
DEV u32 less_zero(u32 zero) {
    if (X_BF16 && BITS == 8) return rounded(128.0f - (float)zero, 128.0f - (float)zero);  // see operand
    return (BASE | 0x80008000u) | zero * 0x00010001u;
}
// Returns factor * (byte `which` of a word), exact as float16 times 8 bits fits into float32: the byte becomes the low
// bits of 2**23, which the sum subtracts again. Flipping the top bit of SIGNED bytes raises them by 128.
DEV float times_byte(float factor, u32 word, int which) {
    constexpr float LARGE = 8388608.0f;
    if (SCALES == SIGNED) word ^= 0x80808080u;
    float product = fmaf(factor, __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + which)), -factor * LARGE);
    return SCALES == SIGNED ? fmaf(factor, -128.0f, product) : product;
}
DEV Group read_group(const u8* tile, int group, int g) {
    Group r;
    const u8* at = tile + CODE_BYTES + FACTOR_BYTES + (group * 8 + g) * PAIR_BYTES;
    u32 zeros = ZEROS ? *(const u16*)(tile + ZEROS_AT + (group * 8 + g) * 2) : 0;
    uint2 two = make_uint2(0, 0), factors = make_uint2(0, 0);  // .x: the lane's first channel, .y: its second
    if (SCALES == SINGLE || SCALES == PAIR) two = *(const uint2*)at;
    else if (SCALES == SUPER) two.x = *(const u32*)at, factors = *(const uint2*)(tile + CODE_BYTES + g * 8);
    else if (SCALES == SIGNED) two.x = *(const u16*)at, factors.x = *(const u32*)(tile + CODE_BYTES + g * 4);
    else two.x = *(const u32*)at;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 own = i ? two.y : two.x, factor = i ? factors.y : factors.x;
        r.less[i] = less_zero(ZEROS ? zeros >> 8 * i & 255 : 1 << (BITS - 1));
        r.offset[i] = 0;
        if (SCALES == HALF) r.scale[i] = from_half(two.x >> 16 * i & 0xFFFF);
        if (SCALES == BFLOAT) r.scale[i] = __uint_as_float(i ? two.x & 0xFFFF0000u : two.x << 16);
        if (SCALES == SINGLE) r.scale[i] = __uint_as_float(own);
        if (SCALES == PAIR) r.scale[i] = from_half(own & 0xFFFF), r.offset[i] = from_half(own >> 16);
        if (SCALES == SUPER)
            r.scale[i] = times_byte(from_half(factor & 0xFFFF), two.x, 2 * i), r.offset[i] = times_byte(from_half(factor >> 16), two.x, 2 * i + 1);
        if (SCALES == SIGNED) r.scale[i] = times_byte(from_half(factors.x >> 16 * i & 0xFFFF), two.x, i);
        // Codes are relative to half of their range, so the offset is moved accordingly.
        if (OFFSETS) r.offset[i] = fmaf(r.scale[i], (float)MIDDLE, r.offset[i]);
    }
    return r;
}

// Makes the left operand of the step's j-th 16 inputs: rows g and g + 8, two inputs from 2 t and two from 8 + 2 t on.
DEV void operand(u32 (&a)[4], const uint4 (&v)[VECTORS], int j, const Group& group) {
    if constexpr (BITS == 4) {
        u32 w = word_of(v[j / 4], j % 4);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = add2(masked(w >> 4 * i, 0x000F000Fu), group.less[i & 1]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w = word_of(v[j / 2], j % 2 * 2 + i / 2) >> 8 * (i & 1);
            if constexpr (X_BF16) {
                // The top bit is handled separately: 128 + low bits, less 256 or 128, is the code less 128.
                a[i] = fma_bf16x2((w & 0x00800080u) ^ 0x43804380u, 0xBF80BF80u, masked(w, 0x007F007Fu));
                if (ZEROS) a[i] = add2(a[i], group.less[i & 1]);
            } else {
                a[i] = add2(masked(w, 0x00FF00FFu), group.less[i & 1]);
            }
        }
    }
}
DEV void read_codes(uint4 (&v)[VECTORS], u32 tile) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) v[i] = load_shared(tile + (i * 32 + (threadIdx.x & 31)) * 16);
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
        float low = c[i] + b0, high = c[i + 2] + b1;
        if (p.gated) p.out[at * half + first] = (u16)rounded(gate(low, high), 0);
        else if (!p.halves) *(u32*)(p.out + at * p.channels + first) = rounded(low, high);
        else {
            u32 both = rounded(low, high);
            p.out[at * p.channels + first] = (u16)both, p.out[at * p.channels + second] = (u16)(both >> 16);
        }
    }
}

#define KERNEL(THREADS, BLOCKS) extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void

// Adds a group's sums of codes times x (dot), and of x (sums), to those of a chunk.
DEV void add_group(float (&acc)[4], const float (&dot)[4], const Group& group, float2 sums) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
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
// sums of chunks are combined in shared memory.
constexpr int TURN = 2;  // steps per stage; a chunk is a multiple of it
template <int NT, int WC, int WK>
DEV void few_rows(const Product& p, u8* room) {
    constexpr int ROWS = NT * 8;
    constexpr bool OWN_SUMS = OFFSETS && NT == 1;  // otherwise group_sums has computed them
    constexpr int SUMS = OFFSETS && !OWN_SUMS ? GROUPS * ROWS * 4 : 0, STRIP = TURN * TILE, TILES = WC * STRIP + TURN * SUMS;
    constexpr u32 ONES = X_BF16 ? 0x3F803F80u : 0x3C003C00u;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, team = warp / WC, member = warp % WC, stages = p.stages;
    int row_tiles = (p.rows + ROWS - 1) / ROWS, strips = p.channels / 16;
    int row = blockIdx.x % row_tiles * ROWS, strip = blockIdx.x / row_tiles * WC, count = min(ROWS, p.rows - row);
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
    const u8* tiles = p.tiles + ((i64)strip * p.steps + begin) * TILE;
    i64 strip_bytes = (i64)p.steps * TILE;
    auto bring_tiles = [&](int i, int stage) {
        u32 barrier = full + stage * 8, to = ring + stage * TILES;
        int bytes = min(TURN, steps - i) * TILE;
        expect(barrier, TURN * (box * 256 + SUMS) + WC * bytes);
#pragma unroll
        for (int m = 0; m < WC; m++)
            copy_range(to + m * STRIP, tiles + min(m, strips - 1 - strip) * strip_bytes + i * TILE, bytes, barrier);
    };
    auto bring_x = [&](int i, int stage) {
        copy_box(xs + stage * x_bytes, p.map, row, (begin + i) * 2, full + stage * 8);
        if (SUMS)
            for (int g = 0; g < TURN * GROUPS; g++)  // memory for a whole turn exists after the last step
                copy_range(ring + stage * TILES + WC * STRIP + g * ROWS * 4,
                           p.sums + (i64)((begin + i) * GROUPS + g) * p.sums_row + row, ROWS * 4, full + stage * 8);
    };
    if (leads)
#pragma unroll 1
        for (int i = 0; i < stages && i * TURN < steps; i++) bring_tiles(i * TURN, i);
    wait_before();
    if (leads)
#pragma unroll 1
        for (int i = 0; i < stages && i * TURN < steps; i++) bring_x(i * TURN, i);

    float acc[NT][4] = {}, total[NT][4] = {};
    // Offset of a lane's row of the matrices of x in each box; rows past the end repeat the last row.
    constexpr int BOXES = NT == 1 ? 2 * TURN : 1;
    u32 rows_at[NT][BOXES];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            int at = i * box + min(n * 8 + (lane & 7), count - 1);
            rows_at[n][i] = kept(at * 128 + ((lane / 8) ^ (at & 7)) * 16);
        }
    u32 own_codes = kept(member * STRIP + lane * 16), own_numbers = kept(memory - member * STRIP);
    int left = p.chunk, chunk = team * (CHUNKS / WK), stage = 0;
    u32 phase = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i += TURN) {
        await(full + stage * 8, phase);
        u32 x = xs + stage * x_bytes, at = ring + stage * TILES;
        const u8* here = room + (at - own_numbers);
#pragma unroll
        for (int turn = 0; turn < TURN; turn++) {
            if (turn > 0 && i + turn >= steps) break;
            uint4 v[VECTORS];
#pragma unroll
            for (int j = 0; j < VECTORS; j++) v[j] = load_shared(at + own_codes + turn * TILE + j * 512);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                Group numbers = read_group(here + turn * TILE, group, lane / 4);
                float dot[NT][4] = {}, own[4] = {};
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
                        mma<X_BF16>(dot[n], a[0], a[1], a[2], a[3], m.x, m.y);
                        if (GROUPS < 8) mma<X_BF16>(dot[n], b[0], b[1], b[2], b[3], m.z, m.w);
                        if (OWN_SUMS) {
                            mma<X_BF16>(own, ONES, ONES, ONES, ONES, m.x, m.y);
                            if (GROUPS < 8) mma<X_BF16>(own, ONES, ONES, ONES, ONES, m.z, m.w);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float2 sums = make_float2(own[0], own[1]);
                    if (SUMS)
                        sums = *(const float2*)(room + (at - memory) + WC * STRIP + turn * SUMS
                                                + (group * ROWS + n * 8 + (lane & 3) * 2) * 4);
                    add_group(acc[n], dot[n], numbers, sums);
                }
            }
        }
        __syncwarp();
        if (WC == 1) {
            int next = i + stages * TURN;
            if (leads && next < steps) bring_tiles(next, stage), bring_x(next, stage);
        } else {
            if (lane == 0) arrive(empty + stage * 8);
            // Refill the stage that all warps have read in the previous iteration.
            int next = i + (stages - 1) * TURN, last = stage == 0 ? stages - 1 : stage - 1;
            if (leads && i > 0 && next < steps) {
                await(empty + last * 8, stage == 0 ? phase ^ 1 : phase);
                bring_tiles(next, last), bring_x(next, last);
            }
        }
        if (++stage == stages) stage = 0, phase ^= 1;
        left -= TURN;
        if (left == 0 || i + TURN >= steps) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (WK > 1) parts[((chunk * WC + member) * NT + n) * 32 + lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
#pragma unroll
                for (int e = 0; e < 4; e++) total[n][e] += acc[n][e], acc[n][e] = 0;
            }
            left = p.chunk, chunk++;
        }
    }
    if (WK == 1) {
        if (strip + member >= strips) return;
#pragma unroll
        for (int n = 0; n < NT; n++) store_sums(p, total[n], strip + member, row + n * 8);
        return;
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
                float4 part = parts[((c * WC + which) * NT + n) * 32 + lane];
                sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
            }
        store_sums(p, sum, strip + which, row + n * 8);
    }
}
#define FEW(NT, WC, WK, BLOCKS) \
    KERNEL(WC * WK * 32, BLOCKS) few_rows_##NT##_##WC##_##WK(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); few_rows<NT, WC, WK>(p, room); }
FEW(1, 1, 8, 3)
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
    Group group = read_group(tile, k / (STEP / GROUPS), g);
    // Where `operand` reads the code of input k: a lane's vector, its word, and a byte or half a byte of that.
    int lane = g * 4 + k % 8 / 2, half = k / 8 % 2, odd = k & 1;
    int at = BITS == 4 ? k / 64 * 512 + lane * 16 + k / 16 % 4 * 4 + odd * 2 + half
                       : k / 32 * 512 + lane * 16 + k / 16 % 2 * 8 + half * 4 + odd * 2 + channel % 2;
    int code = BITS == 4 ? tile[at] >> channel % 2 * 4 & 15 : tile[at];
    int zero = ZEROS ? tile[ZEROS_AT + k / (STEP / GROUPS) * 16 + channel] : 1 << (BITS - 1);
    float scale = group.scale[channel % 2], offset = group.offset[channel % 2];
    p.out[((i64)blockIdx.x * STEP) + k] = (u16)rounded(fmaf(scale, (float)(code - zero), offset), 0);
}
