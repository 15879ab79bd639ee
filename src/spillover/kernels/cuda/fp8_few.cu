// Products of up to 64 rows of x, rounded to FP8, with FP8 weights (e4m3), for compute capability 9.0. fp8_linear.cu is
// for more rows, with the same bits.
//
// Weights are the left operand of wgmma, 64 channels of 128 inputs at a time, rows of x the right one. A block of
// threads multiplies tiles of GROUPS * 64 channels by ROWS rows: one thread copies, up to all stages ahead, and GROUPS
// warpgroups multiply. A cluster of CLUSTER blocks shares a tile, one chunk each. With OWN_X the block rounds the rows
// itself and keeps them; otherwise fp8_round.cu has. With NORMED it first adds them to a residual and normalises.
//
// Defined at compilation: BLOCKED, ROWS, GROUPS, CHUNKS, CLUSTER (1 or CHUNKS), OWN_X, NORMED (inputs per row, or 0;
// only with OWN_X and without clusters), GATED, RESIDENT (blocks per multiprocessor, for which registers must suffice),
// X_BF16, and the sums of instructions.cuh.
#include "fp8_rows.cuh"
#if NORMED  // profiles recognise the start of half a layer by this name
#define fp8_linear add_rms_norm_fp8_linear
#endif

constexpr bool SPREAD = CLUSTER > 1, TOTALS = CHUNKS > 1 && !SPREAD, TWO_STEPS = BLOCKED && ROWS <= 32;
constexpr int NT = ROWS / 8, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 32;
constexpr int W_BYTES = GROUPS * 64 * STEP, X_BYTES = ROWS * STEP, STAGE = W_BYTES + (OWN_X ? 0 : X_BYTES);
constexpr int BAND = 8;       // row tiles computed concurrently on the same channels, which then stay in the cache
static_assert(OWN_X || NT % 4 == 0, "rows are stored 32 at a time");
static_assert(OWN_X && !SPREAD || !NORMED, "blocks that norm rows round all of them");
constexpr int INPUTS = NORMED;
#include "fp8_norm.cuh"

// The scales and biases of a lane's two channels.
struct Channels { float scale[2], bias[2]; };
// Returns the first of a warp's 16 channels, or of its 8 pairs of channels.
DEV int first_channel(int unit, int warp) { return unit * (GATED ? 32 : 64) + warp * (GATED ? 8 : 16); }
DEV Channels read_channels(const Product& p, int first) {
    Channels r;
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = first + lane / 4 + i * (GATED ? p.channels / 2 : 8);
        bool there = first < (GATED ? p.channels / 2 : p.channels);
        r.scale[i] = !BLOCKED && there ? __ldg(p.w_scales + at) : 1.0f;
        r.bias[i] = p.bias && there ? low_number(__ldg(p.bias + at)) : 0.0f;
    }
    return r;
}
// Stores sums of up to 32 rows by a warp's channels. Lane 4 g + t has those of rows 2 t and 2 t + 1 of each eight, for
// its two channels. Lanes exchange sums so that each stores 8 channels of a row at a time.
template <class Scales>
DEV void store(const Product& p, const float (&v)[16], const Channels& c, int first, int row, Scales x_scales) {
    constexpr int COUNT = NT < 4 ? NT : 4;
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3, width = GATED ? p.channels / 2 : p.channels;
    u32 m[8] = {};
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        float x[2] = {1.0f, 1.0f}, y[4];
        if (!BLOCKED) x[0] = x_scales(row + n * 8 + 2 * t), x[1] = x_scales(row + n * 8 + 2 * t + 1);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            y[e] = __fadd_rn(v[4 * n + e], 0.0f);
            if (!BLOCKED) y[e] = __fmul_rn(__fmul_rn(y[e], x[e & 1]), c.scale[e / 2]);
            if (p.bias) y[e] = __fadd_rn(y[e], c.bias[e / 2]);
        }
        if (GATED) m[n] = transposed(rounded(gate(y[0], y[2]), gate(y[1], y[3])));
        else m[2 * n] = transposed(rounded(y[0], y[1])), m[2 * n + 1] = transposed(rounded(y[2], y[3]));
    }
