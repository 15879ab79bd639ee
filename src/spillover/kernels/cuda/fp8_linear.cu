// Products of more than 64 rows of x, rounded to FP8, with FP8 weights (e4m3), for compute capability 9.0. fp8_few.cu
// is for fewer rows, with the same bits. fp8_round.cu has rounded the rows.
//
// Weights have a scale per channel, and x one per row, which maps its largest number to 448 (or one given for all
// rows). With BLOCKED weights have a scale per 128 x 128, and a row of x one per 128 inputs. A chunk is a quarter of
// the inputs: the tensor cores sum it from zero; with BLOCKED they sum each step of 128 inputs, which is added times
// its scales in float32. Sums of chunks are added in order. Chunks are a constant of the matrix: the bits of a row do
// not depend on how a product is divided or on the number of rows.
//
// A block of threads multiplies tiles of rows by CHANNELS, one after another: one thread has the tensor memory
// accelerator copy, up to all stages ahead, and GROUPS warpgroups multiply, 64 rows each.
//
// The last tiles of a matrix begin earlier, overlapping the previous ones, as copies out of bounds are slow. With GATED
// w is two matrices, one after the other, and a tile has half of its channels of each: silu(first) * second is stored,
// rounded as by separate kernels.
//
// The second warpgroup begins LEAD clock cycles after the first, so that one adds or stores sums while the other
// multiplies: they would do so at the same time otherwise, as both wait for the same copies.
//
// Defined at compilation: BLOCKED, CHANNELS (a multiple of 8, with GATED of 16), GROUPS, GATED, LEAD, X_BF16 (otherwise x
// is float16), and the sums of instructions.cuh.
#include "fp8_rows.cuh"

constexpr int ROWS = 64 * GROUPS;
constexpr int STORED = GATED ? CHANNELS / 2 : CHANNELS;  // channels of a tile that are stored
constexpr int X_BYTES = ROWS * STEP, W_BYTES = CHANNELS * STEP, STAGE = W_BYTES + X_BYTES;
// A whole warpgroup, of which one thread copies, releases registers for the others. A block has the registers that its
// threads start with, a multiple of 8 each: a request for more than were released would wait forever.
constexpr bool MOVE_REGISTERS = GROUPS > 1;  // otherwise all threads start with the maximum
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + (MOVE_REGISTERS ? 128 : 32);
constexpr int REGISTERS = 65536 / THREADS / 8 * 8, FEW_REGISTERS = 24;
constexpr int MANY_REGISTERS = (REGISTERS * (GROUPS + 1) - FEW_REGISTERS) / GROUPS / 8 * 8;
constexpr bool TWO_STEPS = BLOCKED && SUMS <= 64;  // one step is multiplied while the previous one is added
constexpr int SPANNED = (STORED + 126) / 128 + 1;           // maximum number of blocks of 128 channels per tile
constexpr int BAND = 8;          // row tiles computed concurrently on the same channels, which then stay in the cache

DEV int width_of(const Product& p) { return GATED ? p.channels / 2 : p.channels; }  // channels of the result

// Turns sums of 32 channels, from `channel` on, into results; a thread has 2 of every 8 channels for its two rows.
// `w`: the scale of the first channel, in shared memory, which has the scales of `count` channels.
DEV void finish(const Product& p, float (&d)[16], int channel, int end, int count, const float (&x)[2], const float* w) {
    const int quad = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float scale = BLOCKED || i / 2 * 8 >= count ? 1.0f : w[i / 2 * 8 + quad + i % 2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float& sum = d[i / 2 * 4 + 2 * half + i % 2];
            sum = __fadd_rn(sum, 0.0f);
            if (!BLOCKED) sum = __fmul_rn(__fmul_rn(sum, x[half]), scale);
        }
    }
    if (!p.bias) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int at = channel + i / 2 * 8 + quad + i % 2;
        const float more = at < end ? low_number(__ldg(p.bias + at)) : 0.0f;
        d[i / 2 * 4 + i % 2] = __fadd_rn(d[i / 2 * 4 + i % 2], more), d[i / 2 * 4 + 2 + i % 2] = __fadd_rn(d[i / 2 * 4 + 2 + i % 2], more);
    }
}

