// y = x W^T + b over weights that keep the codes of their file, of four to eight bits: every block of 32 codes of a row
// (16 in some forms) has a scale, and in some forms an offset, w = scale * code + offset.
//
// A block of x is converted to 24-bit fixed point, in three digits of eight bits, which rounds no more than sums of
// float32 do. The digits are signed, from -128 to 127. Digits times codes are summed without rounding and so in any
// order, by the instructions of the cores that suit few rows or many. The sums of the three digits, then those of the
// blocks, are added up in one order. So the bits of y[m, n] depend neither on M, nor on the instructions used, nor on
// the kind of core.
#include <memory>
#include <vector>

#include "../products.h"
#include "../team.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "coded_x86.h"
#define HAVE_CODES 1
#elif defined(__ARM_FEATURE_DOTPROD)
#include "coded_arm.h"
#define HAVE_CODES 1
#endif

#if HAVE_CODES

namespace {

constexpr int64_t kUnits = 8;  // units of work per thread, so that others can help a thread that is delayed

// A weight consists of matrices of one form each, whose rows follow each other; this is stored before their panels.
struct Matrix {
    int64_t form, unit, rows, start;  // unit: blocks per unit; start: offset of the panels in bytes from `Matrices`
};

struct Matrices {
    int64_t count, unused[3];
    Matrix list[3];
};

// Rows of a product that are multiplied together. at: number of rows in digits before them.
struct Chunk {
    const Product* product;
    int64_t first, M, at;
};

struct RowOf {
    int64_t chunk, row;
};

// Multiplies by one matrix of the weights, whose first channel is `channel`.
template <class Form>
void products(const Product* list, int64_t count, const Matrix& matrix, int64_t channel, int64_t N, int64_t K) {
    static thread_local std::unique_ptr<uint8_t[]> memory;
    static thread_local int64_t room = 0;
    static thread_local std::vector<Chunk> chunks;
    static thread_local std::vector<RowOf> split_rows;
    const int64_t blocks = K / kColumns, panel_bytes = Form::panel_bytes(blocks, matrix.unit);
    const int64_t row_bytes = K * kDigits * kDigitBytes, num_panels = ceil_div(matrix.rows, kPanel);
    const int64_t most = std::clamp<int64_t>(kRowBytes / (row_bytes * kRowStep), 1, kMostRows / kRowStep) * kRowStep;
    const Product* next = list;
    for (int64_t first = 0; next < list + count;) {
        // The chunks whose rows in digits stay in the cache together.
        chunks.clear();
        split_rows.clear();
        int64_t padded = 0;
        while (next < list + count) {
            const int64_t M = smaller(most, next->M - first), size = ceil_div(M, kRowStep) * kRowStep;
            const bool same = !chunks.empty() && chunks.back().product->x == next->x && chunks.back().first == first &&
                              chunks.back().M == M;
            if (!same && padded > 0 && padded + size > most) break;
            chunks.push_back({next, first, M, same ? chunks.back().at : padded});
            if (!same) {
                for (int64_t row = 0; row < M; row++) {
                    split_rows.push_back({static_cast<int64_t>(chunks.size()) - 1, row});
                }
                padded += size;
            }
            first += M;
            if (first >= next->M) next++, first = 0;
        }
        const int64_t digit_bytes = padded * row_bytes, needed = digit_bytes + padded * blocks * sizeof(Scale) + 64;
        if (room < needed) memory.reset(new uint8_t[room = needed]);
        uint8_t* digits = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
        Scale* scales = reinterpret_cast<Scale*>(digits + digit_bytes);
        const auto rows_of = [&](const Chunk& chunk) {
            return Rows{chunk.M, blocks, matrix.unit, digits + chunk.at * row_bytes, scales + chunk.at * blocks};
        };
        const Chunk* all = chunks.data();
        const RowOf* rows = split_rows.data();
        const int64_t num_rows = split_rows.size(), num_chunks = chunks.size(), threads = team_size;
        share(num_rows, [&](int64_t i, int) {
            const Chunk& chunk = all[rows[i].chunk];
            split<Form>(chunk.product->x + (chunk.first + rows[i].row) * K, rows[i].row, rows_of(chunk));
        }, num_rows > 4);
        const int64_t per = std::clamp<int64_t>(num_panels * num_chunks / (threads * kUnits), 1, num_panels);
        const int64_t units = ceil_div(num_panels, per);
        share(num_chunks * units, [&](int64_t i, int) {
            const Chunk& chunk = all[i / units];
            const Product& to = *chunk.product;
            const uint8_t* panels = static_cast<const uint8_t*>(to.w) + matrix.start;
            const auto panel = [&](int64_t p) { return panels + p * panel_bytes; };
            const auto output = [&](int64_t p) {
                return Output{to.y + chunk.first * N + channel + p * kPanel,
                              to.bias ? to.bias + channel + p * kPanel : nullptr, N, matrix.rows - p * kPanel};
            };
            const int64_t unit = i % units;
            multiply<Form>(rows_of(chunk), unit * per, smaller(num_panels, (unit + 1) * per), panel, output);
        });
    }
}

// Loads the numbers of a single channel.
struct One {
    static float halves(const uint8_t* p) { return from_half(load<uint16_t>(p)); }
    static float brains(const uint8_t* p) {
        const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(p)) << 16;
        return load<float>(reinterpret_cast<const uint8_t*>(&bits));
    }
    static float bytes(const uint8_t* p) { return *p; }
    static float signed_bytes(const uint8_t* p) { return static_cast<int8_t>(*p); }
    static float e4m3(const uint8_t* p) { return Fp8Pool::load<1>(p)[0] * Fp8Pool::kUnit; }
    static float floats(const uint8_t* p) { return load<float>(p); }