#pragma unroll
    for (int half = 0; half < (!GATED && COUNT > 2 ? 2 : 1); half++) {
        u32* q = m + 4 * half;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 other = __shfl_xor_sync(~0u, t & 1 ? q[i] : q[i + 1], 1);
            if (t & 1) q[i] = other; else q[i + 1] = other;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 other = __shfl_xor_sync(~0u, t & 2 ? q[i] : q[i + 2], 2);
            if (t & 2) q[i] = other; else q[i + 2] = other;
        }
        int n = GATED ? t : 2 * half + t / 2, to = row + n * 8 + g, at = first + (GATED ? 0 : t % 2 * 8);
        if (n < COUNT && to < p.rows && first < width) *(uint4*)(p.out + (i64)to * width + at) = make_uint4(q[0], q[1], q[2], q[3]);
    }
}

struct Place { int row, tile; };  // the first row of a tile, and the index of its channels' tile
DEV Place place(int tile, int row_tiles, int channel_tiles) {
    int band = tile / (BAND * channel_tiles), within = tile % (BAND * channel_tiles), height = min(row_tiles - band * BAND, BAND);
    return {(band * BAND + within % height) * ROWS, within / height};
}

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, RESIDENT) fp8_linear(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(room);
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, self = SPREAD ? blockIdx.x % CLUSTER : 0;
    const int row_tiles = (p.rows + ROWS - 1) / ROWS, channel_tiles = (p.channels / 64 + GROUPS - 1) / GROUPS;
    const int tiles = row_tiles * channel_tiles, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const int most_steps = SPREAD ? p.chunk : p.steps, begin = self * p.chunk, span = max(0, min(most_steps, p.steps - begin));
    // Stages, own rows of x, barriers, scales of x (after largest numbers), scales of weights, partial sums of a norm.
    const u32 memory = shared_address(room), own = memory + p.stages * STAGE, full = own + (OWN_X ? most_steps * X_BYTES : 0);
    const u32 empty = full + 8 * p.stages, scales = empty + 8 * p.stages;
    float* const x_scales = (float*)(room + (scales - memory));
    float* const w_scales = x_scales + ROWS * (BLOCKED ? (OWN_X ? most_steps : p.stages) : OWN_X ? 2 : 0);
    float* const parts = w_scales + (BLOCKED ? GROUPS * 2 * most_steps : 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS / 32);
        publish_barriers();
    }
    if (OWN_X && !BLOCKED && threadIdx.x < ROWS) x_scales[threadIdx.x] = 0;
    __syncthreads();
    launch_dependents();

    if (warp >= CONSUMERS / 32) {
        if (threadIdx.x != CONSUMERS) return;
        auto copy_w = [&](int stage, int tile, int step) {
            expect(full + 8 * stage, STAGE + (BLOCKED && !OWN_X ? ROWS * 4 : 0));
            copy_groups(memory + stage * STAGE, p.w, (begin + step) * STEP, tile * GROUPS * 4, full + 8 * stage);
        };
        // Weights are copied while the kernel that computes x still runs.
        const int ahead = min(span, p.stages);
        for (int i = 0; i < ahead; i++) copy_w(i, place(first, row_tiles, channel_tiles).tile, i);
        if (!OWN_X) wait_before();
        Ring ring;
        for (int tile = first; tile < tiles; tile += stride) {
            const Place at = place(tile, row_tiles, channel_tiles);
            for (int i = 0; i < span; i++) {
                if (tile > first || i >= ahead) {
                    await(empty + 8 * ring.stage, ring.phase ^ 1);
                    copy_w(ring.stage, at.tile, i);
                }
                if (!OWN_X) {
                    copy_tile(memory + ring.stage * STAGE + W_BYTES, p.codes_map, (begin + i) * STEP, at.row, full + 8 * ring.stage);
                    if (BLOCKED)
                        copy_range(scales + ring.stage * ROWS * 4, p.x_scales + (i64)(begin + i) * p.scales_row + at.row, ROWS * 4, full + 8 * ring.stage);
                }
                ring.advance(p.stages);
            }
        }
        return;
    }

    const int group = warp / 4;
    float* const own_w_scales = w_scales + group * 2 * most_steps;
    auto read_w_scales = [&](int tile) {  // scales for the two channels of each lane; the last tile may have fewer
        int channel = min((tile * GROUPS + group) * (GATED ? 32 : 64), (GATED ? p.channels / 2 : p.channels) - 1);
        for (int i = threadIdx.x % 128; i < (GATED ? 2 : 1) * span; i += 128) {
            int which = i / span, step = i % span;
            own_w_scales[which * most_steps + step] = __ldg(p.w_scales + (i64)((channel + which * (p.channels / 2)) / 128) * p.steps + begin + step);
        }
    };
    // Read the weights' numbers that do not depend on x.
    int at_first = place(first, row_tiles, channel_tiles).tile;
    constexpr int QUADS = (NT + 3) / 4;  // sets of 4 times 8 rows that a warp stores together
    const int unit = SPREAD ? (self + CLUSTER * warp) / QUADS : warp;  // the warp whose sums this one stores first
    Channels channels = read_channels(p, first_channel(at_first * GROUPS + unit / 4, unit % 4));
    if (BLOCKED) read_w_scales(at_first);
    uint4 norm[HELD];
    if (NORMED) read_row(norm, p.norm);
    wait_before();
    if (OWN_X) {
        auto put_scale = [&](int row, int step, float scale) { x_scales[BLOCKED ? step * ROWS + row : ROWS + row] = scale; };
        auto put_codes = [&](int row, int vector, uint2 codes) {
            int to = vector / 16 * X_BYTES + row * STEP + ((vector % 16 / 2) ^ (row & 7)) * 16 + vector % 2 * 8;
            *(uint2*)(room + (own - memory) + to) = codes;
        };
        if (NORMED)
#pragma unroll 1
            for (int row = 0; row < p.rows; row++) {  // threads may begin a row before others end the last
                uint4 held[HELD];
                norm_row(held, p, row, norm, blockIdx.x == 0, parts + row % 2 * MOST_PARTS);
                round_row(p, held, parts + 2 * MOST_PARTS, [&](int step, float scale) { put_scale(row, step, scale); },
                          [&](int vector, uint2 codes) { put_codes(row, vector, codes); });
            }
        else
            quantize<CONSUMERS>(p, 0, p.rows, begin, span, x_scales, [] { sync_first<CONSUMERS>(); }, put_scale, put_codes);
        // A block whose chunk has no inputs stores rows too, so it needs their scales.
        if (!BLOCKED && SPREAD && threadIdx.x < ROWS)
            x_scales[ROWS + threadIdx.x] = p.input_scale ? *p.input_scale : __fdiv_rn(fmaxf(x_scales[threadIdx.x], TINY), LARGEST);
        shared_is_ready();
        sync_first<CONSUMERS>();
    } else if (BLOCKED) {
        sync_warpgroup();
    }
    auto scale_of = [&](int row) { return OWN_X ? x_scales[ROWS + row] : row < p.rows ? p.x_scales[row] : 0.0f; };

    Ring ring, done;  // stages of the steps being multiplied, and of those being added
    for (int tile = first; tile < tiles; tile += stride) {
        const Place at = place(tile, row_tiles, channel_tiles);
        if (tile > first) {
            channels = read_channels(p, first_channel(at.tile * GROUPS + group, warp % 4));
            if (BLOCKED) {
                sync_warpgroup();
                read_w_scales(at.tile);
                sync_warpgroup();
            }
        }
        float sums[SUMS], others[SUMS], acc[SUMS], total[SUMS];  // sums of two steps, of a chunk, of earlier chunks
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = others[i] = acc[i] = total[i] = 0;
        auto begin_step = [&](float (&d)[SUMS], int step, bool more = false) {  // more: add to the sums in d
            await(full + 8 * ring.stage, ring.phase);
            const u32 here = memory + ring.stage * STAGE;
            const u64 a = tile_operand(here + group * 64 * STEP), b = tile_operand(OWN_X ? own + step * X_BYTES : here + W_BYTES);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) multiply<E4M3>(d, a + 2 * k, b + 2 * k, more | (k > 0));
            wgmma_commit();
            ring.advance(p.stages);
        };
        auto release = [&] {
            if (lane == 0) arrive(empty + 8 * done.stage);
            done.advance(p.stages);
        };
        auto end_chunk = [&](float (&d)[SUMS]) {
            if (TOTALS)
#pragma unroll
                for (int i = 0; i < SUMS; i++) total[i] = __fadd_rn(total[i], d[i]);
        };
        if constexpr (BLOCKED) {
            int left = p.chunk, i = 0;
            auto end_step = [&](float (&d)[SUMS], int step) {
                settle(d);
                const float* x = x_scales + (OWN_X ? step : done.stage) * ROWS + (lane & 3) * 2;
                const float w0 = own_w_scales[step], w1 = GATED ? own_w_scales[most_steps + step] : w0;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float2 s = *(const float2*)(x + n * 8);
                    acc[4 * n] = __fmaf_rn(d[4 * n], __fmul_rn(s.x, w0), acc[4 * n]);
                    acc[4 * n + 1] = __fmaf_rn(d[4 * n + 1], __fmul_rn(s.y, w0), acc[4 * n + 1]);
                    acc[4 * n + 2] = __fmaf_rn(d[4 * n + 2], __fmul_rn(s.x, w1), acc[4 * n + 2]);
                    acc[4 * n + 3] = __fmaf_rn(d[4 * n + 3], __fmul_rn(s.y, w1), acc[4 * n + 3]);
                }
                __syncwarp();
                release();
                if (TOTALS && (--left == 0 || step + 1 == span)) {
                    left = p.chunk;
                    end_chunk(acc);
#pragma unroll
                    for (int i = 0; i < SUMS; i++) acc[i] = 0;
                }
            };
            if (TWO_STEPS)
