// Rows of x that each block adds to a residual and norms before it rounds them to e4m3: to the bit what triton/norm.py
// and then fp8_rows.cuh make of them.
//
// A thread holds the vectors of a row that are CONSUMERS apart. Squares are added neighbours first: those of a vector,
// of 32 vectors in a warp, and then those parts of a row.
//
// Defined when this is included: NORMED (the inputs of a row; 0: rows are taken as they are) and CONSUMERS (threads).

constexpr int VECTORS = NORMED / 8;
constexpr int HELD = NORMED > 0 ? (VECTORS + CONSUMERS - 1) / CONSUMERS : 1;
constexpr int PARTS = HELD * (CONSUMERS / 32), MOST_PARTS = 32;  // NORM_BYTES of kernels/cuda/fp8_linear.py: of two rows
static_assert(PARTS <= MOST_PARTS, "a lane adds each part");

DEV int vector_of(int j) { return j * CONSUMERS + (int)threadIdx.x; }
DEV void read_row(uint4 (&to)[HELD], const u16* row) {  // zeros beyond its end
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
// Weights are unpacked here: were that done once for all rows, they would take twice the registers.
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
// Combines each of a thread's numbers with those of LANES lanes, neighbours first. The numbers go side by side: a
// shuffle takes long.
template <int LANES, int COUNT, class Combine> DEV void over_lanes(float (&v)[COUNT], Combine combine) {
#pragma unroll
    for (int far = 1; far < LANES; far *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) v[i] = combine(v[i], __shfl_xor_sync(~0u, v[i], far));
}
// What a row is multiplied with; `parts`: PARTS numbers in shared memory.
DEV float factor_of(const uint4 (&row)[HELD], float eps, float* parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    auto add = [](float a, float b) { return __fadd_rn(a, b); };
    float sums[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) sums[j] = sum_of_squares(row[j]);
    over_lanes<32>(sums, add);
#pragma unroll
    for (int j = 0; j < HELD; j++)
        if (lane == 0) parts[j * (CONSUMERS / 32) + warp] = sums[j];
    sync_first<CONSUMERS>();
    float sum[1] = {lane < PARTS ? parts[lane] : 0.0f};
    over_lanes<32>(sum, add);
    return inverse_root(__fadd_rn(divided(sum[0], NORMED), eps));
}

// Adds, norms and rounds the rows as `quantize` of fp8_rows.cuh rounds them. The first block stores x + residual. `parts`:
// 2 * MOST_PARTS numbers in shared memory, as some threads may have begun a row while others end the one before.
template <class PutScale, class PutCodes>
DEV void norm_and_quantize(const Product& p, const uint4 (&weight)[HELD], float* most, float* parts,
                           PutScale put_scale, PutCodes put_codes) {
    const bool given = !BLOCKED && p.input_scale, finds = !BLOCKED && !given;
#pragma unroll 1
    for (int row = 0; row < p.rows; row++) {
        uint4 held[HELD], more[HELD];
        read_row(held, p.x + row * p.x_stride);
        read_row(more, p.residual + row * p.residual_stride);
#pragma unroll
        for (int j = 0; j < HELD; j++) held[j] = added(held[j], more[j]);
        if (blockIdx.x == 0) write_row(p.total + (i64)row * NORMED, held);
        const float factor = factor_of(held, p.eps, parts + row % 2 * MOST_PARTS);
        float found[HELD];
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            held[j] = scaled(held[j], factor, weight[j]);
            found[j] = given ? 0 : largest_of(held[j]);
        }
        if (BLOCKED) over_lanes<16>(found, [](float a, float b) { return fmaxf(a, b); });
        if (finds) {
#pragma unroll
            for (int j = 1; j < HELD; j++) found[0] = fmaxf(found[0], found[j]);
            found[0] = largest_of_step(found[0]);
            if (threadIdx.x % 16 == 0) atomicMax((int*)(most + row), __float_as_int(found[0]));
            sync_first<CONSUMERS>();
#pragma unroll
            for (int j = 0; j < HELD; j++) found[j] = most[row];
        }
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const int vector = (int)kept(vector_of(j));  // else places are computed ahead, and take registers
            if (vector >= VECTORS) continue;
            const float largest = fmaxf(found[j], TINY), scale = scale_for(p, given, largest);
            put_codes(row, vector, rounded_codes(held[j], inverse_for(scale, given, largest)));
            if (vector % 16 == 0 && (BLOCKED || vector == 0)) put_scale(row, vector / 16, scale);
        }
    }
}
