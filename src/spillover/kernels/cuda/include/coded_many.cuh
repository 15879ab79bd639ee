// Products of more than a few rows with weights in codes, by wgmma: a part of coded_linear.cu.
//
// Work is the state of a warpgroup: 64 channels (16 per warp) by 8 NT rows. Left operands are made of codes, in
// registers and up to MADE at a time, while those made before are multiplied. While a warpgroup adds sums, the others
// multiply.
constexpr int EACH = 8 / GROUPS;  // operands per group
template <int NT, int MADE>
struct Work {
    static constexpr int AT_ONCE = EACH < MADE ? EACH : MADE, PARTS = EACH / AT_ONCE;  // AT_ONCE: operands made at once
    float acc[NT][4], dot[NT][4];  // sums of a chunk and, unless FOLDED, of a group
    u32 a[2][AT_ONCE][4];
    uint4 codes[VECTORS];
    Factors factors;
    Group numbers;
    // Makes operands of a step from the k-th on.
    __device__ __forceinline__ void make(int at, int k) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            operand(a[at][j], codes, k + j, numbers);
#pragma unroll
            for (int i = 0; i < 4; i++) a[at][j][i] = kept(a[at][j][i]);  // computed here and not later
        }
    }
    // Starts the products of the operands, into d or, with `more`, added to it. x: swizzled rows of 128 bytes, in groups
    // of eight rows 1,024 bytes apart.
    __device__ __forceinline__ void multiply(float (&d)[NT][4], int at, int k, u32 x, bool more) {
        u64 table = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | x >> 4;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            wgmma<X_BF16, NT>(d, a[at][j][0], a[at][j][1], a[at][j][2], a[at][j][3],
                              table + ((k + j) / 4 * (NT * 1024) + (k + j) % 4 * 32) / 16, more | j > 0);
        wgmma_commit();
    }
    // Adds the products of a group to its chunk. `sums`: the sums of x over the group.
    __device__ __forceinline__ void add(const Group& group, const float* sums) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 s = make_float2(0, 0);
            if (OFFSETS) s = *(const float2*)(sums + n * 8 + (threadIdx.x & 3) * 2);
            add_group(acc[n], dot[n], group, s);
        }
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = 0;
    }
};
// Multiplies the warp's tile of a step with x, two boxes of 64 columns, and adds the sums of its groups. The step's
// first operands have been made; `next` reads the codes of the next step, whose first operands are made here.
template <int NT, int MADE, class Next>
DEV void multiply_step(Work<NT, MADE>& w, const u8* tile, u32 x, const float* sums, Next next) {
    constexpr int AT_ONCE = Work<NT, MADE>::AT_ONCE, PARTS = Work<NT, MADE>::PARTS, UNITS = GROUPS * PARTS;
    static_assert(UNITS % 2 == 0, "operands are made in two places, in turns");
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        const int group = unit / PARTS;
        const Group numbers = w.numbers;
        w.multiply(w.dot, unit & 1, unit * AT_ONCE, x, unit % PARTS > 0);
        if (unit == UNITS - 1) next();
        else if (unit % PARTS == PARTS - 1) w.numbers = read_group(tile, w.factors, group + 1, (threadIdx.x & 31) / 4);
        wgmma_wait<1>();  // the operands of the last unit have been used
        w.make(~unit & 1, (unit + 1) % UNITS * AT_ONCE);
        if (unit % PARTS < PARTS - 1) continue;
        wgmma_wait<0>();
        wgmma_settle<NT>(w.dot);
        w.add(numbers, sums + group * (NT * 8));
    }
}
// The same with FOLDED operands, whose products are added to the sums of a chunk, if `more` of it. They are not waited
// for; `used` is called when those of the step before are complete.
template <int NT, int MADE, class Next, class Used>
DEV void multiply_folded(Work<NT, MADE>& w, const u8* tile, u32 x, bool more, Next next, Used used) {
    constexpr int AT_ONCE = Work<NT, MADE>::AT_ONCE, PARTS = Work<NT, MADE>::PARTS, UNITS = GROUPS * PARTS;
    static_assert(UNITS % 2 == 0, "operands are made in two places, in turns");
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        w.multiply(w.acc, unit & 1, unit * AT_ONCE, x, more | unit > 0);
        if (unit == UNITS - 1) next();
        else if (unit % PARTS == PARTS - 1) w.numbers = read_group(tile, w.factors, unit / PARTS + 1, (threadIdx.x & 31) / 4);
        wgmma_wait<1>();
        if (unit == 0) used();
        w.make(~unit & 1, (unit + 1) % UNITS * AT_ONCE);
    }
}
struct Place { int row, strip; };
// Returns the place of a tile: tiles of a band of rows follow each other, then those of the next channels.
template <int NT, int STRIPS>
DEV Place place(int tile, int row_tiles, int strip_tiles) {
    constexpr int BAND = 8;
    int band = tile / (BAND * strip_tiles), within = tile % (BAND * strip_tiles), height = min(row_tiles - band * BAND, BAND);
    return {(band * BAND + within % height) * (NT * 8), within / height * STRIPS};
}

