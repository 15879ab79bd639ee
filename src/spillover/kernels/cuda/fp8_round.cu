// Rounds rows of x to FP8 (e4m3), one block of threads per row, for products whose blocks do not do so themselves; with
// NORMED it first adds them to a residual and normalises the sums.
//
// Defined at compilation: BLOCKED, X_BF16, INPUTS (per row), NORMED (0 or 1), ROUNDERS (threads, in whole warps).
#include "fp8_rows.cuh"

constexpr int CONSUMERS = ROUNDERS;
#include "fp8_norm.cuh"
#if NORMED  // profiles recognise the start of half a layer by this name
#define quantize_rows add_rms_norm_quantize
#endif
constexpr int RESIDENT = HELD > 1 ? 1 : 3;  // blocks of 512 threads per multiprocessor, limited by registers

extern "C" __global__ void __launch_bounds__(ROUNDERS, RESIDENT) quantize_rows(const __grid_constant__ Product p) {
    __shared__ float parts[2 * MOST_PARTS];
    const int row = blockIdx.x;
    uint4 held[HELD], weight[HELD];
    if (NORMED) read_row(weight, p.norm);
    launch_dependents();
    wait_before();
    if (NORMED) norm_row(held, p, row, weight, true, parts);
    else read_row(held, p.x + row * p.x_stride);
    round_row(
        p, held, parts + MOST_PARTS,
        [&](int step, float scale) { p.x_scales[(i64)step * p.scales_row + row] = scale; },
        [&](int vector, uint2 codes) { *(uint2*)(p.codes + (i64)row * INPUTS + vector * 8) = codes; });
}
