// How weights in codes and the rows they are multiplied with lie in memory, on every kind of core.
#pragma once
#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace {

constexpr int64_t kPanel = 32, kHalves = 2, kHalf = 16;  // channels
constexpr int64_t kColumns = 32;                         // of a block
constexpr int64_t kDigits = 3;
constexpr int64_t kMostRows = 128;                       // that are multiplied with a panel at once
constexpr int64_t kAhead = 4096;                         // bytes of a panel that are asked for before they are needed

// A block of a panel: scales [32], offsets [32] if the form has some, both float16; then codes, half of the channels
// after half. A vector of 64 bytes of codes has four for each channel, which are two words: one for the even columns,
// one for the odd ones.
//
// kOrder: of eight columns, as their codes lie in the bytes of a vector: with codes of four bits first those in the low
// halves of a channel's four bytes, then those in the high halves.
struct Four {
    static constexpr int64_t kBytes = 640, kCodes = 128, kVectors = 4;  // of half the channels
    static constexpr bool kOffset = true;
    static constexpr char kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

    // Column 2j + p of the vector's eight is in bits 4j of word p.
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const uint8_t* word = half + column / 8 * 64 + (channel * 2 + column % 2) * 2;
        return word[column % 8 / 4] >> (column % 4 / 2 * 4) & 15;
    }
};

struct Eight {
    static constexpr int64_t kBytes = 1088, kCodes = 64, kVectors = 8;
    static constexpr bool kOffset = false;
    static constexpr char kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};

    // Column 2j + p of the vector's four is byte j of word p.
    static int code(const uint8_t* half, int64_t channel, int64_t column) {
        const uint8_t* word = half + column / 4 * 64 + (channel * 2 + column % 2) * 2;
        return static_cast<int8_t>(word[column % 4 / 2]);
    }
};

template <class Form>
const uint8_t* codes_of(const uint8_t* block, int64_t half) {
    return block + Form::kCodes + half * Form::kVectors * 64;
}

struct Scale;  // what a block of a row is beside its digits

// x in digits, and its scales [rows][blocks].
struct Rows {
    int64_t M, blocks;
    uint8_t* digits;
    Scale* scales;
};

// Where the product with a panel goes.
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

template <class Form>
void ask_ahead(const uint8_t* block) {
#pragma GCC unroll 17
    for (int64_t line = 0; line < Form::kBytes; line += 64) __builtin_prefetch(block + kAhead + line, 0, 2);
}

}  // namespace