#pragma unroll 1
                for (; i + 1 < span; i += 2) {
                    begin_step(sums, i);
                    begin_step(others, i + 1);
                    wgmma_wait<1>();
                    end_step(sums, i);
                    wgmma_wait<0>();
                    end_step(others, i + 1);
                }
#pragma unroll 1
            for (; i < span; i++) {
                begin_step(sums, i);
                wgmma_wait<0>();
                end_step(sums, i);
            }
        } else {
#pragma unroll 1
            for (int from = 0; from < span; from += p.chunk) {
                const int to = min(from + p.chunk, span);
#pragma unroll 1
                for (int i = from; i < to; i++) {
                    begin_step(sums, i, i > from);
                    if (i == from) continue;
                    wgmma_wait<1>();
                    release();
                }
                wgmma_wait<0>();
                settle(sums);
                release();
                end_chunk(sums);
            }
            if (!TOTALS)
#pragma unroll
                for (int i = 0; i < SUMS; i++) acc[i] = sums[i];
        }
        if constexpr (SPREAD) {
            sync_first<CONSUMERS>();  // tiles are no longer read
#pragma unroll
            for (int n = 0; n < NT; n++)
                put(memory + ((warp * NT + n) * 32 + lane) * 16, acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]);
            meet_cluster();
