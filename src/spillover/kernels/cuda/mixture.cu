// The two products of a mixture's experts, whose weights are kept as codes: FORMAT is Mxfp4 or Fp8.
//
// A row of weights is read in steps of 128 inputs: lane t of four takes the 32 inputs that begin at 32 t, so its codes
// are 16 bytes that share a scale (MXFP4) or 32 bytes (FP8), and are unpacked to what mma.m16n8k16 takes as its left
// operand. Which inputs meet in one such instruction is a matter of where they lie; activations are kept in the order
// in which a word's codes unpack. Inputs are summed in chunks of some steps, each from nothing, and chunks in their
// order: whether they have warps of their own makes no difference to the bits, nor does the number of tokens.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
#define DEV static __device__ __forceinline__

#ifndef EMULATED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
DEV void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEV void wait_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
template <bool BF16>
DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEV uint4 load_weights(const u8* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEV u32 to_half2(float low, float high) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }
DEV u32 to_bf16x2(float low, float high) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }
DEV float fast_exp(float v) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v * 1.4426950408889634f)); return d; }
DEV void copy_async(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from)); }
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void copies_commit() { asm volatile("cp.async.commit_group;"); }
DEV void copies_wait_all_but_one() { asm volatile("cp.async.wait_group 1;"); }
#endif
DEV float low_bf16(u32 v) { return __uint_as_float(v << 16); }
DEV float high_bf16(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
DEV u32 word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

// Codes move to where float16 has its sign, the low bits of its exponent and the top of its mantissa: 2**-14 of their
// value. Activations carry 2**2, scales the rest.
struct Mxfp4 {
    static constexpr bool BF16 = false;
    static constexpr int CHUNK = 3;    // steps summed from nothing
    static constexpr int VECTORS = 1;  // of 16 bytes, that a lane reads of a row in a step
    static constexpr int EACH = 1;     // chunks of a warp in one turn of experts_gate_up_pairs
    static constexpr int SCALE_BYTES = 1;
    DEV float sum_factor(const void*, int, int, int) { return 1.0f; }
    // Eight codes of a word, even ones of bytes 0, 1 and of 2, 3, then odd ones.
    DEV void unpack(u32 (&r)[4], const uint4 (&v)[1], int j, u32 factor) {
        u32 w = word_of(v[0], j);
        u32 even = ((w << 1) & 0x0E0E0E0Eu) | ((w << 4) & 0x80808080u);
        u32 odd = ((w >> 3) & 0x0E0E0E0Eu) | (w & 0x80808080u);
        r[0] = hmul2(__byte_perm(even, 0, 0x1404), factor);
        r[1] = hmul2(__byte_perm(even, 0, 0x3424), factor);
        r[2] = hmul2(__byte_perm(odd, 0, 0x1404), factor);
        r[3] = hmul2(__byte_perm(odd, 0, 0x3424), factor);
    }
    DEV u32 load_scale(const void* scales, i64 row, int stride, int group) { return __ldg((const u8*)scales + (row * stride + group)); }
    // A scale of 2**(s - 127), 2**14 for the code, less the shift; the exponent's bias is 15.
    DEV u32 factor(u32 scale, bool inside) { return inside ? (u32)min(max((int)scale - 100, 0), 30) * 0x04000400u : 0; }
    // Where a row of activations keeps a column: those of a word's even codes first.
    DEV int place(int c) { return (c & ~7) + (c & 1) * 4 + ((c & 7) >> 1); }
    DEV u16 activation(float v) { return (u16)to_half2(v * 4.0f, 0); }
};
// Codes move to bfloat16's sign, exponent and mantissa: 2**-120 of their value. Activations carry 2**64, sums the rest.
struct Fp8 {
    static constexpr bool BF16 = true;
    static constexpr int CHUNK = 1;
    static constexpr int VECTORS = 2;
    static constexpr int EACH = 2;
    static constexpr int SCALE_BYTES = 4;
    DEV float sum_factor(const void* scales, int block_row, int stride, int step) {
        return __ldg((const float*)scales + (block_row * stride + step)) * 72057594037927936.0f;  // 2**(120 - 64)
    }
    // Four codes of each of two words, bytes 0, 2 and then 1, 3.
    DEV void unpack(u32 (&r)[4], const uint4 (&v)[2], int j, u32) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 w = word_of(v[j / 2], j % 2 * 2 + i);
            r[2 * i] = ((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u);
            r[2 * i + 1] = ((w >> 4) & 0x07F007F0u) | (w & 0x80008000u);
        }
    }
    DEV u32 load_scale(const void*, i64, int, int) { return 0; }
    DEV u32 factor(u32, bool) { return 0; }
    DEV int place(int c) { return (c & ~3) + (c & 1) * 2 + ((c & 3) >> 1); }
    DEV u16 activation(float v) { return (u16)to_bf16x2(v * 18446744073709551616.0f, 0); }
};
typedef FORMAT F;

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
DEV int slot_of(const Product& p, int expert) { return p.slots && expert >= 0 ? p.slots[expert] : expert; }

