// Products of many rows whose sums have one order (triton/ordered_linear.py), for compute capability 9.0.
//
// A block of threads multiplies tiles of rows x channels, one after another: one thread has the tensor memory
// accelerator copy x and w to shared memory, STAGES steps ahead, and GROUPS warpgroups multiply, each some of the rows.
// Each chunk of the inner dimension is summed from zero and added to the previous ones, in registers. Or a cluster of
// blocks multiplies one tile, each block one chunk, and each block adds up the chunks of a quarter of the rows.
//
// The last tiles of a matrix begin earlier, overlapping the previous ones, as copies out of bounds are slow. A tile
// that is larger than the matrix copies what exists; the rest of its shared memory has arbitrary contents, which are
// multiplied but not stored.
//
// With GATED w is two matrices, one after the other, and a tile has half of its channels of each: silu(first) * second
// is stored, rounded as by separate kernels.
//
// Defined at compilation: CHANNELS per tile (a multiple of 8, with GATED of 16), HALVES (groups of 64 rows per
// warpgroup), GROUPS, STAGES, CHUNKS, CLUSTER (CHUNKS, or 1), TYPE (BFLOAT16 or FLOAT16), HAS_BIAS, GATED, and the sums
// of instructions.cuh.
#include "instructions.cuh"

constexpr int STEP = 64;  // columns of the inner dimension per step: 128 bytes, the span of a swizzle
constexpr int BAND = 8;   // row tiles computed concurrently on the same channels, which then stay in the cache
constexpr int ROWS = 64 * HALVES * GROUPS;
constexpr int STORED = GATED ? CHANNELS / 2 : CHANNELS;  // channels of a tile that are stored
constexpr int X_BYTES = ROWS * STEP * 2, W_BYTES = CHANNELS * STEP * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int CONSUMERS = 128 * GROUPS;  // threads
constexpr bool SPREAD = CLUSTER > 1;
// A whole warpgroup, of which one thread copies, releases registers for the others. A block has the registers that all
// of its threads start with, a multiple of 8 each: a request for more than were released would wait forever.
constexpr int THREADS = CONSUMERS + 128;
constexpr int REGISTERS = 65536 / THREADS / 8 * 8, FEW_REGISTERS = 24;
constexpr int MANY_REGISTERS = (REGISTERS * (GROUPS + 1) - FEW_REGISTERS) / GROUPS / 8 * 8;
constexpr bool MOVE_REGISTERS = GROUPS > 1;  // otherwise all threads start with the maximum

struct Product {
    Map x, w;
    const u16* bias;
    u16* out;
    int rows, channels, inner, chunk;  // channels: of out, which are half of w's with GATED
};

DEV u32 packed(float low, float high) { return TYPE == BFLOAT16 ? to_bf16x2(low, high) : to_half2(low, high); }
DEV float widened(u16 value) { return TYPE == BFLOAT16 ? __uint_as_float(u32(value) << 16) : from_half(value); }

struct Ring {  // the current stage
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

struct Place {
    int row, channel;  // first row and first channel of a tile
};

// Returns the place of a tile: tiles of a band of rows follow each other, then those of the next channels.
DEV Place place(const Product& a, int tile, int row_tiles, int channel_tiles) {
    int band = tile / (BAND * channel_tiles), within = tile % (BAND * channel_tiles);
    int height = min(row_tiles - band * BAND, BAND);
    const int row = (band * BAND + within % height) * ROWS, channel = within / height * STORED;
    return {max(min(row, a.rows - ROWS), 0), max(min(channel, a.channels - STORED), 0)};
}

// Adds the bias of a thread's channels, 2 of every 8 from `channel` on, to the sums of its two rows.
DEV void add_bias(const Product& a, float (&d)[16], int channel, int end) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int at = channel + i / 2 * 8 + (threadIdx.x & 3) * 2 + i % 2;
        const float more = HAS_BIAS && at < end ? widened(a.bias[at]) : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float& sum = d[i / 2 * 4 + 2 * half + i % 2];
            sum += 0.0f;
            if (HAS_BIAS) sum += more;
        }
    }
}

