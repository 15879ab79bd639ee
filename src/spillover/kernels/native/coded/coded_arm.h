// Products with codes on ARM cores: by vectors of bytes (sdot), and for more rows by matrices of bytes where the cores
// support them (i8mm: smmla).
//
// A register holds four channels (a quad) with four codes each: sdot adds their products with four digits of one row to
// the quad's sums. smmla uses two channels of eight codes, and two rows of eight digits. Both multiply signed bytes.
// Codes of four and five bits stay unsigned, and their sums start with a value that subtracts the centre.
//
// Converting an integer to float takes as long as eight products. So sums start 0x4b400000 higher: the bits of such a
// sum are those of the float sum + 1.5 * 2^23, if the sum's magnitude is below 2^22, which 32 * 128 * 128 is.
#pragma once
#include <arm_neon.h>

#include "coded.h"

namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kMatrices = true;
#else
constexpr bool kMatrices = false;
#endif
constexpr int64_t kRowStep = 2;                        // rows that smmla multiplies at once
constexpr int64_t kDigitBytes = 1;
constexpr int64_t kRowBytes = 1 << 19;                 // maximum bytes of x in digits, to stay in L2 cache
constexpr int64_t kRecord = kDigits * kColumns;        // bytes of the digits of one block of a row
constexpr int64_t kQuads = kPanel / 4, kHalfQuads = kQuads / 2, kGroups = kColumns / 4;

constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;

struct Scale {
    int32_t start[kDigits][4];  // start value of each digit's sums, the same in every lane
    float unit;                 // unit of the lowest digit
    float total;                // sum of the block's columns
    float unused[2];
};

float from_half(uint16_t stored) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(stored))), 0);
}

struct Lanes {
    static float32x4_t halves(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(shorts(p))); }
    static float32x4_t brains(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(shorts(p), 16)); }
    static float32x4_t bytes(const uint8_t* p) {
        return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four(p))))));
    }
    static float32x4_t signed_bytes(const uint8_t* p) {
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four(p))))));
    }
    static float32x4_t e4m3(const uint8_t* p) { return (float32x4_t)(Fp8Pool::load<4>(p) * Fp8Pool::kUnit); }
    static float32x4_t floats(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }

  private:
    static uint16x4_t shorts(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
    static uint32x2_t four(const uint8_t* p) {
        uint32_t stored;
        __builtin_memcpy(&stored, p, 4);
        return vdup_n_u32(stored);
    }
};

// bytes<I>: the I-th vector of a quad's codes as signed bytes, less the codes' centre plus kBase; four columns of a
// channel are adjacent, in the form's order. `half`: start of the quad's codes in the first vector.
template <class Codes>
struct Vectors {
    static constexpr int kBase = Codes::kHigh < 2 ? Codes::kCentre : 0;

    template <int I>
    static int8x16_t bytes(const uint8_t* half) {
        const uint8x16_t stored = vld1q_u8(half + I / 2 * 64);
        uint8x16_t code = I % 2 ? vshrq_n_u8(stored, 4) : vandq_u8(stored, vdupq_n_u8(15));
        if constexpr (Codes::kHigh > 0) {
            constexpr int kAt = I * Codes::kHigh % 8;
            uint8x16_t high = vld1q_u8(half + 256 + I * Codes::kHigh / 8 * 64);
            if constexpr (kAt < 4) high = vshlq_n_u8(high, 4 - kAt);
            if constexpr (kAt > 4) high = vshrq_n_u8(high, kAt - 4);
            code = vorrq_u8(code, vandq_u8(high, vdupq_n_u8(((1 << Codes::kHigh) - 1) << 4)));
        }
        return vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(Codes::kCentre - kBase));
    }
};

template <class Named>
struct Vectors<Table<Named>> {
    static constexpr int kBase = 0;
    template <int I>
    static int8x16_t bytes(const uint8_t* half) {
        return vqtbl1q_s8(vld1q_s8(Named::kValues), vreinterpretq_u8_s8(Vectors<Planes<0>>::bytes<I>(half)));
    }
};

template <>
struct Vectors<SignedBytes> {
    static constexpr int kBase = 0;
    template <int I>
    static int8x16_t bytes(const uint8_t* half) {
        return vreinterpretq_s8_u8(vld1q_u8(half + I * 64));
    }
};

// Returns the start of the codes of a quad.
template <class Form>
const uint8_t* quad_codes(const Place<Form>& at, int64_t quad) {
    return at.codes(quad / kHalfQuads) + quad % kHalfQuads * 16;
}

