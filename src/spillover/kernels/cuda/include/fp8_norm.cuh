// Operations on rows of x that threads hold in registers: the sum with a residual and the norm, with the same bits as
// triton/norm.py, and rounding to e4m3, as by `quantize` of fp8_rows.cuh.
//
// A thread holds the vectors of a row that are CONSUMERS apart. Squares are added neighbours first: those of a vector,
// then those of the 32 vectors of a warp, then those of the parts of a row.
//
// Must be defined before: INPUTS (per row; 0 if no row is held), NORMED (0: rows are not normalised) and CONSUMERS
// (number of threads).

constexpr int VECTORS = INPUTS / 8;
constexpr int HELD = INPUTS > 0 ? (VECTORS + CONSUMERS - 1) / CONSUMERS : 1;
constexpr int WARPS = CONSUMERS / 32, PARTS = HELD * WARPS, MOST_PARTS = 32;
static_assert(WARPS <= MOST_PARTS && (!NORMED || PARTS <= MOST_PARTS), "a lane adds each part");

DEV int vector_of(int j) { return j * CONSUMERS + (int)threadIdx.x; }
DEV void read_row(uint4 (&to)[HELD], const u16* row) {  // zeros past the end of the row
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        to[j] = make_uint4(0, 0, 0, 0);
        if (vector_of(j) < VECTORS) to[j] = *(const uint4*)(row + vector_of(j) * 8);
    }
}
DEV void write_row(u16* row, const uint4 (&from)[HELD]) {
#pragma unroll
    for (int j = 0; j < HELD; j++)
        if (vector_of(j) < VECTORS) *(uint4*)(row + vector_of(j) * 8) = from[j];
}

DEV uint4 packed(const float (&f)[8]) {
    return make_uint4(rounded(f[0], f[1]), rounded(f[2], f[3]), rounded(f[4], f[5]), rounded(f[6], f[7]));
}
DEV uint4 added(const uint4& a, const uint4& b) {
    float x[8], y[8];
    numbers_of(x, a), numbers_of(y, b);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __fadd_rn(x[i], y[i]);
    return packed(x);
}
// Weights are unpacked here, since unpacking them once for all rows would take twice the registers.
DEV uint4 scaled(const uint4& v, float factor, const uint4& weight) {
    float x[8], w[8];
    numbers_of(x, v);
    numbers_of(w, make_uint4(kept(weight.x), kept(weight.y), kept(weight.z), kept(weight.w)));
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __fmul_rn(x[i], factor);
    numbers_of(x, packed(x));
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __fmul_rn(x[i], w[i]);
    return packed(x);
}

DEV float sum_of_squares(const uint4& v) {
    float f[8];
    numbers_of(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = __fmul_rn(f[i], f[i]);
#pragma unroll
    for (int far = 1; far < 8; far *= 2)
#pragma unroll
        for (int i = 0; i < 8; i += 2 * far) f[i] = __fadd_rn(f[i], f[i + far]);
    return f[0];
}
// Combines each of a thread's numbers with those of LANES lanes, neighbours first. The numbers are interleaved to hide
// the latency of shuffles.
template <int LANES, int COUNT, class Combine> DEV void over_lanes(float (&v)[COUNT], Combine combine) {
#pragma unroll
    for (int far = 1; far < LANES; far *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) v[i] = combine(v[i], __shfl_xor_sync(~0u, v[i], far));
}
// Returns the factor of a row's norm; `parts`: PARTS numbers in shared memory.
DEV float factor_of(const uint4 (&row)[HELD], float eps, float* parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    auto add = [](float a, float b) { return __fadd_rn(a, b); };
    float sums[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) sums[j] = sum_of_squares(row[j]);
    over_lanes<32>(sums, add);
#pragma unroll
    for (int j = 0; j < HELD; j++)
        if (lane == 0) parts[j * WARPS + warp] = sums[j];
    sync_first<CONSUMERS>();
    float sum[1] = {lane < PARTS ? parts[lane] : 0.0f};
    over_lanes<32>(sum, add);
    return inverse_root(__fadd_rn(divided(sum[0], INPUTS), eps));
}

// Adds a row of x to its residual, and normalises the sum. `stores`: store x + residual too. `parts`: as in factor_of.
DEV void norm_row(uint4 (&held)[HELD], const Product& p, int row, const uint4 (&weight)[HELD], bool stores, float* parts) {
    uint4 more[HELD];
    read_row(held, p.x + row * p.x_stride);
    read_row(more, p.residual + row * p.residual_stride);
#pragma unroll
    for (int j = 0; j < HELD; j++) held[j] = added(held[j], more[j]);
    if (stores) write_row(p.total + (i64)row * INPUTS, held);
    const float factor = factor_of(held, p.eps, parts);
#pragma unroll
    for (int j = 0; j < HELD; j++) held[j] = scaled(held[j], factor, weight[j]);
}

// Rounds a row. `parts`: WARPS numbers in shared memory.
template <class PutScale, class PutCodes>
DEV void round_row(const Product& p, const uint4 (&held)[HELD], float* parts, PutScale put_scale, PutCodes put_codes) {
    const bool given = !BLOCKED && p.input_scale, finds = !BLOCKED && !given;
    auto larger = [](float a, float b) { return fmaxf(a, b); };
    float found[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) found[j] = given ? 0 : largest_of(held[j]);
    if (BLOCKED) over_lanes<16>(found, larger);
    if (finds) {
        float most[1] = {found[0]};
#pragma unroll
        for (int j = 1; j < HELD; j++) most[0] = fmaxf(most[0], found[j]);
        over_lanes<32>(most, larger);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = most[0];
        sync_first<CONSUMERS>();
        most[0] = threadIdx.x % 32 < WARPS ? parts[threadIdx.x % 32] : 0.0f;
        over_lanes<32>(most, larger);
#pragma unroll
        for (int j = 0; j < HELD; j++) found[j] = most[0];
    }
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int vector = (int)kept(vector_of(j));  // otherwise indices would be computed earlier and take registers
        if (vector >= VECTORS) continue;
        const float largest = fmaxf(found[j], TINY), scale = scale_for(p, given, largest);
        put_codes(vector, rounded_codes(held[j], inverse_for(scale, given, largest)));
        if (vector % 16 == 0 && (BLOCKED || vector == 0)) put_scale(vector / 16, scale);
    }
}
