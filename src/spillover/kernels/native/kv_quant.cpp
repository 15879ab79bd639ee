// Whole blocks to codes and back, on the thread that calls: it runs beside the engine, whose cores are not to be taken.
#include "codes.h"

namespace {

constexpr int kNarrow = kLanes < 8 ? kLanes : 8;

struct Head {
    int64_t D, bs;
    int64_t values() const { return D * bs; }
    int64_t bytes() const { return D * bs + 4 * bs; }
};

template <class Pool, int W>
void encode_keys(const float* x, uint8_t* codes, Head h) {  // [D][bs]
    for (int64_t c = 0; c < h.bs; c += W) {
        typename Vec<W>::F top{};
        for (int64_t d = 0; d < h.D; d++) top = maximum<W>(magnitude<W>(load<W>(x + d * h.bs + c)), top);
        const typename Vec<W>::F scale = top / Pool::kLargest;
        store<W>(reinterpret_cast<float*>(codes + h.values()) + c, scale);
        for (int64_t d = 0; d < h.D; d++) {
            store_codes<W>(codes + d * h.bs + c, encode<Pool, W>(load<W>(x + d * h.bs + c), scale));
        }
    }
}

template <class Pool, int W>
void encode_values(const float* x, uint8_t* codes, Head h) {  // [bs][D]
    for (int64_t j = 0; j < h.bs; j++) {
        const float scale = row_scale<Pool, W>(x + j * h.D, h.D);
        std::memcpy(codes + h.values() + 4 * j, &scale, 4);
        encode_row<Pool, W>(x + j * h.D, scale, codes + j * h.D, h.D);
    }
}

template <class Pool, int W>
void decode_keys(const uint8_t* codes, float* x, Head h) {
    for (int64_t c = 0; c < h.bs; c += W) {
        const auto scale = load<W>(reinterpret_cast<const float*>(codes + h.values()) + c) * Pool::kUnit;
        for (int64_t d = 0; d < h.D; d++) {
            store<W>(x + d * h.bs + c, Pool::template load<W>(codes + d * h.bs + c) * scale);
        }
    }
}

template <class Pool, int W>
void decode_values(const uint8_t* codes, float* x, Head h) {
    for (int64_t j = 0; j < h.bs; j++) {
        float scale;
        std::memcpy(&scale, codes + h.values() + 4 * j, 4);
        for (int64_t d = 0; d < h.D; d += W) {
            store<W>(x + j * h.D + d, Pool::template load<W>(codes + j * h.D + d) * (scale * Pool::kUnit));
        }
    }
}

template <class Pool>
void encode_layers(const float* x, uint8_t* codes, int64_t layers, int64_t Hk, Head h) {
    const bool full = h.bs % kLanes == 0, wide = h.D % kLanes == 0;
    for (int64_t i = 0; i < layers * 2 * Hk; i++, x += h.values(), codes += h.bytes()) {
        if (i / Hk % 2 == 0) (full ? encode_keys<Pool, kLanes> : encode_keys<Pool, kNarrow>)(x, codes, h);
        else (wide ? encode_values<Pool, kLanes> : encode_values<Pool, kNarrow>)(x, codes, h);
    }
}

template <class Pool>
void decode_layers(const uint8_t* codes, float* x, int64_t layers, int64_t Hk, Head h) {
    const bool full = h.bs % kLanes == 0, wide = h.D % kLanes == 0;
    for (int64_t i = 0; i < layers * 2 * Hk; i++, x += h.values(), codes += h.bytes()) {
        if (i / Hk % 2 == 0) (full ? decode_keys<Pool, kLanes> : decode_keys<Pool, kNarrow>)(codes, x, h);
        else (wide ? decode_values<Pool, kLanes> : decode_values<Pool, kNarrow>)(codes, x, h);
    }
}

}  // namespace

// x [layers, 2, Hk, bs * D] of one block. fp8: e4m3, else int8.
extern "C" void encode_block(const float* x, uint8_t* codes, int64_t layers, int64_t Hk, int64_t D, int64_t bs,
                             int64_t fp8) {
    (fp8 ? encode_layers<Fp8Pool> : encode_layers<Int8Pool>)(x, codes, layers, Hk, {D, bs});
}

extern "C" void decode_block(const uint8_t* codes, float* x, int64_t layers, int64_t Hk, int64_t D, int64_t bs,
                             int64_t fp8) {
    (fp8 ? decode_layers<Fp8Pool> : decode_layers<Int8Pool>)(codes, x, layers, Hk, {D, bs});
}

// A piece of each of `count` blocks, which lie anywhere, side by side.
extern "C" void stage_blocks(const int64_t* blocks, int64_t offset, int64_t bytes, int64_t count, char* stage) {
    for (int64_t i = 0; i < count; i++) {
        std::memcpy(stage + i * bytes, reinterpret_cast<const char*>(blocks[i]) + offset, bytes);
    }
}

// The same of quantised blocks, decoded: one layer of each from `offset`, to [count][2][Hk][bs * D].
extern "C" void stage_decoded(const int64_t* blocks, int64_t offset, int64_t count, float* stage, int64_t Hk, int64_t D,
                              int64_t bs, int64_t fp8) {
    for (int64_t i = 0; i < count; i++) {
        decode_block(reinterpret_cast<const uint8_t*>(blocks[i]) + offset, stage + i * 2 * Hk * D * bs, 1, Hk, D, bs,
                     fp8);
    }
}