#pragma unroll 1
            for (int i = self + CLUSTER * warp; i < GROUPS * 4 * QUADS; i += CLUSTER * (CONSUMERS / 32)) {
                const int from = i / QUADS, n0 = i % QUADS * 4, to = first_channel(at.tile * GROUPS + from / 4, from % 4);
                float v[16] = {};
#pragma unroll
                for (int part = 0; part < CLUSTER; part++)
#pragma unroll
                    for (int n = 0; n < (NT < 4 ? NT : 4); n++) {
                        const float4 more = fetch(memory + ((from * NT + n0 + n) * 32 + lane) * 16, part);
                        v[4 * n] = __fadd_rn(v[4 * n], more.x), v[4 * n + 1] = __fadd_rn(v[4 * n + 1], more.y);
                        v[4 * n + 2] = __fadd_rn(v[4 * n + 2], more.z), v[4 * n + 3] = __fadd_rn(v[4 * n + 3], more.w);
                    }
                if (from != unit) channels = read_channels(p, to);
                store(p, v, channels, to, at.row + n0 * 8, scale_of);
            }
            meet_cluster();  // keeps shared memory valid until other blocks have read it; a cluster has one tile
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                float v[16];
#pragma unroll
                for (int i = 0; i < 16; i++) v[i] = 16 * q + i >= SUMS ? 0 : TOTALS ? total[16 * q + i] : acc[16 * q + i];
                store(p, v, channels, first_channel(at.tile * GROUPS + group, warp % 4), at.row + q * 32, scale_of);
            }
        }
    }
}