DEV float rounded(float value) { return widened((u16)packed(value, 0)); }

// Stores 32 channels, up to `end`, of the two rows (8 apart) of a thread's sums, which are 2 of every 8 channels.
// Threads of a quad exchange sums so that each stores 8 channels at a time. `up`: with GATED, the second matrix's sums.
DEV void store(const Product& a, float (&d)[16], float (&up)[16], int row, int channel, int end) {
    const int quarter = threadIdx.x & 3;
    add_bias(a, d, channel, end);
    if (GATED) {
        add_bias(a, up, channel + a.channels, end + a.channels);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float first = rounded(d[i]);
            d[i] = rounded(first * sigmoid(first)) * rounded(up[i]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = packed(d[4 * i + 2 * half], d[4 * i + 2 * half + 1]);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 other = __shfl_xor_sync(~0u, quarter & 1 ? p[i] : p[i + 1], 1);
            (quarter & 1 ? p[i] : p[i + 1]) = other;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 other = __shfl_xor_sync(~0u, quarter & 2 ? p[i] : p[i + 2], 2);
            (quarter & 2 ? p[i] : p[i + 2]) = other;
        }
        const int to = row + 8 * half, at = channel + 8 * quarter;
        if (to < a.rows && at < end)
            *reinterpret_cast<uint4*>(a.out + size_t(to) * a.channels + at) = make_uint4(p[0], p[1], p[2], p[3]);
    }
}