// Returns whether a row is multiplied together with the other row of its pair.
bool paired(int64_t row, int64_t rows) { return kMatrices && (row | 1) < rows; }

// Converts a row of x to digits [blocks][rows][kDigits][32 columns], or [kDigits][4][2 rows][8 columns] for a pair.
template <class Form>
void split(const float* x, int64_t row, const Rows& rows) {
    const char* o = Form::Codes::kOrder;
    const uint8_t order[16] = {
        uint8_t(o[0]),     uint8_t(o[1]),     uint8_t(o[2]),     uint8_t(o[3]),     uint8_t(o[4]),     uint8_t(o[5]),
        uint8_t(o[6]),     uint8_t(o[7]),     uint8_t(8 + o[0]), uint8_t(8 + o[1]), uint8_t(8 + o[2]), uint8_t(8 + o[3]),
        uint8_t(8 + o[4]), uint8_t(8 + o[5]), uint8_t(8 + o[6]), uint8_t(8 + o[7])};
    const uint8x16_t places = vld1q_u8(order);
    const bool pair = paired(row, rows.M);
    const int64_t apart = pair ? 16 : 8;  // bytes from eight columns to the next eight
    auto* out = reinterpret_cast<int8_t*>(rows.digits) + (pair ? row / 2 * 2 * kRecord + row % 2 * 8 : row * kRecord);
    Scale* scale = rows.scales + row * rows.blocks;
    for (int64_t b = 0; b < rows.blocks; b++, x += kColumns, out += rows.M * kRecord, scale++) {
        int32x4_t rest[kGroups], largest = vdupq_n_s32(0);
        for (int g = 0; g < kGroups; g++) {
            // Compared as integers, since a comparison of floats would ignore NaN.
            largest = vmaxq_s32(largest, vreinterpretq_s32_f32(vabsq_f32(vld1q_f32(x + g * 4))));
        }
        scale->unit = unit_of(vmaxvq_s32(largest));
        int32x4_t total = vdupq_n_s32(0);
        for (int g = 0; g < kGroups; g++) {
            rest[g] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + g * 4), 1 / scale->unit));
            total = vaddq_s32(total, rest[g]);
        }
        scale->total = static_cast<float>(vaddvq_s32(total)) * scale->unit;
        for (int64_t d = 0; d < kDigits; d++) {
            int32_t sum = 0;
            for (int half = 0; half < 2; half++) {
                const int32x4_t* four = rest + half * 4;
                // The lowest byte of a number, as a signed byte, is its digit: the rest is a multiple of 256.
                const int16x8_t low = vcombine_s16(vmovn_s32(four[0]), vmovn_s32(four[1]));
                const int16x8_t high = vcombine_s16(vmovn_s32(four[2]), vmovn_s32(four[3]));
                const int8x16_t digits = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
                sum += vaddlvq_s8(digits);
                const int8x16_t ordered = vqtbl1q_s8(digits, places);
                vst1_s8(out + (d * 4 + half * 2) * apart, vget_low_s8(ordered));
                vst1_s8(out + (d * 4 + half * 2 + 1) * apart, vget_high_s8(ordered));
            }
            vst1q_s32(scale->start[d], vdupq_n_s32(kMagicBits - Vectors<typename Form::Codes>::kBase * sum));
            for (int g = 0; g < kGroups; g++) rest[g] = vrshrq_n_s32(rest[g], 8);
        }
    }
}

// The scales and offsets of one part of a block, for a quad.
template <class Form>
struct Channels {
    float32x4_t scale, offset;

    Channels(const Place<Form>& at, int64_t quad, int64_t part) {
        typedef typename Form::Numbers Numbers;
        scale = Numbers::template scale<Lanes>(at.head, at.block, quad * 4, part);
        if constexpr (Form::kOffset) {
            offset = Numbers::template offset<Lanes>(at.head, at.block, quad * 4);
            if constexpr (Form::Codes::kCentre) offset = vfmaq_f32(offset, scale, vdupq_n_f32(Form::Codes::kCentre));
        }
    }

    // Adds a part of a block to a sum; `products`: those of the three digits with the codes.
    float32x4_t add(float32x4_t sum, const int32x4_t (&products)[kDigits], const Scale& x) const {
        const auto number = [&](int d) {
            return vsubq_f32(vreinterpretq_f32_s32(products[d]), vdupq_n_f32(kMagic));
        };
        // The lower two digits are added first, then the highest.
        const float32x4_t lower = vfmaq_f32(number(0), number(1), vdupq_n_f32(256));
        const float32x4_t all = vfmaq_f32(lower, number(2), vdupq_n_f32(65536));
        sum = vfmaq_f32(sum, scale, vmulq_n_f32(all, x.unit));
        if constexpr (Form::kOffset) sum = vfmaq_f32(sum, offset, vdupq_n_f32(x.total));
        return sum;
    }
};