// One expert's matrix as a warp reads it: 16 rows, of which lane g has the g-th pair: two neighbours, or with `halves`
// one of the first half of the rows and one of the second. `apart` rows lie between the two of a pair, `strip` rows
// between a warp's 16 and the next.
struct Matrix {
    const u8* codes;
    const void* scales;
    const u16* bias;
    int row_bytes, scale_row, groups, chunks;  // groups: of 32 inputs
    i64 apart;
    int strip;
    bool halves;
};
DEV Matrix matrix_of(const Product& p, i64 slot, bool halves) {
    int groups = p.depth / 32;
    return {p.codes + slot * p.stride, p.scales + slot * p.scale_stride * F::SCALE_BYTES,
            p.bias ? p.bias + slot * p.bias_stride : nullptr, p.depth * F::VECTORS / 2, p.scale_row, groups,
            (groups + 4 * F::CHUNK - 1) / (4 * F::CHUNK), halves ? p.rows / 2 : 1, halves ? 8 : 16, halves};
}
DEV i64 first_row(const Matrix& m, int strip, int g) { return m.halves ? strip * 8 + g : strip * 16 + 2 * g; }
// The factor of a chunk's sums for the two rows of a pair.
DEV float2 sum_factors(const Matrix& m, i64 row, int chunk) {
    if (F::CHUNK != 1) return make_float2(1, 1);
    int block = row / 128;
    float low = F::sum_factor(m.scales, block, m.scale_row, chunk);
    return make_float2(low, m.halves ? F::sum_factor(m.scales, block + ((int)m.apart + 127) / 128, m.scale_row, chunk) : low);
}
DEV float2 biases(const Matrix& m, i64 row) {
    return m.bias ? make_float2(low_bf16(m.bias[row]), low_bf16(m.bias[row + m.apart])) : make_float2(0, 0);
}

template <int STEPS, int S> struct Codes { uint4 v[STEPS][S][2][F::VECTORS]; u32 scale[STEPS][S][2]; };

template <int STEPS, int S>
DEV void load_codes(Codes<STEPS, S>& c, const Matrix& m, i64 row, int first_step) {
    int t = threadIdx.x & 3;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        int group = min((first_step + step) * 4 + t, m.groups - 1);
#pragma unroll
        for (int s = 0; s < S; s++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                i64 at = row + s * m.strip + r * m.apart;
#pragma unroll
                for (int i = 0; i < F::VECTORS; i++)
                    c.v[step][s][r][i] = load_weights(m.codes + (at * m.row_bytes + (group * F::VECTORS + i) * 16));
                c.scale[step][s][r] = F::load_scale(m.scales, at, m.scale_row, group);
            }
    }
}
// Adds a step's products to sums; `x(n, group, j)`: eight activations of the n-th tile of eight tokens.
template <int STEPS, int S, int NT, class X>
DEV void multiply(float (&acc)[S][NT][4], const Codes<STEPS, S>& c, int index, int step, int groups, X x) {
    int group = step * 4 + (threadIdx.x & 3);
    bool inside = group < groups;  // past the end the last group is read again, and counts nothing
    group = min(group, groups - 1);
    u32 factor[S][2];
#pragma unroll
    for (int s = 0; s < S; s++)
#pragma unroll
        for (int r = 0; r < 2; r++) factor[s][r] = F::factor(c.scale[index][s][r], inside);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[S][2][4];
#pragma unroll
        for (int s = 0; s < S; s++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                F::unpack(a[s][r], c.v[index][s][r], j, factor[s][r]);
                if (F::VECTORS == 2 && !inside) a[s][r][0] = a[s][r][1] = a[s][r][2] = a[s][r][3] = 0;
            }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint4 b = x(n, group, j);
#pragma unroll
            for (int s = 0; s < S; s++) {
                mma<F::BF16>(acc[s][n], a[s][0][0], a[s][1][0], a[s][0][1], a[s][1][1], b.x, b.y);
                mma<F::BF16>(acc[s][n], a[s][0][2], a[s][1][2], a[s][0][3], a[s][1][3], b.z, b.w);
            }
        }
    }
}
// The sums of one chunk, from nothing.
template <int S, int NT>
DEV void multiply_chunk(float (&acc)[S][NT][4], const Codes<F::CHUNK, S>& c, const Matrix& m, const u16* const (&x)[NT], int chunk) {
#pragma unroll
    for (int i = 0; i < F::CHUNK; i++)
        multiply<F::CHUNK, S, NT>(acc, c, i, chunk * F::CHUNK + i, m.groups, [&](int n, int group, int j) {
            return *(const uint4*)(x[n] + (group * 32 + j * 8));
        });
}

