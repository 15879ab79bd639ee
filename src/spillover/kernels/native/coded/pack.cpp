// Puts a weight's codes and numbers into the panels of coded.h, and splits the bytes of a file's blocks into codes, while
// a model is loaded. kernels/code_layout.py has the same in torch.
#include <cstring>

#include "../team.h"
#include "coded.h"

namespace {

// Places of a channel's items in a panel: those of units of `per_unit` items each.
struct Places {
    int64_t panel_bytes, per_unit, unit_bytes, first, step;

    int64_t operator()(int64_t item) const { return item / per_unit * unit_bytes + first + item % per_unit * step; }
};

// Rows of a weight that become the channels from `channel` on, of the panels from the first on.
struct Given {
    const uint8_t* data;
    int64_t count, row_bytes, channel;
};

// Calls body(panel, first row, first channel, count) for the rows of each panel.
template <class Body>
void for_panels(const Given& rows, uint8_t* panels, const Places& places, Body body) {
    if (rows.count == 0) return;
    const int64_t begin = rows.channel / kPanel, end = (rows.channel + rows.count - 1) / kPanel + 1;
    share(end - begin, [&](int64_t i, int) {
        const int64_t start = std::max(rows.channel, (begin + i) * kPanel);
        const int64_t stop = std::min(rows.channel + rows.count, (begin + i + 1) * kPanel);
        body(panels + (begin + i) * places.panel_bytes, rows.data + (start - rows.channel) * rows.row_bytes,
             start % kPanel, stop - start);
    });
}

// Packs the codes of one channel and block: x has 32, `half` is the channel's half of the block.
template <int BITS>
void pack_block(const uint8_t* x, uint8_t* half, int64_t channel) {
    uint8_t* out = half + channel * 4;
    if constexpr (BITS == 8) {
        for (int v = 0; v < kByteVectors; v++, x += 4, out += 64) {
            const uint8_t bytes[4] = {x[0], x[2], x[1], x[3]};
            std::memcpy(out, bytes, 4);
        }
    } else {
        constexpr int kHigh = BITS - 4;
        uint32_t high[kHigh > 0 ? kHigh : 1] = {};
        for (int v = 0; v < 4; v++, x += 8, out += 64) {
            uint32_t even, odd;  // the columns whose codes are in the low and in the high halves of the bytes
            const uint8_t low[4] = {x[0], x[4], x[1], x[5]}, upper[4] = {x[2], x[6], x[3], x[7]};
            std::memcpy(&even, low, 4);
            std::memcpy(&odd, upper, 4);
            const uint32_t nibbles = (even & 0x0f0f0f0f) | (odd & 0x0f0f0f0f) << 4;
            std::memcpy(out, &nibbles, 4);
            if constexpr (kHigh > 0) {
                const int at = v * 2 * kHigh;
                high[at / 8] |= (even >> 4 & 0x0f0f0f0f) << at % 8 | (odd >> 4 & 0x0f0f0f0f) << (at + kHigh) % 8;
            }
        }
        for (int plane = 0; plane < kHigh; plane++, out += 64) std::memcpy(out, &high[plane], 4);
    }
}

template <int BITS>
void pack_codes_of(const Given& rows, int64_t blocks, uint8_t* panels, const Places& places) {
    constexpr int64_t kHalfBytes = BITS * 64;
    for_panels(rows, panels, places, [&](uint8_t* panel, const uint8_t* data, int64_t channel, int64_t count) {
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t* codes = panel + places(b);
            for (int64_t c = channel; c < channel + count; c++) {
                const uint8_t* x = data + (c - channel) * rows.row_bytes + b * kColumns;
                pack_block<BITS>(x, codes + c / kHalf * kHalfBytes, c % kHalf);
            }
        }
    });
}

template <class Number>
void pack_numbers_of(const Given& rows, int64_t items, uint8_t* panels, const Places& places) {
    for_panels(rows, panels, places, [&](uint8_t* panel, const uint8_t* data, int64_t channel, int64_t count) {
        for (int64_t i = 0; i < items; i++) {
            uint8_t* out = panel + places(i) + channel * sizeof(Number);
            for (int64_t c = 0; c < count; c++, out += sizeof(Number)) {
                std::memcpy(out, data + c * rows.row_bytes + i * sizeof(Number), sizeof(Number));
            }
        }
    });
}

struct Blocks {
    const uint8_t* stored;
    int64_t count, stride, bytes, step;
};

template <int WIDTH, bool ABOVE>
void unpack(const Blocks& blocks, uint8_t* fields) {
    constexpr int64_t kTogether = 256;  // blocks
    constexpr int kParts = 8 / WIDTH, kMask = (1 << WIDTH) - 1;
    share(ceil_div(blocks.count, kTogether), [&](int64_t i, int) {
        const int64_t end = std::min(blocks.count, (i + 1) * kTogether);
        for (int64_t block = i * kTogether; block < end; block++) {
            const uint8_t* __restrict in = blocks.stored + block * blocks.stride;
            uint8_t* __restrict out = fields + block * blocks.bytes * kParts;
            for (int64_t first = 0; first < blocks.bytes; first += blocks.step, in += blocks.step) {
                for (int part = 0; part < kParts; part++, out += blocks.step) {
                    for (int64_t k = 0; k < blocks.step; k++) {
                        const int field = in[k] >> part * WIDTH & kMask;
                        out[k] = static_cast<uint8_t>(ABOVE ? out[k] | field << 4 : field);
                    }
                }
            }
        }
    });
}

}  // namespace

// Packs codes [rows, columns], bytes of 4, 5, 6 or 8 bits, whose first row becomes `channel`.
extern "C" void pack_codes(const uint8_t* values, int64_t rows, int64_t columns, int64_t bits, int64_t channel,
                           uint8_t* panels, const Places* places) {
    const Given given{values, rows, columns, channel};
    const int64_t blocks = columns / kColumns;
    if (bits == 4) pack_codes_of<4>(given, blocks, panels, *places);
    else if (bits == 5) pack_codes_of<5>(given, blocks, panels, *places);
    else if (bits == 6) pack_codes_of<6>(given, blocks, panels, *places);
    else pack_codes_of<8>(given, blocks, panels, *places);
}

// Packs numbers [rows, items] of 1, 2 or 4 bytes.
extern "C" void pack_numbers(const uint8_t* numbers, int64_t rows, int64_t items, int64_t itemsize, int64_t channel,
                             uint8_t* panels, const Places* places) {
    const Given given{numbers, rows, items * itemsize, channel};
    if (itemsize == 1) pack_numbers_of<uint8_t>(given, items, panels, *places);
    else if (itemsize == 2) pack_numbers_of<uint16_t>(given, items, panels, *places);
    else pack_numbers_of<uint32_t>(given, items, panels, *places);
}

// Splits `bytes` bytes of each of `count` blocks, `stride` bytes apart, into fields of 1, 2 or 4 bits: of every `step`
// bytes first the lowest bits. above: fields become the bits above the lowest four of what is there.
extern "C" void unpack_fields(const uint8_t* stored, int64_t count, int64_t stride, int64_t bytes, int64_t width,
                              int64_t step, uint8_t* fields, int64_t above) {
    const Blocks blocks{stored, count, stride, bytes, step};
    if (width == 4) unpack<4, false>(blocks, fields);
    else if (width == 2 && above) unpack<2, true>(blocks, fields);
    else if (width == 2) unpack<2, false>(blocks, fields);
    else if (above) unpack<1, true>(blocks, fields);
    else unpack<1, false>(blocks, fields);
}
