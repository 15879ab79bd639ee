// The formats of mixture.cu: conversion of codes to operands of tensor cores, and the order of activations.
#ifndef MIXTURE_FORMATS
#define MIXTURE_FORMATS
#include "instructions.cuh"

DEV u32 word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

// Codes are moved to float16's sign, the low bits of its exponent and the top of its mantissa, which gives 2**-14 of
// their value. Activations are multiplied by 2**2, scales by the rest.
struct Mxfp4 {
    static constexpr bool BF16 = false, INTEGERS = false, HALVES = false, OFFSETS = false;
    static constexpr int CHUNK = 3;    // steps per chunk, which is summed from zero
    static constexpr int GROUPS = 1;   // groups per step; if more than one, each is summed from zero
    static constexpr int VECTORS = 1;  // vectors of 16 bytes that a lane reads of a row per step
    static constexpr int SCALE_BYTES = 1;
    static constexpr int SLOT_SCALES = 64;  // bytes of scales stored with a step's codes of 16 rows
    static constexpr int EACH_UP = 2, EACH_DOWN = 1;  // chunks in flight per warp, for a few tokens
    static constexpr int STAGES_16 = 5, STAGES_64 = 4, STAGES_128 = 4;  // steps in flight or in use per block, by tile
    DEV float sum_factor(const void*, int, int, int) { return 1.0f; }
    // Unpacks the eight codes of a word: even ones of bytes 0, 1 and of 2, 3, then odd ones.
    DEV void unpack(u32 (&r)[4], const uint4 (&v)[1], int j, u32 factor) {
        u32 w = word_of(v[0], j);
        u32 even = ((w << 1) & 0x0E0E0E0Eu) | ((w << 4) & 0x80808080u);
        u32 odd = ((w >> 3) & 0x0E0E0E0Eu) | (w & 0x80808080u);
        r[0] = hmul2(__byte_perm(even, 0, 0x1404), factor);
        r[1] = hmul2(__byte_perm(even, 0, 0x3424), factor);
        r[2] = hmul2(__byte_perm(odd, 0, 0x1404), factor);
        r[3] = hmul2(__byte_perm(odd, 0, 0x3424), factor);
    }
    // Returns the scale 2**(s - 127), times 2**14 for the code, less the shift; the exponent's bias is 15.
    DEV u32 factor(u32 scale) { return (u32)min(max((int)scale - 100, 0), 30) * 0x04000400u; }
    // Returns the index of a column in a row of activations: the same word of four lanes' codes is two instructions,
    // for its even and its odd codes; in each a lane has two inputs in the first half and two in the second.
    DEV int place(int c) { return (c & ~127) + (c >> 3 & 3) * 32 + (c & 1) * 16 + (c >> 2 & 1) * 8 + (c >> 5 & 3) * 2 + (c >> 1 & 1); }
    // Returns which of 64 columns is the e-th of four that a thread stores: two lanes' inputs of half an instruction.
    DEV int column(int i, int half, int e) { return e / 2 * 32 + (i / 2 * 8 + half * 4 + (e & 1) * 2 + (i & 1)); }
    // Returns the index of these four, of the 64 columns from `first` on, in a row that begins at `row`.
    DEV i64 unit_place(i64 row, int first, int i, int half) { return row + (first & ~127) + i * 16 + half * 8 + first / 32 % 4 * 2; }
    DEV float group_factor(u32) { return 1.0f; }
    DEV u32 activations(float low, float high) { return to_half2(low * 4.0f, high * 4.0f); }
};
// Codes become float16, in which all of their values are exact. Activations are multiplied by 2**-4, sums by the rest.
struct Fp8 {
    static constexpr bool BF16 = false, INTEGERS = false, HALVES = false, OFFSETS = false;
    static constexpr int CHUNK = 1;
    static constexpr int GROUPS = 1;
    static constexpr int VECTORS = 2;
    static constexpr int SCALE_BYTES = 4;
    static constexpr int SLOT_SCALES = 0;
    static constexpr int EACH_UP = 4, EACH_DOWN = 2;
    static constexpr int STAGES_16 = 3, STAGES_64 = 3, STAGES_128 = 4;
    DEV float sum_factor(const void* scales, int block_row, int stride, int step) {
        return __ldg((const float*)scales + (block_row * stride + step)) * 16.0f;
    }
    // Unpacks the four codes of each of two words, bytes 0, 1 and then 2, 3.
    DEV void unpack(u32 (&r)[4], const uint4 (&v)[2], int j, u32) {
#pragma unroll
        for (int i = 0; i < 2; i++) halves_of_fp8(r[2 * i], r[2 * i + 1], word_of(v[j / 2], j % 2 * 2 + i));
    }
    DEV u32 factor(u32) { return 0; }
    // The same word of four lanes' codes is one instruction.
    DEV int place(int c) { return (c & ~127) + (c >> 2 & 7) * 16 + (c >> 1 & 1) * 8 + (c >> 5 & 3) * 2 + (c & 1); }
    DEV int column(int i, int half, int e) { return e / 2 * 32 + (i * 4 + half * 2 + (e & 1)); }
    DEV i64 unit_place(i64 row, int first, int i, int half) { return row + (first & ~127) + i * 16 + half * 8 + first / 32 % 4 * 2; }
    DEV float group_factor(u32) { return 1.0f; }
    DEV u32 activations(float low, float high) { return to_half2(low * 0.0625f, high * 0.0625f); }
};
// Integers of BITS bits; GROUP inputs share a word, a float32 scale whose last byte is their zero. Codes in a float16's
// low bits are 1,024 higher; that and the zero are subtracted exactly. Activations are multiplied by 2**-4.
template <int BITS, int GROUP>
struct Int {
    static constexpr bool BF16 = false, INTEGERS = true;
    static constexpr bool HALVES = false, OFFSETS = false;  // see Gguf
    static constexpr int CHUNK = 1;
    static constexpr int GROUPS = 128 / GROUP;
    static constexpr int VECTORS = BITS / 4;
    static constexpr int SCALE_BYTES = 4;
    static constexpr int SLOT_SCALES = GROUPS * 4 > BITS ? GROUPS * 64 : BITS * 16;  // slots must start a swizzled row
    static constexpr int EACH_UP = 4, EACH_DOWN = BITS == 4 ? 3 : 2;
    static constexpr int STAGES_16 = BITS == 4 ? 5 : 3, STAGES_64 = BITS == 4 ? 4 : 3, STAGES_128 = 4;
    DEV float sum_factor(const void*, int, int, int) { return 1.0f; }
    DEV float group_factor(u32 word) { return __uint_as_float(word & ~255u) * 16.0f; }
    DEV u32 factor(u32 word) { return 0x64006400u + (word & 255) * 0x00010001u; }
    // Unpacks pairs of codes of a word: adjacent bytes; for 4 bits the first and fifth, the second and sixth, ...
    DEV void unpack(u32 (&r)[4], const uint4 (&v)[VECTORS], int j, u32 zero) {
        if constexpr (BITS == 4) {
            u32 w = word_of(v[0], j);
#pragma unroll
            for (int i = 0; i < 4; i++) r[i] = hsub2(and_or(w >> 4 * i, 0x000F000Fu, 0x64006400u), zero);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 w = word_of(v[j / 2], j % 2 * 2 + i);
                r[2 * i] = hsub2(__byte_perm(w, 0x64646464u, 0x4140), zero);
                r[2 * i + 1] = hsub2(__byte_perm(w, 0x64646464u, 0x4342), zero);
            }
        }
    }
    DEV int place(int c) {
        return BITS == 4 ? (c & ~31) + (c & 3) * 8 + (c >> 3 & 3) * 2 + (c >> 2 & 1)
                         : (c & ~15) + (c >> 1 & 1) * 8 + (c >> 2 & 3) * 2 + (c & 1);
    }
    DEV int column(int i, int half, int e) {
        return BITS == 4 ? i / 4 * 32 + half * 16 + e / 2 * 8 + (e & 1) * 4 + (i & 3)
                         : i / 2 * 16 + half * 8 + e / 2 * 4 + (i & 1) * 2 + (e & 1);
    }
    DEV i64 unit_place(i64 row, int first, int i, int half) { return row + first + i * 8 + half * 4; }
    DEV u32 activations(float low, float high) { return to_half2(low * 0.0625f, high * 0.0625f); }
};
typedef Int<4, 32> Int4_32;
typedef Int<4, 64> Int4_64;
typedef Int<4, 128> Int4_128;
typedef Int<8, 32> Int8_32;
typedef Int<8, 64> Int8_64;
typedef Int<8, 128> Int8_128;
// Codes of a GGUF file, with float32 words for every 32 inputs: a scale, or with HALVES one per 16, then with OFFSETS
// an offset, by which the sum of the activations is multiplied. The zero is 128 for bytes and 0 for 4 bits.
template <int BITS, bool TWO, bool ADDED>
struct Gguf : Int<BITS, 32> {
    static constexpr bool HALVES = TWO, OFFSETS = ADDED;
    static constexpr int SLOT_SCALES = 4 * (1 + TWO + ADDED) * 64;
    DEV float group_factor(u32 word) { return __uint_as_float(word) * 16.0f; }
    DEV u32 factor(u32) { return BITS == 4 ? 0x64006400u : 0x64806480u; }
};
typedef Gguf<4, false, true> Gguf4_offset;
typedef Gguf<8, false, true> Gguf8_offset;
typedef Gguf<8, true, false> Gguf8_halves;
typedef Gguf<8, true, true> Gguf8_halves_offset;
#endif