// Adds up chunks, one from each block of the cluster. This block adds those of 16 rows of each warpgroup, with 32
// channels per warp at a time. `row`: the warpgroup's first row.
DEV void add_up(const Product& a, const float (&sums)[SUMS], u32 memory, int row, int channel, int end) {
    constexpr int PIECE_BYTES = 32 * 16, ROWS_BYTES = SUMS / 4 * PIECE_BYTES;  // a warp's sums: 4 per thread; all
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, self = blockIdx.x % CLUSTER;
    sync_first<CONSUMERS>();  // tiles are no longer read
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        put(memory + warp * ROWS_BYTES + i / 4 * PIECE_BYTES + lane * 16, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    meet_cluster();
    const u32 from = memory + (warp / 4 * 4 + self) * ROWS_BYTES + lane * 16;
#pragma unroll 1
    for (int first = warp % 4 * 32; first < STORED; first += 128) {
        float total[16] = {}, up[16] = {};
        auto add = [&](float (&to)[16], int begin) {
#pragma unroll
            for (int part = 0; part < CLUSTER; part++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (STORED % 32 == 0 || first + 8 * i < STORED) {
                        const float4 more = fetch(from + (begin / 8 + i) * PIECE_BYTES, part);
                        to[4 * i] += more.x, to[4 * i + 1] += more.y, to[4 * i + 2] += more.z, to[4 * i + 3] += more.w;
                    }
        };
        add(total, first);
        if (GATED) add(up, STORED + first);
        store(a, total, up, row + self * 16 + lane / 4, channel + first, end);
    }
    meet_cluster();  // keeps shared memory valid until other blocks have read it
}

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) ordered_gemm(const __grid_constant__ Product a) {
    DYNAMIC_SHARED(room);
    const u32 memory = shared_address(room), full = memory + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const int row_tiles = (a.rows + ROWS - 1) / ROWS, channel_tiles = (a.channels + STORED - 1) / STORED;
    const int tiles = row_tiles * channel_tiles, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const int begin = SPREAD ? blockIdx.x % CLUSTER * a.chunk : 0, end = SPREAD ? min(begin + a.chunk, a.inner) : a.inner;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            make_barrier(full + 8 * i, 1);
            make_barrier(empty + 8 * i, CONSUMERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        if constexpr (MOVE_REGISTERS) give_registers<FEW_REGISTERS>();
        if (threadIdx.x == CONSUMERS) {
            const int steps = (end - begin + STEP - 1) / STEP;
            const int bytes = (min(a.rows, ROWS) + min(a.channels, STORED) * (1 + GATED)) * STEP * 2;
            auto copy_w = [&](int stage, int channel, int step) {
                expect(full + 8 * stage, bytes);
                const u32 to = memory + stage * STAGE_BYTES + X_BYTES;
                copy_tile(to, a.w, begin + step * STEP, channel, full + 8 * stage);
                if (GATED) copy_tile(to + STORED * STEP * 2, a.w, begin + step * STEP, channel + a.channels, full + 8 * stage);
            };
            // Weights are copied while the kernel that computes x still runs.
            const int ahead = min(steps, STAGES);
            for (int i = 0; i < ahead; i++) copy_w(i, place(a, first, row_tiles, channel_tiles).channel, i);
            wait_before();
            Ring ring;
            for (int tile = first; tile < tiles; tile += stride) {
                const Place at = place(a, tile, row_tiles, channel_tiles);
                for (int i = 0; i < steps; i++) {
                    if (tile > first || i >= ahead) {
                        await(empty + 8 * ring.stage, ring.phase ^ 1);
                        copy_w(ring.stage, at.channel, i);
                    }
                    copy_tile(memory + ring.stage * STAGE_BYTES, a.x, begin + i * STEP, at.row, full + 8 * ring.stage);
                    ring.advance();
                }
            }
        }
    } else {
        if constexpr (MOVE_REGISTERS) take_registers<MANY_REGISTERS>();
        const int group = warp / 4;
        auto release = [&](int stage) {
            if (lane == 0) arrive(empty + 8 * stage);
        };
        Ring ring;
        for (int tile = first; tile < tiles; tile += stride) {
            float sums[HALVES][SUMS], total[HALVES][SUMS];
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int i = 0; i < SUMS; i++) sums[half][i] = total[half][i] = 0;
#pragma unroll 1
            for (int chunk = begin; chunk < end; chunk += a.chunk) {
                const int steps = (min(a.chunk, end - chunk) + STEP - 1) / STEP;
                int before = 0;
#pragma unroll 1
                for (int i = 0; i < steps; i++) {
                    await(full + 8 * ring.stage, ring.phase);
                    const u32 x = memory + ring.stage * STAGE_BYTES;
                    const u64 left = tile_operand(x + group * (64 * HALVES) * STEP * 2), right = tile_operand(x + X_BYTES);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < STEP / 16; k++)
#pragma unroll
                        for (int half = 0; half < HALVES; half++)
                            multiply<TYPE>(sums[half], left + half * (64 * STEP * 2 >> 4) + 2 * k, right + 2 * k, i | k);
                    wgmma_commit();
                    if (i > 0) {
                        wgmma_wait<1>();
                        release(before);
                    }
                    before = ring.stage;
                    ring.advance();
                }
                wgmma_wait<0>();
                for (int half = 0; half < HALVES; half++) settle(sums[half]);
                release(before);
                if (CHUNKS > 1 && !SPREAD)
#pragma unroll
                    for (int half = 0; half < HALVES; half++)
#pragma unroll
                        for (int i = 0; i < SUMS; i++) total[half][i] += sums[half][i];
            }
            const Place at = place(a, tile, row_tiles, channel_tiles);
            const int row = at.row + group * (64 * HALVES), last = min(at.channel + STORED, a.channels);
            if (SPREAD) {
                add_up(a, sums[0], memory, row, at.channel, last);
                return;  // a cluster has one tile
            }
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int i = 0; i < STORED / 2; i += 16) {
                    float part[16], up[16];
                    auto& from = CHUNKS > 1 ? total[half] : sums[half];
#pragma unroll
                    for (int j = 0; j < 16; j++) {
                        part[j] = i + j >= STORED / 2 ? 0 : from[i + j];
                        up[j] = !GATED || i + j >= STORED / 2 ? 0 : from[STORED / 2 + i + j];
                    }
                    store(a, part, up, row + 64 * half + warp % 4 * 16 + lane / 4, at.channel + 2 * i, last);
                }
        }
    }
}