// The digits of a block of a row, in registers.
struct Digits {
    int8x16_t digits[kDigits][2];

    explicit Digits(const int8_t* from) {
        for (int d = 0; d < kDigits; d++) {
            for (int half = 0; half < 2; half++) digits[d][half] = vld1q_s8(from + d * kColumns + half * 16);
        }
    }

    // products += those of the digits with the G-th four columns of a quad.
    template <int G>
    void add(int32x4_t (&products)[kDigits], int8x16_t codes) const {
        for (int d = 0; d < kDigits; d++) products[d] = vdotq_laneq_s32(products[d], codes, digits[d][G / 4], G % 4);
    }
};

void store(const Output& out, int64_t row, int64_t quad, float32x4_t sum) {
    const int64_t n = quad * 4, left = out.width - n;
    float* y = out.y + row * out.N + n;
    if (left >= 4) {
        vst1q_f32(y, out.bias ? vaddq_f32(sum, vld1q_f32(out.bias + n)) : sum);
    } else {
        for (int64_t i = 0; i < left; i++) y[i] = sum[i] + (out.bias ? out.bias[n + i] : 0.0f);
    }
}

// Loads the start values of a block's sums. The asm hides the address, to make the compiler load again: it would copy
// registers instead, which occupies the vector units.
inline void start(const Scale& scale, int32x4_t (&products)[kDigits]) {
    const int32_t* from = scale.start[0];
    asm volatile("" : "+r"(from));
    for (int d = 0; d < kDigits; d++) products[d] = vld1q_s32(from + d * 4);
}

template <class Form>
void one_row(const uint8_t* panel, const Rows& rows, const Output& out) {
    constexpr int kTogether = 2;  // quads at a time, enough that no product waits for the previous one
    constexpr int kPartGroups = kGroups / Form::kParts;
    float32x4_t sums[kQuads] = {};
    const auto* digits = reinterpret_cast<const int8_t*>(rows.digits);
    const Scale* scale = rows.scales;
    Place<Form> at(panel, rows.unit);
    for (int64_t b = 0; b < rows.blocks; b++, at.next(), digits += kRecord, scale++) {
        const Digits x(digits);
#pragma GCC unroll 4
        for (int64_t quad = 0; quad < kQuads; quad += kTogether) {
            unrolled<0, Form::kParts>([&](auto part) {
                constexpr int kPart = decltype(part)::value;
                int32x4_t products[kTogether][kDigits];
                for (auto& three : products) start(*scale, three);
                unrolled<kPart * kPartGroups, kPartGroups>([&](auto i) {
                    constexpr int I = decltype(i)::value;
#pragma GCC unroll 2
                    for (int q = 0; q < kTogether; q++) {
                        const uint8_t* codes = quad_codes(at, quad + q);
                        x.template add<I>(products[q], Vectors<typename Form::Codes>::template bytes<I>(codes));
                    }
                });
#pragma GCC unroll 2
                for (int q = 0; q < kTogether; q++) {
                    sums[quad + q] = Channels<Form>(at, quad + q, kPart).add(sums[quad + q], products[q], *scale);
                }
            });
        }
    }
    for (int64_t quad = 0; quad < kQuads; quad++) store(out, 0, quad, sums[quad]);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Adds to the sums of two rows a part of their blocks times a quad's codes, as matrices.
template <class Form, int PART>
inline void add_pair(const int8_t* digits, const int8x16_t (&codes)[kGroups], const Channels<Form>& channels,
                     const Scale& first, const Scale& second, float* first_sums, float* second_sums) {
    constexpr int kPairGroups = kGroups / 2 / Form::kParts;
    int32x4_t sums[kDigits][2];  // each vector has two channels, as [channel][row]
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; d++) {
        sums[d][0] = sums[d][1] = vzip1q_s32(vld1q_s32(first.start[d]), vld1q_s32(second.start[d]));
#pragma GCC unroll 4
        for (int g = PART * kPairGroups; g < (PART + 1) * kPairGroups; g++) {
            const int8x16_t x = vld1q_s8(digits + (d * 4 + g) * 16);
            sums[d][0] = vmmlaq_s32(sums[d][0], codes[2 * g], x);
            sums[d][1] = vmmlaq_s32(sums[d][1], codes[2 * g + 1], x);
        }
    }
    int32x4_t products[2][kDigits];
    for (int d = 0; d < kDigits; d++) {
        products[0][d] = vuzp1q_s32(sums[d][0], sums[d][1]);
        products[1][d] = vuzp2q_s32(sums[d][0], sums[d][1]);
    }
    vst1q_f32(first_sums, channels.add(vld1q_f32(first_sums), products[0], first));
    vst1q_f32(second_sums, channels.add(vld1q_f32(second_sums), products[1], second));
}