DEV float gated(float gate, float up, float limit, bool clamped) {
    if (!clamped) return gate * (1.0f / (1.0f + fast_exp(-gate))) * up;
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
    return (up + 1.0f) * (gate * (1.0f / (1.0f + fast_exp(-gate * 1.702f))));
}

#define KERNEL(THREADS, BLOCKS) extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void

// A few tokens. out[pair] = act(gate_up[expert] @ x[token] + bias): a block 16 rows of one pair's expert, a warp some
// chunks of them.
KERNEL(256, 4) experts_gate_up_pairs(const __grid_constant__ Product p) {
    constexpr int EACH = F::EACH;
    __shared__ float2 part[8 * EACH][8];
    launch_dependents();
    int strips = p.rows / 16, pair = blockIdx.x / strips, strip = blockIdx.x % strips;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    wait_before();
    int slot = slot_of(p, p.ids[pair]);
    if (slot < 0) return;
    Matrix m = matrix_of(p, slot, !p.clamped);
    const u16* from[1] = {p.x + (i64)(pair / p.k) * p.depth};
    i64 row = first_row(m, strip, g);
    float2 total = make_float2(0, 0);
    for (int base = 0; base < m.chunks; base += 8 * EACH) {
        Codes<F::CHUNK, 1> codes[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) load_codes<F::CHUNK, 1>(codes[i], m, row, (base + warp * EACH + i) * F::CHUNK);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int chunk = base + warp * EACH + i;
            if (chunk < m.chunks) {
                float acc[1][1][4] = {};
                multiply_chunk<1, 1>(acc, codes[i], m, from, chunk);
                if (t == 0) part[warp * EACH + i][g] = make_float2(acc[0][0][0], acc[0][0][2]);
            }
        }
        __syncthreads();
        if (threadIdx.x < 8) for (int c = 0; c < 8 * EACH && base + c < m.chunks; c++) {
            float2 f = sum_factors(m, first_row(m, strip, threadIdx.x), base + c), v = part[c][threadIdx.x];
            total.x = fmaf(v.x, f.x, total.x), total.y = fmaf(v.y, f.y, total.y);
        }
        if (base + 8 * EACH < m.chunks) __syncthreads();
    }
    if (threadIdx.x < 8) {
        float2 b = biases(m, first_row(m, strip, threadIdx.x));
        p.out[(i64)pair * (p.rows / 2) + F::place(strip * 8 + threadIdx.x)] =
            F::activation(gated(total.x + b.x, total.y + b.y, p.limit, p.clamped));
    }
}

