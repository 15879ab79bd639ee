// Shared code of the kernels of FP8 products: arguments, rounding of rows of x to e4m3, the gate, rings of stages.
//
// Defined at compilation: BLOCKED, X_BF16 (otherwise x is float16), and for products the sums of instructions.cuh.
#include "instructions.cuh"

constexpr int STEP = 128;  // inputs per step, and bytes of its codes
constexpr int KEPT = 8;  // vectors of 8 inputs that a thread keeps between finding the largest number and rounding
constexpr float LARGEST = 448.0f, TINY = 1e-12f;

// Kernel arguments; must match kernels/cuda/fp8_linear.py.
struct Product {
    Map w;                     // map of weights [channels][inputs]
    Map codes_map;             // map of `codes`
    const u16* x;              // [rows][inputs], rows x_stride elements apart
    u8* codes;                 // x rounded to e4m3, [rows][inputs]
    float* x_scales;           // [rows]; BLOCKED: [steps][scales_row]
    const float* input_scale;  // one scale for all rows, or null
    const float* w_scales;     // [channels]; BLOCKED: [channels / 128][steps]
    const u16* bias;           // [channels], or null
    u16* out;                  // [rows][channels]; GATED: silu(first half) * second half
    i64 x_stride;
    int rows, channels, steps, chunk, scales_row, stages;  // chunk: steps per chunk
    // Used if rows are first added to a residual and normalised:
    const u16* residual;       // [rows][inputs], rows residual_stride elements apart
    const u16* norm;           // weights [inputs]
    u16* total;                // x + residual, [rows][inputs]
    i64 residual_stride;
    float eps;
};

DEV float low_number(u32 v) { return X_BF16 ? __uint_as_float(v << 16) : from_half(v & 0xFFFF); }
DEV u32 rounded(float low, float high) { return X_BF16 ? to_bf16x2(low, high) : to_half2(low, high); }
DEV void numbers_of(float (&f)[8], const uint4& v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = low_number(words[i]), f[2 * i + 1] = X_BF16 ? __uint_as_float(words[i] & 0xFFFF0000u) : low_number(words[i] >> 16);
}
DEV float largest_of(const uint4& v) {
    float f[8], most = 0;
    numbers_of(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(f[i]));
    return most;
}
// Returns the maximum over the 16 lanes that share a step of a row.
DEV float largest_of_step(float most) {
#pragma unroll
    for (int far = 8; far > 0; far /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
    return most;
}
DEV uint2 rounded_codes(const uint4& v, float inverse) {
    float f[8];
    numbers_of(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = __fmul_rn(f[i], inverse);
    return make_uint2(to_fp8x2(f[0], f[1]) | to_fp8x2(f[2], f[3]) << 16, to_fp8x2(f[4], f[5]) | to_fp8x2(f[6], f[7]) << 16);
}

// Return the scale of numbers whose largest is `found`, unless a scale is `given` for all rows, and the inverse scale.
DEV float scale_for(const Product& p, bool given, float found) { return given ? *p.input_scale : __fdiv_rn(found, LARGEST); }
DEV float inverse_for(float scale, bool given, float found) {
    return given ? __fdiv_rn(1.0f, scale) : __fdiv_rn(LARGEST, found);
}

// Rounds `span` steps, from `begin` on, of some rows. `most`: [rows] zeros in shared memory, which the threads set to
// the largest numbers of whole rows; `meet` synchronises the threads before these are read.
template <int COUNT, class Meet, class PutScale, class PutCodes>
DEV void quantize(const Product& p, int first_row, int rows, int begin, int span, float* most, Meet meet, PutScale put_scale, PutCodes put_codes) {
    uint4 kept[KEPT];
    auto load = [&](int base, int from, int vectors) {
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int at = base + j * COUNT + (int)threadIdx.x;
            kept[j] = make_uint4(0, 0, 0, 0);
            if (at < rows * vectors) kept[j] = *(const uint4*)(p.x + (first_row + at / vectors) * p.x_stride + (from * 16 + at % vectors) * 8);
        }
    };
    bool given = !BLOCKED && p.input_scale, finds = !BLOCKED && !given;
    if (finds) {
        const int whole = p.steps * 16;
#pragma unroll 1
        for (int base = 0; base < rows * whole; base += KEPT * COUNT) {
            load(base, 0, whole);
#pragma unroll
            for (int j = 0; j < KEPT; j++) {
                int at = base + j * COUNT + (int)threadIdx.x;
                float found = largest_of_step(largest_of(kept[j]));
                if (at < rows * whole && at % 16 == 0) atomicMax((int*)(most + at / whole), __float_as_int(found));
            }
        }
        meet();
    }
    const int vectors = span * 16, all = rows * vectors;
    const bool has_all = finds && span == p.steps && all <= KEPT * COUNT;
#pragma unroll 1
    for (int base = 0; base < all; base += KEPT * COUNT) {
        if (!has_all) load(base, begin, vectors);
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int at = base + j * COUNT + (int)threadIdx.x;
            float found = BLOCKED ? largest_of_step(largest_of(kept[j])) : 0;
            if (at >= all) continue;
            int row = at / vectors, vector = at % vectors;
            if (finds) found = most[row];
            found = fmaxf(found, TINY);
            float scale = scale_for(p, given, found);
            put_codes(row, vector, rounded_codes(kept[j], inverse_for(scale, given, found)));
            if (vector % 16 == 0 && (BLOCKED || vector == 0)) put_scale(row, vector / 16, scale);
        }
    }
}

// Returns 1 / v for v from 1 to 2**125, with the bits of a division but without its branch for other numbers.
DEV float inverse_from_1(float v) {
    const float near = near_inverse(v);
    return __fmaf_rn(near, -__fmaf_rn(v, near, -1.0f), near);
}
constexpr float LEAST_GATED = -80.0f;  // 1 + exp(80) is within the range of inverse_from_1
// Returns silu(first) * second, rounded as when products and activation are separate kernels. IN_RANGE: `first` is above
// LEAST_GATED, which saves the branches of a division.
template <bool IN_RANGE = false>
DEV float gate(float first, float second) {
    first = low_number(rounded(first, 0)), second = low_number(rounded(second, 0));
    const float sum = 1.0f + fast_exp(-first), inverse = IN_RANGE ? inverse_from_1(sum) : 1.0f / sum;
    return __fmul_rn(low_number(rounded(__fmul_rn(first, inverse), 0)), second);
}

struct Ring {  // the current stage
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
};
