// How weights in codes and the rows they are multiplied with lie in memory, on every kind of core.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "../vector.h"

namespace {

constexpr int64_t kPanel = 32, kHalves = 2, kHalf = 16;  // channels
constexpr int64_t kColumns = 32;                         // of a block
constexpr int64_t kDigits = 3;
constexpr int64_t kByteVectors = 8;                      // of half a block's codes, as bytes: 4 columns of 16 channels each
constexpr int64_t kMostRows = 128;                       // that are multiplied with a panel at once

// A panel is units of one or more blocks. A unit is its head, numbers of which there is one a channel, and its blocks; a
// block is numbers of the same kind, and codes, half of the channels after half.
//
// Codes of a half are vectors of 64 bytes, in which a channel has two words: one for the even columns, one for the odd
// ones. kOrder: of eight columns, as their codes lie in the bytes of a channel: with codes of four bits first those in
// the low halves of the four bytes, then those in the high halves; that is how they become two vectors of bytes.

// Codes of 4 + HIGH bits: four vectors of their low four bits; then those above, HIGH vectors, where a byte has a code's
// bits for each of the vectors of bytes, from the lowest bits on.
template <int HIGH>
struct Planes {
    static constexpr int64_t kVectors = 4 + HIGH;
    static constexpr int kHigh = HIGH, kCentre = 8 << HIGH;  // codes without an offset are counted from kCentre
    static constexpr char kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

    // Column 2j + p of a vector's eight is in bits 4j of word p.
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const int64_t word = (channel * 2 + column % 2) * 2 + column % 8 / 4, high_bit = column % 4 / 2;
        const int low = half[column / 8 * 64 + word] >> (high_bit * 4) & 15;
        if constexpr (HIGH == 0) return low;
        const int64_t at = (column / 8 * 2 + high_bit) * HIGH;
        return low | (half[256 + at / 8 * 64 + word] >> (at % 8) & ((1 << HIGH) - 1)) << 4;
    }
};

// Codes of four bits that name one of sixteen values.
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

    // Column 2j + p of the vector's four is byte j of word p.
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const uint8_t* word = half + column / 4 * 64 + (channel * 2 + column % 2) * 2;
        return static_cast<int8_t>(word[column % 4 / 2]);
    }
};

// The numbers of channels, from `channel` on: w = scale * code + offset. kHead, kBytes: of a unit's head and of a block.
// kParts: of a block's columns, each with a scale of its own. Lanes: how the cores load numbers of neighbouring channels.
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

// Bytes that a float16 of the head is multiplied with; what is multiplied with the second is taken away.
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

    // That of the index.
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

struct Scale;  // what a block of a row is beside its digits

// x in digits, and its scales [rows][blocks]. unit: blocks of the weights' units.
struct Rows {
    int64_t M, blocks, unit;
    uint8_t* digits;
    Scale* scales;
};

// Where the product with a panel goes. N: from a row to the next.
struct Output {
    float* y;
    const float* bias;
    int64_t N, width;
};

// A power of two, so that the largest number of a block is just below what three digits hold.
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

// body(std::integral_constant<int, i>) for i in [FIRST, FIRST + COUNT).
template <int FIRST, int... I, class Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, FIRST + I>{}), ...);
}

template <int FIRST, int COUNT, class Body>
inline __attribute__((always_inline)) void unrolled(Body body) {
    unrolled<FIRST>(std::make_integer_sequence<int, COUNT>{}, body);
}

}  // namespace