// A few tokens. rows[pair] = down[expert] @ x[pair] + bias; out is these, or the sums of share * row of each token: a
// block 16 rows of one token, all its experts' chunks.
KERNEL(512, 2) experts_down_pairs(const __grid_constant__ Product p) {
    DYNAMIC_SHARED(float2, parts);  // [k * chunks][8], then [k][8]
    launch_dependents();
    int strips = p.rows / 16, token = blockIdx.x / strips, strip = blockIdx.x % strips;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    int chunks = matrix_of(p, 0, false).chunks, items = p.k * chunks;
    float2* sums = parts + items * 8;
    wait_before();
    for (int item = warp; item < items; item += 16) {
        int pair = token * p.k + item / chunks, chunk = item % chunks;
        int slot = slot_of(p, p.ids[pair]);
        if (slot < 0) continue;
        Matrix m = matrix_of(p, slot, false);
        float acc[1][1][4] = {};
        Codes<F::CHUNK, 1> codes;
        load_codes<F::CHUNK, 1>(codes, m, first_row(m, strip, g), chunk * F::CHUNK);
        const u16* from[1] = {p.x + (i64)pair * p.depth};
        multiply_chunk<1, 1>(acc, codes, m, from, chunk);
        if (t == 0) parts[item * 8 + g] = make_float2(acc[0][0][0], acc[0][0][2]);
    }
    __syncthreads();
    if (threadIdx.x < 8 * p.k) {
        int e = threadIdx.x / 8, at = threadIdx.x & 7, pair = token * p.k + e, slot = slot_of(p, p.ids[pair]);
        if (slot >= 0) {
            Matrix m = matrix_of(p, slot, false);
            i64 row = first_row(m, strip, at);
            float2 total = make_float2(0, 0);
            for (int c = 0; c < chunks; c++) {
                float2 f = sum_factors(m, row, c), v = parts[(e * chunks + c) * 8 + at];
                total.x = fmaf(v.x, f.x, total.x), total.y = fmaf(v.y, f.y, total.y);
            }
            float2 b = biases(m, row);
            u32 rounded = to_bf16x2(total.x + b.x, total.y + b.y);
            if (p.sum) sums[threadIdx.x] = make_float2(low_bf16(rounded), high_bf16(rounded));
            else ((u32*)(p.out + (i64)pair * p.rows))[strip * 8 + at] = rounded;
        }
    }
    if (!p.sum) return;
    __syncthreads();
    if (threadIdx.x < 8) {
        float2 total = make_float2(0, 0);
        for (int e = 0; e < p.k; e++) {
            float share = p.shares[token * p.k + e];
            total.x = fmaf(sums[e * 8 + threadIdx.x].x, share, total.x);
            total.y = fmaf(sums[e * 8 + threadIdx.x].y, share, total.y);
        }
        ((u32*)(p.out + (i64)token * p.rows))[strip * 8 + threadIdx.x] = to_bf16x2(total.x, total.y);
    }
}

// A tile: positions first .. end of the sorted pairs, at most as many as a tile has, all of one expert.
struct Tile { int slot, first, end; };
DEV Tile tile_at(const Product& p, int index) {
    const int* place = p.places + index * 3;
    return {slot_of(p, place[0]), place[1], place[2]};
}
// The activations of a position: the first product's are those of its token.
template <bool DOWN>
DEV const u16* activations(const Product& p, int position) {
    return p.x + (i64)(DOWN ? position : p.order[position] / p.k) * p.depth;
}
// The sums of a pair of rows over all chunks, as the activation of a position or as the output of a pair.
template <bool DOWN>
DEV void finish(const Product& p, const Matrix& m, int strip, int g, int position, float low, float high) {
    float2 b = biases(m, first_row(m, strip, g));
    int column = strip * 8 + g;
    if (DOWN) ((u32*)(p.out + (i64)p.order[position] * p.rows))[column] = to_bf16x2(low + b.x, high + b.y);
    else p.out[(i64)position * (p.rows / 2) + F::place(column)] = F::activation(gated(low + b.x, high + b.y, p.limit, p.clamped));
}