// A block multiplies tiles of 8 NT rows by 64 WC channels one after another; with `spread` > 1 a cluster of blocks
// multiplies one tile, each block some chunks, and each of WK > 1 teams of WC warpgroups one of these. Another warpgroup
// copies several stages ahead, for the teams in turns; a stage is always the same team's, as waiting for a phase of a
// barrier needs that the one before has been seen. The total of chunks is kept in registers where they suffice
// (TOTALS). Otherwise sums of chunks are kept in shared memory before the stages: their total, or with `spread` > 1 all
// but the last, which overwrites stages.
template <int NT, int WC, int WK>
DEV void many_rows(const Product& p, u8* room) {
    constexpr int GROUPS_OF_WARPS = WC * WK, STRIPS = WC * 4, TEAM = WC * 128, CONSUMERS = TEAM * WK;
    constexpr bool TOTALS = WK == 1 && (NT * WC < 32 || (FOLDED && WC == 2));
    constexpr int MADE = GROUPS_OF_WARPS == 4 ? 2 : 4;  // operands made at once, as many as registers allow
    constexpr int ROWS = NT * 8, SLOT = NT * CONSUMERS * 16;
    constexpr int X_BYTES = ROWS * STEP * 2, TILES = STRIPS * TILE, SUMS = OFFSETS ? GROUPS * ROWS * 4 : 0;
    constexpr int STAGE = (X_BYTES + TILES + SUMS + 1023) / 1024 * 1024;
    // A block has the registers that its threads start with: a thread that requests more would wait forever.
    constexpr int REGISTERS = 65536 / (CONSUMERS + 128) / 8 * 8, FEW = 24;
    constexpr int MANY = (REGISTERS * (GROUPS_OF_WARPS + 1) - FEW) / GROUPS_OF_WARPS / 8 * 8;
    static_assert(MANY <= 240 && MANY * GROUPS_OF_WARPS + FEW <= REGISTERS * (GROUPS_OF_WARPS + 1), "registers");
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, stages = p.stages, spread = p.spread, own = WK > 1 ? 1 : CHUNKS / spread;
    int strips = p.channels / 16, row_tiles = (p.rows + ROWS - 1) / ROWS, strip_tiles = (strips + STRIPS - 1) / STRIPS;
    int tiles = row_tiles * strip_tiles, from_tile = blockIdx.x / spread, stride = gridDim.x / spread, rank = blockIdx.x % spread;
    // Teams have `share` steps, or less at the end of the inputs; the first has `most` of a block.
    int share = own * p.chunk, begin = rank * WK * share, most = max(0, min(share, p.steps - begin));
    u32 memory = shared_address(room), ring = memory + (spread == 1 ? !TOTALS : own - 1) * SLOT;
    u32 full = ring + stages * STAGE, empty = full + stages * 8;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < stages; i++) make_barrier(full + i * 8, 1), make_barrier(empty + i * 8, STRIPS);
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    if (warp >= CONSUMERS / 32) {
        give_registers<FEW>();
        // Each warp copies a quarter of the tiles, as a warp starts its lanes' copies one after another; one lane also
        // waits for and copies x.
        int own_warp = warp - CONSUMERS / 32, mine = own_warp * WC + lane, stage = 0;
        u32 phase = 0;
        bool first = own_warp == 0 && lane == 0;
        i64 strip_bytes = (i64)p.steps * TILE;
        // The i-th step to copy; after a team's last one, it is some step that the team skips.
        auto step_of = [&](int i) { return min(begin + i % WK * share + i / WK, p.steps - 1); };
        auto bring_tiles = [&](int to_stage, int strip, int i) {
            u32 to = ring + to_stage * STAGE + X_BYTES + mine * TILE, barrier = full + to_stage * 8;
            if (first) expect(barrier, X_BYTES + TILES + SUMS);
            if (lane < WC) copy_range(to, p.tiles + min(strip + mine, strips - 1) * strip_bytes + (i64)step_of(i) * TILE, TILE, barrier);
        };
        int ahead = min(most * WK, stages);  // stages copied before the kernel that computes x has completed
#pragma unroll 1
        for (int i = 0; i < ahead; i++) bring_tiles(i, place<NT, STRIPS>(from_tile, row_tiles, strip_tiles).strip, i);
        if (own_warp == 0) wait_before();
#pragma unroll 1
        for (int tile = from_tile; tile < tiles; tile += stride) {
            Place at = place<NT, STRIPS>(tile, row_tiles, strip_tiles);
#pragma unroll 1
            for (int i = 0; i < most * WK; i++) {
                if (tile > from_tile || i >= ahead) {
                    await(empty + stage * 8, phase ^ 1);
                    bring_tiles(stage, at.strip, i);
                }
                u32 to = ring + stage * STAGE;
                if (first) copy_box(to, p.map, at.row, step_of(i) * 2, full + stage * 8);
                if (OFFSETS && first)
                    for (int g = 0; g < GROUPS; g++)
                        copy_range(to + X_BYTES + TILES + g * ROWS * 4,
                                   p.sums + (i64)(step_of(i) * GROUPS + g) * p.sums_row + at.row, ROWS * 4, full + stage * 8);
                if (++stage == stages) stage = 0, phase ^= 1;
            }
        }
        return;
    }
    take_registers<MANY>();
    int team = WK == 1 ? 0 : warp / STRIPS, member = WK == 1 ? warp : warp % STRIPS, stage = team;
    int steps = max(0, min(share, p.steps - begin - team * share));
    u32 phase = 0;
    float4* slots = (float4*)room + threadIdx.x;
    u32 own_codes = kept(ring + X_BYTES + member * TILE + lane * 16), own_numbers = kept(ring + X_BYTES + member * TILE - memory);
    int chunks = (p.steps + p.chunk - 1) / p.chunk;
