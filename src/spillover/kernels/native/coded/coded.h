// Memory layout of weights in codes and of the rows that they are multiplied with, for all kinds of cores.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "../codes.h"

namespace {

constexpr int64_t kPanel = 32, kHalves = 2, kHalf = 16;  // channels per panel, halves of a panel, channels per half
constexpr int64_t kColumns = 32;                         // columns per block
constexpr int64_t kDigits = 3;
constexpr int64_t kByteVectors = 8;                      // vectors of half a block's codes as bytes, 4 columns each
constexpr int64_t kMostRows = 128;                       // maximum number of rows multiplied with a panel at once

// A panel consists of units of one or more blocks. A unit consists of its head, which is numbers, one of each kind per
// channel, and its blocks; a block consists of such numbers too, and codes: one half of the channels, then the other.
//
// The codes of a half are vectors of 64 bytes, in which a channel has two words: one for even columns, one for odd.
// kOrder is the order in which the codes of eight columns are stored in a channel's bytes: with codes of four bits
// first those in the low halves of the four bytes, then those in the high halves, as they become two vectors of bytes.

// Codes of 4 + HIGH bits: four vectors of their low four bits, then HIGH vectors of the upper bits, where a byte has
// the bits of one code for each of the vectors of bytes, from the lowest bits on.
template <int HIGH>
struct Planes {
    static constexpr int64_t kVectors = 4 + HIGH;
    static constexpr int kHigh = HIGH, kCentre = 8 << HIGH;  // kCentre: the code of zero in forms without an offset
    static constexpr char kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

    // Column 2j + p of a vector's eight columns is in the four bits from 4j on of word p.
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const int64_t word = (channel * 2 + column % 2) * 2 + column % 8 / 4, high_bit = column % 4 / 2;
        const int low = half[column / 8 * 64 + word] >> (high_bit * 4) & 15;
        if constexpr (HIGH == 0) return low;
        const int64_t at = (column / 8 * 2 + high_bit) * HIGH;
        return low | (half[256 + at / 8 * 64 + word] >> (at % 8) & ((1 << HIGH) - 1)) << 4;
    }
};

// Codes of four bits that are indices of sixteen values.
template <class Values>
struct Table : Planes<0> {
    static constexpr int kCentre = 0;
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        return Values::kValues[Planes<0>::code(half, channel, column)];
    }
};

struct Iq4Values {
    static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};

struct DoubledFp4Values {
    static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

struct SignedBytes {
    static constexpr int64_t kVectors = 8;
    static constexpr int kCentre = 0;
    static constexpr char kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};

    // Column 2j + p of the vector's four columns is byte j of word p.
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const uint8_t* word = half + column / 4 * 64 + (channel * 2 + column % 2) * 2;
        return static_cast<int8_t>(word[column % 4 / 2]);
    }
};

// The numbers of channels, from `channel` on: w = scale * code + offset. kHead, kBytes: bytes of numbers in a unit's
// head and in a block. kParts: parts of a block's columns with separate scales. Lanes: loads for adjacent channels.
template <bool OFFSET>
struct Halves {
    static constexpr int64_t kHead = 0, kBytes = OFFSET ? 128 : 64, kParts = 1;
    static constexpr bool kOffset = OFFSET;
    template <class Lanes>
    static auto scale(const uint8_t*, const uint8_t* block, int64_t channel, int64_t) {
        return Lanes::halves(block + channel * 2);
    }
    template <class Lanes>
    static auto offset(const uint8_t*, const uint8_t* block, int64_t channel) {
        return Lanes::halves(block + 64 + channel * 2);
    }
};

struct Brains {
    static constexpr int64_t kHead = 0, kBytes = 64, kParts = 1;
    static constexpr bool kOffset = false;
    template <class Lanes>
    static auto scale(const uint8_t*, const uint8_t* block, int64_t channel, int64_t) {
        return Lanes::brains(block + channel * 2);
    }
};

// Bytes that are multiplied by a float16 of the head; the product with the head's second float16 is subtracted.
struct TwoLevels {
    static constexpr int64_t kHead = 128, kBytes = 64, kParts = 1;
    static constexpr bool kOffset = true;
    template <class Lanes>
    static auto scale(const uint8_t* head, const uint8_t* block, int64_t channel, int64_t) {
        return Lanes::halves(head + channel * 2) * Lanes::bytes(block + channel);
    }
    template <class Lanes>
    static auto offset(const uint8_t* head, const uint8_t* block, int64_t channel) {
        return -(Lanes::halves(head + 64 + channel * 2) * Lanes::bytes(block + 32 + channel));
    }
};