// Tiles of 8 NT positions: a block 32 rows, a warp one chunk of them after another.
template <int NT, bool DOWN>
DEV void small_tiles(const Product& p) {
    constexpr int S = 2;
    __shared__ float4 part[8][S][NT][32];
    int blocks = p.rows / (16 * S), strip = blockIdx.x % blocks * S;
    Tile tile = tile_at(p, blockIdx.x / blocks);
    if (tile.slot < 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    const u16* from[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) from[n] = activations<DOWN>(p, min(tile.first + n * 8 + g, tile.end - 1));
    Matrix m = matrix_of(p, tile.slot, !DOWN && !p.clamped);
    int s = threadIdx.x / (NT * 32), n = threadIdx.x / 32 % NT;  // whose sums this thread adds up
    float4 total = make_float4(0, 0, 0, 0);
    for (int base = 0; base < m.chunks; base += 8) {
        if (base + warp < m.chunks) {
            float acc[S][NT][4] = {};
            Codes<F::CHUNK, S> codes;
            load_codes<F::CHUNK, S>(codes, m, first_row(m, strip, g), (base + warp) * F::CHUNK);
            multiply_chunk<S, NT>(acc, codes, m, from, base + warp);
#pragma unroll
            for (int i = 0; i < S; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
                    part[warp][i][j][lane] = make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
        }
        __syncthreads();
        if (threadIdx.x < S * NT * 32)
            for (int c = 0; c < 8 && base + c < m.chunks; c++) {
                float4 v = ((float4*)part[c])[threadIdx.x];
                float2 f = sum_factors(m, first_row(m, strip + s, g), base + c);
                total.x = fmaf(v.x, f.x, total.x), total.y = fmaf(v.y, f.x, total.y);
                total.z = fmaf(v.z, f.y, total.z), total.w = fmaf(v.w, f.y, total.w);
            }
        if (base + 8 < m.chunks) __syncthreads();
    }
    if (threadIdx.x >= S * NT * 32) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int position = tile.first + n * 8 + 2 * t + i;
        if (position < tile.end)
            finish<DOWN>(p, m, strip + s, g, position, i ? total.y : total.x, i ? total.w : total.z);
    }
}

// Tiles of 64 positions: a block 256 rows, a warp 32 of them, activations through shared memory.
template <bool DOWN>
DEV void large_tiles(const Product& p) {
    constexpr int TOKENS = 64, NT = 8, STAGES = 3;
    __shared__ uint4 stage[STAGES][TOKENS * 16];
    int blocks = (p.rows + 255) / 256;
    Tile tile = tile_at(p, blockIdx.x / blocks);
    if (tile.slot < 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    int at_row = blockIdx.x % blocks * 256 + warp * 32;
    bool busy = at_row < p.rows;
    int strip = min(at_row, p.rows - 32) / 16;
    Matrix m = matrix_of(p, tile.slot, !DOWN && !p.clamped);
    i64 row = first_row(m, strip, g);
    int steps = (m.groups + 3) / 4;
    // A thread brings four units of 16 bytes of one position: the same eighth of all four groups of a step.
    int copied = threadIdx.x / 4, unit = threadIdx.x & 3;
    const u16* from = activations<DOWN>(p, min(tile.first + copied, tile.end - 1));
    u32 to = shared_address(&stage[0][copied * 16]);
    int flip = (copied & 1) * 4;  // lanes that read together find their units in different banks
    auto bring = [&](int step) {
        if (step < steps) {
            u32 at = to + step % STAGES * (TOKENS * 256);
#pragma unroll
            for (int i = 0; i < 4; i++)
                copy_async(at + ((unit * 4 + i) ^ flip) * 16, from + (min(step * 4 + i, m.groups - 1) * 32 + unit * 8));
        }
        copies_commit();
    };
    bring(0);
    bring(1);
    float acc[2][NT][4] = {}, total[2][NT][4] = {};
    Codes<1, 2> next;
    load_codes<1, 2>(next, m, row, 0);
    for (int step = 0; step < steps; step++) {
        copies_wait_all_but_one();
        __syncthreads();
        bring(step + 2);
        Codes<1, 2> codes = next;
        if (step + 1 < steps) load_codes<1, 2>(next, m, row, step + 1);
        const uint4* units = stage[step % STAGES];
        if (busy)
            multiply<1, 2, NT>(acc, codes, 0, step, m.groups, [&](int n, int, int j) {
                return units[(n * 8 + g) * 16 + ((j * 4 + t) ^ ((g & 1) * 4))];
            });
        if ((step + 1) % F::CHUNK == 0 || step + 1 == steps) {
#pragma unroll
            for (int s = 0; s < 2; s++) {
                float2 f = sum_factors(m, first_row(m, strip + s, g), step / F::CHUNK);
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) total[s][n][i] = fmaf(acc[s][n][i], i < 2 ? f.x : f.y, total[s][n][i]), acc[s][n][i] = 0;
            }
        }
    }
    if (!busy) return;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int position = tile.first + n * 8 + 2 * t + i;
                if (position < tile.end)
                    finish<DOWN>(p, m, strip + s, g, position, total[s][n][i], total[s][n][i + 2]);
            }
}

KERNEL(256, 2) experts_gate_up_8(const __grid_constant__ Product p) { small_tiles<1, false>(p); }
KERNEL(256, 2) experts_gate_up_16(const __grid_constant__ Product p) { small_tiles<2, false>(p); }
KERNEL(256, 2) experts_gate_up_32(const __grid_constant__ Product p) { small_tiles<4, false>(p); }
KERNEL(256, 1) experts_gate_up_64(const __grid_constant__ Product p) { large_tiles<false>(p); }
KERNEL(256, 2) experts_down_8(const __grid_constant__ Product p) { small_tiles<1, true>(p); }
KERNEL(256, 2) experts_down_16(const __grid_constant__ Product p) { small_tiles<2, true>(p); }
KERNEL(256, 2) experts_down_32(const __grid_constant__ Product p) { small_tiles<4, true>(p); }
KERNEL(256, 1) experts_down_64(const __grid_constant__ Product p) { large_tiles<true>(p); }
