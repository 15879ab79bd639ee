// The search for the scales of quantised weights, and their rounding with statistics of the inputs. kernels/quantize.py
// has the same in torch.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "team.h"
#include "vector.h"

namespace {

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
constexpr int64_t kRowsTogether = 16;
constexpr int64_t kBlock = 128;  // most columns of a block

// Rounds to the type of the scales: 0 float32, 1 bfloat16, 2 float16 (scales are positive; ties go to even).
float rounded(float x, int64_t type) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (type == 1) {
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    } else if (type == 2) {
        // Below 2^-14 a float16 is a multiple of 2^-24, which adding 0.5 (whose last bit is worth 2^-24) rounds to.
        if (x < 0x1p-14f) return (x + 0.5f) - 0.5f;
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    } else {
        return x;
    }
    std::memcpy(&x, &bits, 4);
    return type == 2 && x > 65504.0f ? __builtin_inff() : x;
}

// Returns the squared error of a group in which column k counts importance[k] times.
float error(const float* x, int64_t count, float scale, float top, const float* importance) {
    typedef Vec<kLanes>::F F;
    const F by = splat<kLanes>(1.0f / scale), low = splat<kLanes>(-top), high = splat<kLanes>(top - 1.0f);
    F total{};
    for (int64_t k = 0; k < count; k += kLanes) {
        const F values = load<kLanes>(x + k);
        F codes = values * by;
        codes = codes < low ? low : codes;
        codes = codes > high ? high : codes;
        codes = (codes + kMagic) - kMagic;
        const F wrong = codes * scale - values;
        const F squared = wrong * wrong;
        total += importance ? squared * load<kLanes>(importance + k) : squared;
    }
    return sum<kLanes>(total);
}

float largest(const float* x, int64_t count) {
    typedef Vec<kLanes>::F F;
    F found{};
    for (int64_t k = 0; k < count; k += kLanes) {
        const F values = load<kLanes>(x + k), minus = -values;
        found = maximum<kLanes>(values > minus ? values : minus, found);
    }
    return maximum<kLanes>(found);
}

// Makes the compiler forget what is at this address: otherwise it would fuse a product with the subtraction that
// follows, which rounds once where torch rounds twice.
inline void forget(const float* p) { asm volatile("" : : "r"(p) : "memory"); }

void round_row(float* x, const float* factor, int64_t stride, const float* scales, const int64_t* order, int64_t group,
               int64_t columns, float top, int8_t* codes, float* errors) {
    float products[kBlock];
    for (int64_t c = 0; c < columns; c++) {
        const float* along = factor + c * stride;
        const float scale = scales[order[c] / group];
        const float code = std::min(top - 1.0f, std::max(-top, std::nearbyint(x[c] / scale)));
        codes[order[c]] = static_cast<int8_t>(code);
        products[c] = code * scale;
        forget(products);
        const float error = (x[c] - products[c]) / along[c];
        errors[c] = error;
        for (int64_t k = c + 1; k < columns; k++) products[k] = error * along[k];
        forget(products);
        for (int64_t k = c + 1; k < columns; k++) x[k] -= products[k];
    }
}

}  // namespace

// Writes the scales [rows, columns / group] of a weight [rows, columns], rounded to their type. least: a lower bound of
// a scale; shrinks: what the scale that clips nothing is multiplied by, in the order in which they are tried.
extern "C" void int_scales(const float* weight, int64_t rows, int64_t columns, int64_t group, int64_t bits, int64_t type,
                           float least, const float* shrinks, int64_t tries, const float* importance, float* scales) {
    const float top = static_cast<float>(1 << (bits - 1));
    const int64_t groups = columns / group;
    share(ceil_div(rows, kRowsTogether), [&](int64_t i, int) {
        for (int64_t row = i * kRowsTogether; row < smaller(rows, (i + 1) * kRowsTogether); row++) {
            for (int64_t g = 0; g < groups; g++) {
                const float* x = weight + row * columns + g * group;
                const float* counts = importance ? importance + g * group : nullptr;
                const float full = std::max(largest(x, group), least * (top - 1.0f)) / (top - 1.0f);
                float best = rounded(full, type), smallest = __builtin_inff();
                for (int64_t t = 0; t < tries; t++) {
                    const float scale = rounded(full * shrinks[t], type);
                    const float found = error(x, group, scale, top, counts);
                    if (found < smallest) best = scale, smallest = found;
                }
                scales[row * groups + g] = best;
            }
        }
    });
}

// Rounds columns [start, end) of values [rows, width], at most 128 of them, and writes their errors [rows, end - start].
// Column k of values is column order[k] of the codes [rows, width], and its scale is that of the group of order[k].
// factor: [width, width], upper triangular. The results have the bits of the torch code.
extern "C" void round_columns(float* values, const float* factor, const float* scales, const int64_t* order,
                              int64_t rows, int64_t width, int64_t start, int64_t end, int64_t group, int64_t bits,
                              int8_t* codes, float* errors) {
    const float top = static_cast<float>(1 << (bits - 1));
    const int64_t columns = end - start;
    share(ceil_div(rows, kRowsTogether), [&](int64_t i, int) {
        for (int64_t row = i * kRowsTogether; row < smaller(rows, (i + 1) * kRowsTogether); row++) {
            round_row(values + row * width + start, factor + start * width + start, width,
                      scales + row * (width / group), order + start, group, columns, top, codes + row * width,
                      errors + row * columns);
        }
    });
}
