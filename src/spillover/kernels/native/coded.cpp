// y = x W^T + b over weights that stay as their file has them: codes of four or eight bits, and for every block of 32
// of a row a scale and an offset, w = scale * code + offset.
//
// A block of x becomes 24 bits fixed-point, in three digits of eight bits: what that rounds away is no more than what
// sums of float32 do. The digits are signed, from -128 to 127. Digits times codes are summed up without rounding, so in
// any order: by whichever instructions the cores have for few rows and for many. The sums of the three digits, then
// those of the blocks, are added up in one order. So the bits of y[m, n] depend neither on M, nor on the way they were
// made, nor on the kind of core.
#include "team.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "coded_x86.h"
#define HAVE_CODES 1
#elif defined(__ARM_FEATURE_DOTPROD)
#include "coded_arm.h"
#define HAVE_CODES 1
#endif

#if HAVE_CODES

namespace {

constexpr int64_t kUnits = 8;  // of work for a thread, so that one that is held up is helped

template <class Form>
void product(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N, int64_t K) {
    static thread_local std::unique_ptr<uint8_t[]> memory;
    static thread_local int64_t room = 0;
    const int64_t blocks = K / kColumns;
    const int64_t row_bytes = K * kDigits * kDigitBytes;
    const int64_t most = std::clamp<int64_t>(kRowBytes / (row_bytes * kRowStep), 1, kMostRows / kRowStep) * kRowStep;
    const int64_t padded = ceil_div(smaller(M, most), kRowStep) * kRowStep;
    const int64_t digit_bytes = padded * row_bytes, needed = digit_bytes + padded * blocks * sizeof(Scale) + 64;
    if (room < needed) memory.reset(new uint8_t[room = needed]);
    uint8_t* digits = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
    Scale* scales = reinterpret_cast<Scale*>(digits + digit_bytes);
    const int64_t num_panels = ceil_div(N, kPanel), threads = team_size;
    const int64_t per = larger(1, num_panels / (threads * kUnits)), units = ceil_div(num_panels, per);
    for (int64_t done = 0; done < M; done += most) {
        const Rows rows{smaller(most, M - done), blocks, digits, scales};
        share(rows.M, [&](int64_t row, int) { split<Form>(x + (done + row) * K, row, rows); }, rows.M > 4);
        share(units, [&](int64_t unit, int) {
            const auto panel = [&](int64_t p) { return panels + p * blocks * Form::kBytes; };
            const auto output = [&](int64_t p) {
                return Output{y + done * N + p * kPanel, bias ? bias + p * kPanel : nullptr, N, N - p * kPanel};
            };
            multiply<Form>(rows, unit * per, smaller(num_panels, (unit + 1) * per), panel, output);
        });
    }
}

template <class Form>
void look_up(const int64_t* ids, const uint8_t* panels, float* y, int64_t T, int64_t K) {
    share(T, [=](int64_t t, int) {
        const int64_t channel = ids[t] % kPanel;
        const uint8_t* block = panels + ids[t] / kPanel * (K / kColumns) * Form::kBytes;
        for (float* out = y + t * K; out < y + (t + 1) * K; out += kColumns, block += Form::kBytes) {
            const auto number = [&](int64_t at) {
                uint16_t stored;
                __builtin_memcpy(&stored, block + at + channel * 2, 2);
                return from_half(stored);
            };
            const float scale = number(0), offset = Form::kOffset ? number(64) : 0;
            const uint8_t* codes = codes_of<Form>(block, channel / kHalf);
            for (int64_t c = 0; c < kColumns; c++) {
                out[c] = scale * static_cast<float>(Form::code(codes, channel % kHalf, c)) + offset;
            }
        }
    }, T > 8);
}

}  // namespace

extern "C" int64_t multiplies_codes() { return 1; }

extern "C" void coded_linear(const float* x, const uint8_t* panels, const float* bias, float* y, int64_t M, int64_t N,
                             int64_t K, int64_t bits) {
    if (M > 0) (bits == 4 ? product<Four> : product<Eight>)(x, panels, bias, y, M, N, K);
}

extern "C" void coded_embedding(const int64_t* ids, const uint8_t* panels, float* y, int64_t T, int64_t K,
                                int64_t bits) {
    (bits == 4 ? look_up<Four> : look_up<Eight>)(ids, panels, y, T, K);
}

#else

// Cores without the instructions: weights are widened to float32 when they are loaded.
extern "C" int64_t multiplies_codes() { return 0; }
extern "C" void coded_linear(const float*, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t) {}
extern "C" void coded_embedding(const int64_t*, const uint8_t*, float*, int64_t, int64_t, int64_t) {}

#endif