// Stores 32 channels, up to `end` and at most `count`, of the two rows (8 apart) of a thread's sums. Threads of a quad
// exchange sums so that each stores 8 channels at a time. `up`: with GATED, the second matrix's sums.
DEV void store(const Product& p, float (&d)[16], float (&up)[16], int row, int channel, int end, int count,
               const float (&x)[2], const float* w) {
    const int quarter = threadIdx.x & 3;
    finish(p, d, channel, end, count, x, w);
    if (GATED) {
        finish(p, up, channel + width_of(p), end + width_of(p), count, x, w + STORED);
        bool in_range = true;
#pragma unroll
        for (int i = 0; i < 16; i++) in_range &= d[i] > LEAST_GATED;
        if (in_range) {
#pragma unroll
            for (int i = 0; i < 16; i++) d[i] = gate<true>(d[i], up[i]);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) d[i] = gate(d[i], up[i]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 q[4];
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = rounded(d[4 * i + 2 * half], d[4 * i + 2 * half + 1]);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 other = __shfl_xor_sync(~0u, quarter & 1 ? q[i] : q[i + 1], 1);
            (quarter & 1 ? q[i] : q[i + 1]) = other;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 other = __shfl_xor_sync(~0u, quarter & 2 ? q[i] : q[i + 2], 2);
            (quarter & 2 ? q[i] : q[i + 2]) = other;
        }
        const int to = row + 8 * half, at = channel + 8 * quarter;
        if (to < p.rows && at < end) *(uint4*)(p.out + (i64)to * width_of(p) + at) = make_uint4(q[0], q[1], q[2], q[3]);
    }
}