#pragma unroll 1
    for (int tile = from_tile; tile < tiles; tile += stride) {
        Work<NT, MADE> w;
        w.clear();
        int left = p.chunk, chunk = 0, last = 0;
        float4 total[TOTALS ? NT : 1] = {};
        auto own_sum = [&](int n) { return make_float4(w.acc[n][0], w.acc[n][1], w.acc[n][2], w.acc[n][3]); };
        auto plus = [](float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); };
        // Adds the sum of a chunk to the total of those before, which is read from memory all at once.
        auto end_chunk = [&]() {
            if (TOTALS) {
#pragma unroll
                for (int n = 0; n < NT; n++) total[TOTALS ? n : 0] = plus(total[TOTALS ? n : 0], own_sum(n));
                return;
            }
            float4 before[NT] = {};
            if (chunk > 0)
#pragma unroll
                for (int n = 0; n < NT; n++) before[n] = slots[n * CONSUMERS];
#pragma unroll
            for (int n = 0; n < NT; n++) slots[n * CONSUMERS] = plus(before[n], own_sum(n));
        };
        auto next_chunk = [&]() {
            if (spread == 1) end_chunk();
            else
#pragma unroll
                for (int n = 0; n < NT; n++) slots[(chunk * NT + n) * CONSUMERS] = own_sum(n);
            w.clear();
            left = p.chunk, chunk++;
        };
        auto advance = [&]() {
            stage += WK;
            if (WK == 1 ? stage == stages : stage >= stages) stage = WK == 1 ? 0 : stage - stages, phase ^= 1;
        };
        auto begin_step = [&](bool there) {
            if (there) await(full + stage * 8, phase);
            const u8* tile = room + own_numbers + stage * STAGE;
            read_codes(w.codes, own_codes + stage * STAGE);
            w.factors = read_factors(tile, lane / 4);
            w.numbers = read_group(tile, w.factors, 0, lane / 4);
        };
        auto release = [&](int which) {
            __syncwarp();
            if (lane == 0) arrive(empty + which * 8);
        };
        begin_step(steps > 0);
        w.make(0, 0);
        auto step = [&](int i, bool more) {
            [[maybe_unused]] const int before = last;
            const u8* tile = room + own_numbers + stage * STAGE;
            const u32 x = ring + stage * STAGE;
            last = stage;
            auto next = [&] {
                advance();
                begin_step(i + 1 < steps);
            };
            if constexpr (FOLDED) multiply_folded(w, tile, x, more, next, [&] { if (more) release(before); });
            else multiply_step(w, tile, x, (const float*)(tile + TILES - member * TILE), next);
        };
        if constexpr (FOLDED) {  // no sums are read until the end of a chunk
#pragma unroll 1
            for (int i = 0; i < steps;) {
                const int begun = i, end = min(i + p.chunk, steps);
#pragma unroll 1
                for (; i < end; i++) step(i, i > begun);
                wgmma_wait<0>();
                wgmma_settle<NT>(w.acc);
                release(last);
                if (WK == 1 && i < steps) next_chunk();
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < steps; i++) {
                step(i, false);
                if (i + 1 < steps) {
                    release(last);
                    if (WK == 1 && --left == 0) next_chunk();
                }
            }
        }
        if (!FOLDED && steps > 0) release(last);
        if (WK > 1)