// Reorders codes, for every eight columns, to the quad's first two channels of eight columns, then the other two.
inline void as_matrices(const int8x16_t (&codes)[kGroups], int8x16_t (&out)[kGroups]) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g += 2) {
        const int32x4_t low = vreinterpretq_s32_s8(codes[g]), high = vreinterpretq_s32_s8(codes[g + 1]);
        out[g] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
        out[g + 1] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
    }
}

#endif

template <class Form>
void many_rows(const uint8_t* panel, const Rows& rows, const Output& out) {
    constexpr int kPartGroups = kGroups / Form::kParts;
    alignas(64) float sums[kMostRows][kPanel];
    for (int64_t row = 0; row < rows.M; row++) {
        for (int64_t n = 0; n < kPanel; n++) sums[row][n] = 0;
    }
    const auto* digits = reinterpret_cast<const int8_t*>(rows.digits);
    Place<Form> at(panel, rows.unit);
    for (int64_t b = 0; b < rows.blocks; b++, at.next(), digits += rows.M * kRecord) {
        const Scale* scales = rows.scales + b;
        for (int64_t quad = 0; quad < kQuads; quad++) {
            int8x16_t codes[kGroups];
            unrolled<0, kGroups>([&](auto i) {
                constexpr int I = decltype(i)::value;
                codes[I] = Vectors<typename Form::Codes>::template bytes<I>(quad_codes(at, quad));
            });
#if defined(__ARM_FEATURE_MATMUL_INT8)
            int8x16_t matrices[kGroups];
            as_matrices(codes, matrices);
#endif
            unrolled<0, Form::kParts>([&](auto part) {
                constexpr int kPart = decltype(part)::value;
                const Channels<Form> channels(at, quad, kPart);
                int64_t row = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
                for (; row + 2 <= rows.M; row += 2) {
                    const Scale &first = scales[row * rows.blocks], &second = scales[(row + 1) * rows.blocks];
                    add_pair<Form, kPart>(digits + row * kRecord, matrices, channels, first, second,
                                          sums[row] + quad * 4, sums[row + 1] + quad * 4);
                }
#endif
                if (row == rows.M) return;
                const auto multiply_row = [&](int64_t row, int32x4_t (&products)[kDigits]) {
                    const Digits x(digits + row * kRecord);
                    start(scales[row * rows.blocks], products);
                    unrolled<kPart * kPartGroups, kPartGroups>([&](auto i) {
                        constexpr int I = decltype(i)::value;
                        x.template add<I>(products, codes[I]);
                    });
                };
                const auto add_row = [&](int64_t row, const int32x4_t (&products)[kDigits]) {
                    float* sum = sums[row] + quad * 4;
                    vst1q_f32(sum, channels.add(vld1q_f32(sum), products, scales[row * rows.blocks]));
                };
                // A row is added to its sums while the products of the next are computed: otherwise instructions that
                // wait for a sum would fill the cores' queues, and products would wait behind them.
                int32x4_t waiting[kDigits], products[kDigits];
                multiply_row(row, waiting);
                for (row++; row < rows.M; row++) {
                    multiply_row(row, products);
                    add_row(row - 1, waiting);
                    for (int d = 0; d < kDigits; d++) waiting[d] = products[d];
                }
                add_row(row - 1, waiting);
            });
        }
    }
    for (int64_t row = 0; row < rows.M; row++) {
        for (int64_t quad = 0; quad < kQuads; quad++) store(out, row, quad, vld1q_f32(sums[row] + quad * 4));
    }
}

// Multiplies panels [first, end): panel(p) is the address of a panel, output(p) the destination of its product.
template <class Form, class Panel, class To>
void multiply(const Rows& rows, int64_t first, int64_t end, Panel panel, To output) {
    const auto run = rows.M == 1 ? one_row<Form> : many_rows<Form>;
    for (int64_t p = first; p < end; p++) run(panel(p), rows, output(p));
}

}  // namespace
