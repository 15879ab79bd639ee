// y = x W^T + b over weights that keep the codes of their file, of four to eight bits: every block of 32 codes of a row
// (16 in one form) has a scale, and in some forms an offset, w = scale * code + offset.
//
// A block of x is converted to 24-bit fixed point, in three digits of eight bits, which rounds no more than sums of
// float32 do. The digits are signed, from -128 to 127. Digits times codes are summed without rounding and so in any
// order, by the instructions of the cores that suit few rows or many. The sums of the three digits, then those of the
// blocks, are added up in one order. So the bits of y[m, n] depend neither on M, nor on the instructions used, nor on
// the kind of core.
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

template <class Form>
void product(const float* x, const uint8_t* panels, const Matrix& matrix, const float* bias, float* y, int64_t M,
             int64_t N, int64_t K) {
    static thread_local std::unique_ptr<uint8_t[]> memory;
    static thread_local int64_t room = 0;
    const int64_t blocks = K / kColumns, panel_bytes = Form::panel_bytes(blocks, matrix.unit);
    const int64_t row_bytes = K * kDigits * kDigitBytes;
    const int64_t most = std::clamp<int64_t>(kRowBytes / (row_bytes * kRowStep), 1, kMostRows / kRowStep) * kRowStep;
    const int64_t padded = ceil_div(smaller(M, most), kRowStep) * kRowStep;
    const int64_t digit_bytes = padded * row_bytes, needed = digit_bytes + padded * blocks * sizeof(Scale) + 64;
    if (room < needed) memory.reset(new uint8_t[room = needed]);
    uint8_t* digits = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
    Scale* scales = reinterpret_cast<Scale*>(digits + digit_bytes);
    const int64_t num_panels = ceil_div(matrix.rows, kPanel), threads = team_size;
    const int64_t per = larger(1, num_panels / (threads * kUnits)), units = ceil_div(num_panels, per);
    for (int64_t done = 0; done < M; done += most) {
        const Rows rows{smaller(most, M - done), blocks, matrix.unit, digits, scales};
        share(rows.M, [&](int64_t row, int) { split<Form>(x + (done + row) * K, row, rows); }, rows.M > 4);
        share(units, [&](int64_t unit, int) {
            const auto panel = [&](int64_t p) { return panels + p * panel_bytes; };
            const auto output = [&](int64_t p) {
                return Output{y + done * N + p * kPanel, bias ? bias + p * kPanel : nullptr, N, matrix.rows - p * kPanel};
            };
            multiply<Form>(rows, unit * per, smaller(num_panels, (unit + 1) * per), panel, output);
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
    void (*product)(const float*, const uint8_t*, const Matrix&, const float*, float*, int64_t, int64_t, int64_t);
    void (*look_up)(int64_t, const uint8_t*, const Matrix&, float*, int64_t);
};

template <class Form>
constexpr Kernels kernels_of() {
    return {product<Form>, look_up<Form>};
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
};

}  // namespace

extern "C" int64_t multiplies_codes() { return 1; }

extern "C" void coded_linear(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N,
                             int64_t K) {
    if (M == 0) return;
    const auto* all = reinterpret_cast<const Matrices*>(panels);
    int64_t done = 0;
    for (const Matrix* matrix = all->list; matrix < all->list + all->count; done += matrix++->rows) {
        kForms[matrix->form].product(x, panels + matrix->start, *matrix, bias ? bias + done : nullptr, y + done, M, N, K);
    }
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
extern "C" void coded_linear(const float*, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t) {}
extern "C" void coded_embedding(const int64_t*, const uint8_t*, float*, int64_t, int64_t) {}

#endif
