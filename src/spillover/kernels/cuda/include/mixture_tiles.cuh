// Products for many tokens: pairs are sorted by expert, in tiles of one expert's pairs. See mixture.cu.
#include "mixture_codes.cuh"

// A tile: positions first .. end of the sorted pairs, all of one expert; `slot` is its index in the stack.
struct Tile { int slot, first, end; };

// Computes a tile of at most T positions: 128 rows per block, 16 per warp. N: the tile's positions, rounded up. A stage
// of shared memory has a step's activations, two tables of T rows of 128 bytes whose units of 16 bytes are swizzled as
// wgmma requires, and a slot of codes per warp.
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
    // A thread copies the same unit of 16 bytes of every 16th position.
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
    // Adds offsets times the sums of the 32 activations at `at`.
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
    // Returns the address of this lane's part of 32 activations of eight positions.
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
            // Descriptor of swizzled rows of 128 bytes, in groups of eight rows that are 1,024 bytes apart.
            u64 table = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | x >> 4;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j >= 2) wgmma_wait<1>();  // frees the operands of two iterations ago
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
    constexpr int ROW = 68;  // gates and ups of 64 columns, with padding that keeps lanes in different banks
    float2 b = biases(m, row), *sums = (float2*)shared;
    if (!DOWN) __syncthreads();  // codes and activations are no longer read
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
    // A thread stores four adjacent values of a row.
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
        if (DOWN) wait_before();  // this kernel must not complete before the previous one
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