#pragma unroll 1
            for (int i = steps; i < min(p.chunk, p.steps - rank * WK * p.chunk); i++) {  // copied for other teams' sake
                await(full + stage * 8, phase);
                release(stage);
                advance();
            }
        Place at = place<NT, STRIPS>(tile, row_tiles, strip_tiles);
        bool there = at.strip + member < strips;
        if (WK == 1 && spread == 1) {
            end_chunk();
            auto store = [&](int n, float4 t) {
                float c[4] = {t.x, t.y, t.z, t.w};
                if (there) store_sums(p, c, at.strip + member, at.row + n * 8);
            };
            if (TOTALS)
#pragma unroll
                for (int n = 0; n < NT; n++) store(n, total[TOTALS ? n : 0]);
            else
#pragma unroll 1
                for (int n = 0; n < NT; n++) store(n, slots[n * CONSUMERS]);
            continue;
        }
        sync_first<CONSUMERS>();  // stages are no longer read
        if (steps > 0)
#pragma unroll
            for (int n = 0; n < NT; n++)
                slots[(chunk * NT + n) * CONSUMERS] = own_sum(n);
        meet_cluster();
        const int own_log = WK > 1 ? 0 : spread == 2 ? 2 : spread == 4 ? 1 : 0;
        constexpr int AT_ONCE = GROUPS_OF_WARPS == 4 ? 1 : 2;  // as many as registers allow
#pragma unroll AT_ONCE
        for (int n = rank * WK + team; n < NT; n += spread * WK) {
            float4 part[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {  // all are on their way before the first one is added
                int from = min(c, chunks - 1), of = from >> own_log;  // the team that has the chunk
                int at_slot = ((from & own - 1) * NT + n) * CONSUMERS + of % WK * TEAM + threadIdx.x % TEAM;
                if (of / WK == rank) part[c] = ((const float4*)room)[at_slot];
                else part[c] = fetch(memory + at_slot * 16, of / WK);
            }
            float sum[4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                if (c < chunks) sum[0] += part[c].x, sum[1] += part[c].y, sum[2] += part[c].z, sum[3] += part[c].w;
            if (there) store_sums(p, sum, at.strip + member, at.row + n * 8);
        }
        leave_cluster();  // keeps shared memory valid until other blocks have read it
    }
}
#define MANY(NT, WC, WK) \
    KERNEL(WC * WK * 128 + 128, 1) many_rows_##NT##_##WC##_##WK(const __grid_constant__ Product p) { DYNAMIC_SHARED(room); many_rows<NT, WC, WK>(p, room); }
MANY(4, 2, 1)
MANY(4, 4, 1)
MANY(8, 1, 4)
MANY(8, 2, 1)
MANY(8, 4, 1)
MANY(16, 2, 1)