struct Place { int row, channel; };  // first row and first channel of a tile
// Tiles of a band of rows follow each other, then those of the next channels. Scales of rows are copied four at a time.
DEV Place place(const Product& p, int tile, int row_tiles, int channel_tiles) {
    int band = tile / (BAND * channel_tiles), within = tile % (BAND * channel_tiles), height = min(row_tiles - band * BAND, BAND);
    const int row = (band * BAND + within % height) * ROWS, channel = within / height * STORED;
    return {max(min(row, (p.rows - ROWS + 3) / 4 * 4), 0), max(min(channel, width_of(p) - STORED), 0)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_linear(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(room);
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int row_tiles = (p.rows + ROWS - 1) / ROWS, channel_tiles = (width_of(p) + STORED - 1) / STORED;
    const int tiles = row_tiles * channel_tiles, first = blockIdx.x, stride = gridDim.x;
    // Stages, barriers, then with BLOCKED scales of x and totals of chunks, otherwise scales of weights.
    const u32 memory = shared_address(room), full = memory + p.stages * STAGE;
    const u32 empty = full + 8 * p.stages, scales = empty + 8 * p.stages;
    float* const x_scales = (float*)(room + (scales - memory));
    float4* const totals = (float4*)(x_scales + p.stages * ROWS) + threadIdx.x;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, CONSUMERS / 32);
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();

    if (warp >= CONSUMERS / 32) {
        if constexpr (MOVE_REGISTERS) give_registers<FEW_REGISTERS>();
        if (threadIdx.x != CONSUMERS) return;
        const int bytes = (min(width_of(p), STORED) * (1 + GATED) + min(p.rows, ROWS)) * STEP + (BLOCKED ? ROWS * 4 : 0);
        auto copy_w = [&](int stage, int channel, int step) {
            expect(full + 8 * stage, bytes);
            copy_tile(memory + stage * STAGE, p.w, step * STEP, channel, full + 8 * stage);
            if (GATED) copy_tile(memory + stage * STAGE + STORED * STEP, p.w, step * STEP, channel + width_of(p), full + 8 * stage);
        };
        // Weights are copied while the kernel that computes x still runs.
        const int ahead = min(p.steps, p.stages);
        for (int i = 0; i < ahead; i++) copy_w(i, place(p, first, row_tiles, channel_tiles).channel, i);
        wait_before();
        Ring ring;
        for (int tile = first; tile < tiles; tile += stride) {
            const Place at = place(p, tile, row_tiles, channel_tiles);
            for (int i = 0; i < p.steps; i++) {
                if (tile > first || i >= ahead) {
                    await(empty + 8 * ring.stage, ring.phase ^ 1);
                    copy_w(ring.stage, at.channel, i);
                }
                copy_tile(memory + ring.stage * STAGE + W_BYTES, p.codes_map, i * STEP, at.row, full + 8 * ring.stage);
                if (BLOCKED)
                    copy_range(scales + ring.stage * ROWS * 4, p.x_scales + (i64)i * p.scales_row + at.row, ROWS * 4, full + 8 * ring.stage);
                ring.advance(p.stages);
            }
        }
        return;
    }

    if (LEAD > 0 && warp >= 4 && tiles > stride) {
        await(full, 0);
        pause(LEAD);
    }
    if constexpr (MOVE_REGISTERS) take_registers<MANY_REGISTERS>();
    const int group = warp / 4;
    auto release = [&](int stage) {
        if (lane == 0) arrive(empty + 8 * stage);
    };
    const int row_of = group * 64 + warp % 4 * 16 + lane / 4;  // row in a tile of a thread's first sums
    float* const w_scales = x_scales + group * CHANNELS;
    Ring ring, done;  // stages of the steps being multiplied, and of those being added
    auto multiply_step = [&](float (&d)[SUMS], bool more) {
        await(full + 8 * ring.stage, ring.phase);
        const u32 here = memory + ring.stage * STAGE;
        const u64 left = tile_operand(here + W_BYTES + group * 64 * STEP), right = tile_operand(here);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply<E4M3>(d, left + 2 * k, right + 2 * k, more | (k > 0));
        wgmma_commit();
        ring.advance(p.stages);
    };
    for (int tile = first; tile < tiles; tile += stride) {
        const Place at = place(p, tile, row_tiles, channel_tiles);
        float total[SUMS], sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = sums[i] = 0;
        if (!BLOCKED) {
            if (tile > first) sync_warpgroup();  // the scales of the previous tile are no longer read
            for (int i = threadIdx.x % 128; i < CHANNELS; i += 128)
                w_scales[i] = __ldg(p.w_scales + min(at.channel + i % STORED, width_of(p) - 1) + (i < STORED ? 0 : width_of(p)));
        }
        if constexpr (BLOCKED) {
            float others[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; i++) others[i] = 0;
            struct Scales { float w[SPANNED * (1 + GATED)]; } of_sums, of_others;
            const int block = at.channel / 128, last = (p.channels - 1) / 128;
            const int second = 128 - at.channel % 128;  // the tile's first channel in the next block of scales
            auto begin_step = [&](float (&d)[SUMS], Scales& s, int step) {
#pragma unroll
                for (int i = 0; i < SPANNED * (1 + GATED); i++) {
                    const int from = block + i % SPANNED + (i < SPANNED ? 0 : width_of(p) / 128);
                    s.w[i] = __ldg(p.w_scales + (i64)min(from, last) * p.steps + step);
                }
                multiply_step(d, false);
            };
            int left = p.chunk;
            auto end_step = [&](float (&d)[SUMS], const Scales& s, int step) {
                settle(d);
                const float* x = x_scales + done.stage * ROWS + row_of;
                const float x0 = x[0], x1 = x[8];
                __syncwarp();
                release(done.stage);
                done.advance(p.stages);
                auto add = [&](int half, int n, float s0, float s1) {
                    float *t = total + half * (STORED / 2) + 4 * n, *v = d + half * (STORED / 2) + 4 * n;
                    t[0] = __fmaf_rn(v[0], s0, t[0]), t[1] = __fmaf_rn(v[1], s0, t[1]);
                    t[2] = __fmaf_rn(v[2], s1, t[2]), t[3] = __fmaf_rn(v[3], s1, t[3]);
                };
#pragma unroll
                for (int half = 0; half < 1 + GATED; half++)
                    if (second >= STORED) {  // the tile is within one block
                        const float s0 = __fmul_rn(x0, s.w[half * SPANNED]), s1 = __fmul_rn(x1, s.w[half * SPANNED]);
#pragma unroll
                        for (int n = 0; n < STORED / 8; n++) add(half, n, s0, s1);
                    } else {
#pragma unroll
                        for (int n = 0; n < STORED / 8; n++) {
                            float w = s.w[half * SPANNED];
#pragma unroll
                            for (int part = 1; part < SPANNED; part++)
                                if (8 * n >= second + (part - 1) * 128) w = s.w[half * SPANNED + part];
                            add(half, n, __fmul_rn(x0, w), __fmul_rn(x1, w));
                        }
                    }
                if (--left > 0 || step + 1 == p.steps) return;  // the last chunk is added below
                left = p.chunk;
#pragma unroll
                for (int n = 0; n < SUMS / 4; n++) {
                    float4& slot = totals[n * CONSUMERS];
                    const float4 t = step < p.chunk ? make_float4(0, 0, 0, 0) : slot;
                    slot = make_float4(__fadd_rn(t.x, total[4 * n]), __fadd_rn(t.y, total[4 * n + 1]), __fadd_rn(t.z, total[4 * n + 2]), __fadd_rn(t.w, total[4 * n + 3]));
                    total[4 * n] = total[4 * n + 1] = total[4 * n + 2] = total[4 * n + 3] = 0;
                }
            };
            if constexpr (TWO_STEPS) {
                begin_step(sums, of_sums, 0);
                int i = 0;
#pragma unroll 1
                for (; i + 2 < p.steps; i += 2) {
                    begin_step(others, of_others, i + 1);
                    wgmma_wait<1>();
                    end_step(sums, of_sums, i);
                    begin_step(sums, of_sums, i + 2);
                    wgmma_wait<1>();
                    end_step(others, of_others, i + 1);
                }
                if (i + 1 < p.steps) {
                    begin_step(others, of_others, i + 1);
                    wgmma_wait<1>();
                    end_step(sums, of_sums, i);
                    wgmma_wait<0>();
                    end_step(others, of_others, i + 1);
                } else {
                    wgmma_wait<0>();
                    end_step(sums, of_sums, i);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < p.steps; i++) {
                    begin_step(sums, of_sums, i);
                    wgmma_wait<0>();
                    end_step(sums, of_sums, i);
                }
            }
            if (p.chunk < p.steps)
#pragma unroll
                for (int n = 0; n < SUMS / 4; n++) {
                    const float4 t = totals[n * CONSUMERS];
                    total[4 * n] = __fadd_rn(t.x, total[4 * n]), total[4 * n + 1] = __fadd_rn(t.y, total[4 * n + 1]);
                    total[4 * n + 2] = __fadd_rn(t.z, total[4 * n + 2]), total[4 * n + 3] = __fadd_rn(t.w, total[4 * n + 3]);
                }
        } else {
#pragma unroll 1
            for (int chunk = 0; chunk < p.steps; chunk += p.chunk) {
                const int end = min(chunk + p.chunk, p.steps);
                int before = 0;
#pragma unroll 1
                for (int i = chunk; i < end; i++) {
                    const int stage = ring.stage;
                    multiply_step(sums, i > chunk);
                    if (i > chunk) {
                        wgmma_wait<1>();
                        release(before);
                    }
                    before = stage;
                }
                wgmma_wait<0>();
                settle(sums);
                release(before);
#pragma unroll
                for (int i = 0; i < SUMS; i++) total[i] = __fadd_rn(total[i], sums[i]);
            }
        }
        const int end = min(at.channel + STORED, width_of(p)), row = at.row + row_of;
        float x[2] = {1.0f, 1.0f};
        if (!BLOCKED) {
            sync_warpgroup();  // scales have been stored
            for (int i = 0; i < 2; i++) x[i] = row + 8 * i < p.rows ? p.x_scales[row + 8 * i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < STORED / 2; i += 16) {
            float part[16], up[16];
#pragma unroll
            for (int j = 0; j < 16; j++) {
                part[j] = i + j >= STORED / 2 ? 0 : total[i + j];
                up[j] = !GATED || i + j >= STORED / 2 ? 0 : total[STORED / 2 + i + j];
            }
            store(p, part, up, row, at.channel + 2 * i, end, STORED - 2 * i, x, w_scales + 2 * i);
        }
    }
}
