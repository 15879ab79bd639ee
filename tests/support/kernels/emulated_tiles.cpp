// native/coded/coded.cpp with tiles (AMX) that are emulated, for machines without them.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
    unsigned char bytes[16][64];
    int rows, row_bytes;
};
thread_local Tile tiles[8];

void configure(const void* config) {
    const auto* from = static_cast<const uint8_t*>(config);
    for (int t = 0; t < 8; t++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, from + 16 + 2 * t, 2);
        tiles[t].row_bytes = row_bytes;
        tiles[t].rows = from[48 + t];
    }
}

void zero(int t) { std::memset(tiles[t].bytes, 0, sizeof(tiles[t].bytes)); }

void load(int t, const void* from, int64_t stride) {
    for (int r = 0; r < tiles[t].rows; r++) {
        std::memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, tiles[t].row_bytes);
    }
}

void store(int t, void* to, int64_t stride) {
    for (int r = 0; r < tiles[t].rows; r++) {
        std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], tiles[t].row_bytes);
    }
}

float number(const Tile& tile, int row, int at) {
    uint16_t stored;
    std::memcpy(&stored, tile.bytes[row] + 2 * at, 2);
    const uint32_t bits = static_cast<uint32_t>(stored) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// As the manual has it: even and odd columns are summed up apart, from zero on, and their sum is added to what was there.
void multiply(int sum, int a, int b) {
    for (int m = 0; m < tiles[sum].rows; m++) {
        for (int n = 0; n < tiles[sum].row_bytes / 4; n++) {
            float parts[2] = {}, before;
            for (int k = 0; k < tiles[a].row_bytes / 4; k++) {
                for (int p = 0; p < 2; p++) parts[p] += number(tiles[a], m, 2 * k + p) * number(tiles[b], k, 2 * n + p);
            }
            unsigned char* at = tiles[sum].bytes[m] + 4 * n;
            std::memcpy(&before, at, 4);
            before += parts[0] + parts[1];
            std::memcpy(at, &before, 4);
        }
    }
}

}  // namespace emulated

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::configure
#define _tile_release() (void)0
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
#define syscall(...) 0  // asks for tiles
#include "coded/coded.cpp"