  private:
    template <class T>
    static T load(const uint8_t* p) {
        T stored;
        __builtin_memcpy(&stored, p, sizeof(T));
        return stored;
    }
};

// Dequantises row `row` of a matrix to floats [K].
template <class Form>
void look_up(int64_t row, const uint8_t* panels, const Matrix& matrix, float* out, int64_t K) {
    typedef typename Form::Numbers Numbers;
    constexpr int64_t kPart = kColumns / Form::kParts;
    const int64_t channel = row % kPanel;
    Place<Form> at(panels + row / kPanel * Form::panel_bytes(K / kColumns, matrix.unit), matrix.unit);
    for (float* end = out + K; out < end; out += kColumns, at.next()) {
        const uint8_t* codes = at.codes(channel / kHalf);
        for (int64_t c = 0; c < kColumns; c++) {
            const int code = Form::Codes::code(codes, channel % kHalf, c);
            const float scale = Numbers::template scale<One>(at.head, at.block, channel, c / kPart);
            if constexpr (Form::kOffset) {
                out[c] = scale * static_cast<float>(code) + Numbers::template offset<One>(at.head, at.block, channel);
            } else {
                out[c] = scale * static_cast<float>(code - Form::Codes::kCentre);
            }
        }
    }
}

struct Kernels {
    void (*products)(const Product*, int64_t, const Matrix&, int64_t, int64_t, int64_t);
    void (*look_up)(int64_t, const uint8_t*, const Matrix&, float*, int64_t);
};

template <class Form>
constexpr Kernels kernels_of() {
    return {products<Form>, look_up<Form>};
}

// Kernels by the numbers of the forms in kernels/formats/gguf_codes.py.
constexpr Kernels kForms[] = {
    kernels_of<Form<Planes<0>, Halves<false>>>(),               // Q4_0
    kernels_of<Form<Planes<0>, Halves<true>>>(),                // Q4_1
    kernels_of<Form<Planes<1>, Halves<false>>>(),               // Q5_0
    kernels_of<Form<Planes<1>, Halves<true>>>(),                // Q5_1
    kernels_of<Form<SignedBytes, Halves<false>>>(),             // Q8_0
    kernels_of<Form<Planes<0>, TwoLevels>>(),                   // Q4_K
    kernels_of<Form<Planes<1>, TwoLevels>>(),                   // Q5_K
    kernels_of<Form<Planes<2>, SignedTwoLevels>>(),             // Q6_K
    kernels_of<Form<Table<Iq4Values>, Halves<false>>>(),        // IQ4_NL
    kernels_of<Form<Table<DoubledFp4Values>, Brains>>(),        // MXFP4
    kernels_of<Form<Planes<0>, Floats>>(),                      // four bits in groups of any length
    kernels_of<Form<SignedBytes, Floats>>(),                    // eight bits in groups of any length
    kernels_of<Form<Table<DoubledFp4Values>, E4m3<false>>>(),   // NVFP4
    kernels_of<Form<Table<DoubledFp4Values>, E4m3<true>>>(),    // NVFP4 with scales that are divided
};

}  // namespace

extern "C" int64_t multiplies_codes() { return 1; }

void coded_products(const Product* list, int64_t count, int64_t N, int64_t K) {
    if (count == 0) return;
    const auto* all = static_cast<const Matrices*>(list->w);  // the same for all, but for the panels that follow it
    int64_t done = 0;
    for (const Matrix* matrix = all->list; matrix < all->list + all->count; done += matrix++->rows) {
        kForms[matrix->form].products(list, count, *matrix, done, N, K);
    }
}

extern "C" void coded_linear(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N,
                             int64_t K) {
    const Product product{x, panels, bias, y, M};
    if (M > 0) coded_products(&product, 1, N, K);
}

extern "C" void coded_embedding(const int64_t* ids, const uint8_t* panels, float* y, int64_t T, int64_t K) {
    const auto* all = reinterpret_cast<const Matrices*>(panels);
    share(T, [=](int64_t t, int) {
        const Matrix* matrix = all->list;
        int64_t row = ids[t];
        for (; row >= matrix->rows; matrix++) row -= matrix->rows;
        kForms[matrix->form].look_up(row, panels + matrix->start, *matrix, y + t * K, K);
    }, T > 8);
}

#else

// For cores without the instructions, weights are widened to float32 when they are loaded.
extern "C" int64_t multiplies_codes() { return 0; }
void coded_products(const Product*, int64_t, int64_t, int64_t) {}
extern "C" void coded_linear(const float*, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t) {}
extern "C" void coded_embedding(const int64_t*, const uint8_t*, float*, int64_t, int64_t) {}

#endif