struct SignedTwoLevels {
    static constexpr int64_t kHead = 64, kBytes = 64, kParts = 2;
    static constexpr bool kOffset = false;
    template <class Lanes>
    static auto scale(const uint8_t* head, const uint8_t* block, int64_t channel, int64_t part) {
        return Lanes::halves(head + channel * 2) * Lanes::signed_bytes(block + part * 32 + channel);
    }
};

struct Floats {
    static constexpr int64_t kHead = 256, kBytes = 0, kParts = 1;
    static constexpr bool kOffset = true;
    template <class Lanes>
    static auto scale(const uint8_t* head, const uint8_t*, int64_t channel, int64_t) {
        return Lanes::floats(head + channel * 4);
    }
    template <class Lanes>
    static auto offset(const uint8_t* head, const uint8_t*, int64_t channel) {
        return Lanes::floats(head + 128 + channel * 4);
    }
};

// Scales in e4m3 for 16 columns each, multiplied by a float32 of the head, or divided by it.
template <bool DIVIDED>
struct E4m3 {
    static constexpr int64_t kHead = 128, kBytes = 64, kParts = 2;
    static constexpr bool kOffset = false;
    template <class Lanes>
    static auto scale(const uint8_t* head, const uint8_t* block, int64_t channel, int64_t part) {
        const auto whole = Lanes::floats(head + channel * 4), own = Lanes::e4m3(block + part * 32 + channel);
        if constexpr (DIVIDED) {
            return own / whole;
        } else {
            return own * whole;
        }
    }
};

template <class CODES, class NUMBERS>
struct Form {
    typedef CODES Codes;
    typedef NUMBERS Numbers;
    static constexpr int64_t kHead = Numbers::kHead, kBytes = Numbers::kBytes + kHalves * Codes::kVectors * 64;
    static constexpr int64_t kParts = Numbers::kParts;
    static constexpr bool kOffset = Numbers::kOffset;

    static int64_t panel_bytes(int64_t blocks, int64_t unit) { return blocks * kBytes + blocks / unit * kHead; }
};

// A block of a panel, and the head of its unit.
template <class Form>
struct Place {
    const uint8_t *head, *block;

    Place(const uint8_t* panel, int64_t unit) : head(panel), block(panel + Form::kHead), unit(unit), left(unit) {}

    // The block with this index.
    Place(const uint8_t* panel, int64_t unit, int64_t index) : unit(unit), left(unit - index % unit) {
        head = panel + index / unit * (unit * Form::kBytes + Form::kHead);
        block = head + Form::kHead + index % unit * Form::kBytes;
    }

    void next() {
        block += Form::kBytes;
        if constexpr (Form::kHead > 0) {
            if (--left == 0) head = block, block += Form::kHead, left = unit;
        }
    }

    const uint8_t* codes(int64_t half) const { return block + Form::Numbers::kBytes + half * Form::Codes::kVectors * 64; }

  private:
    int64_t unit, left;
};

struct Scale;  // the numbers of a block of a row in addition to its digits

// x in digits, and its scales [rows][blocks]. unit: number of blocks per unit of the weights.
struct Rows {
    int64_t M, blocks, unit;
    uint8_t* digits;
    Scale* scales;
};

// Destination of the product with a panel. N: stride of rows in floats.
struct Output {
    float* y;
    const float* bias;
    int64_t N, width;
};

// Returns the smallest power of two of which three digits can hold the largest number of a block.
float unit_of(int32_t largest_bits) {
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    const float room = largest * 1.0041f;  // digits are signed and reach 127 * 65793, a little less than 2^23
    int32_t bits;
    __builtin_memcpy(&bits, &room, 4);
    bits = (std::clamp(bits >> 23, 30, 254) + 1 - 23) << 23;
    float unit;
    __builtin_memcpy(&unit, &bits, 4);
    return largest < __builtin_inff() ? unit : __builtin_nanf("");
}

// Calls body(std::integral_constant<int, i>) for i in [FIRST, FIRST + COUNT).
template <int FIRST, int... I, class Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, FIRST + I>{}), ...);
}

template <int FIRST, int COUNT, class Body>
inline __attribute__((always_inline)) void unrolled(Body body) {
    unrolled<FIRST>(std::make_integer_sequence<int, COUNT>{}, body);
}

}  // namespace
