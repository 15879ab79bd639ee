// Quantisation of whole KV blocks to eight and four bits and back, on the calling thread, to leave cores to the engine.
#include <vector>

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

// Four bits, as in kv_int4.py: rows [D][bs] of floats, rotated over D, with one token per lane.

struct Head4 : Head {
    int64_t bytes() const { return D / 2 * bs + 2 * bs; }
};

// Rotates without normalising. The order of sums is that of the reference, whatever the number of lanes.
template <int W>
void rotate(float* x, Head h) {
    const int64_t chunk = h.D & -h.D;
    for (int64_t step = 1; step < chunk; step *= 2) {
        for (int64_t d = 0; d < h.D; d++) {
            if (d & step) continue;
            float *low = x + d * h.bs, *high = low + step * h.bs;
            for (int64_t t = 0; t < h.bs; t += W) {
                const auto a = load<W>(low + t), b = load<W>(high + t);
                store<W>(low + t, a + b);
                store<W>(high + t, a - b);
            }
        }
    }
}

// The upper half of a float's bits, rounded to nearest, ties to even.
template <int W>
typename Vec<W>::I to_bfloat16(typename Vec<W>::F x) {
    const auto bits = (typename Vec<W>::I)x;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <int W>
void encode_rows(float* x, uint8_t* codes, Head4 h) {
    typedef typename Vec<W>::F F;
    typedef typename Vec<W>::I I;
    rotate<W>(x, h);
    for (int64_t t = 0; t < h.bs; t += W) {
        F top{};
        for (int64_t d = 0; d < h.D; d++) top = maximum<W>(magnitude<W>(load<W>(x + d * h.bs + t)), top);
        const I bits = to_bfloat16<W>(top / 7.5f);
        const F scale = (F)(bits << 16), high = splat<W>(15.0f);
        for (int64_t lane = 0; lane < W; lane++) {
            const uint16_t half = static_cast<uint16_t>(bits[lane]);
            std::memcpy(codes + h.values() / 2 + 2 * (t + lane), &half, 2);
        }
        const auto code = [&](const float* p) {
            F ratio = load<W>(p) / scale + 8.0f;
            ratio = ratio > high ? high : ratio;
            ratio = ratio < F{} ? F{} : ratio;
            return __builtin_convertvector(scale > 0.0f ? ratio : F{}, I);
        };
        for (int64_t d = 0; d < h.D; d += 2) {
            const float* p = x + d * h.bs + t;
            store_codes<W>(codes + d / 2 * h.bs + t, code(p) | code(p + h.bs) << 4);
        }
    }
}

template <int W>
void decode_rows(const uint8_t* codes, float* x, Head4 h) {
    typedef typename Vec<W>::F F;
    typedef typename Vec<W>::I I;
    for (int64_t t = 0; t < h.bs; t += W) {
        I bits{};
        for (int64_t lane = 0; lane < W; lane++) {
            uint16_t half;
            std::memcpy(&half, codes + h.values() / 2 + 2 * (t + lane), 2);
            bits[lane] = half;
        }
        const F scale = (F)(bits << 16);
        for (int64_t d = 0; d < h.D; d += 2) {
            const I both = load_codes<W>(codes + d / 2 * h.bs + t);
            const I low = both & 15, high = both >> 4 & 15;
            store<W>(x + d * h.bs + t, (__builtin_convertvector(low, F) - 7.5f) * scale);
            store<W>(x + (d + 1) * h.bs + t, (__builtin_convertvector(high, F) - 7.5f) * scale);
        }
    }
    rotate<W>(x, h);
    const float unit = 1.0f / static_cast<float>(h.D & -h.D);
    for (int64_t i = 0; i < h.values(); i += W) store<W>(x + i, load<W>(x + i) * unit);
}

void transpose(const float* x, float* y, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) y[j * rows + i] = x[i * columns + j];
    }
}

// Heads of a pool of floats, which are copied unchanged, or of a pool of codes (below).
struct Floats {
    static int64_t bytes(Head h) { return 4 * h.values(); }
    static void read(const char* head, float* x, Head h, bool) { std::memcpy(x, head, bytes(h)); }
    static void write(const float* x, char* head, Head h, bool) { std::memcpy(head, x, bytes(h)); }
};

template <class Pool>
struct Codes {
    static int64_t bytes(Head h) { return h.bytes(); }
    static void read(const char* head, float* x, Head h, bool keys) {
        (keys ? decode_keys<Pool, kNarrow> : decode_values<Pool, kNarrow>)(reinterpret_cast<const uint8_t*>(head), x, h);
    }
    static void write(const float* x, char* head, Head h, bool keys) {
        (keys ? encode_keys<Pool, kNarrow> : encode_values<Pool, kNarrow>)(x, reinterpret_cast<uint8_t*>(head), h);
    }
};

template <class Source>
void encode_layers4(const char* x, uint8_t* codes, int64_t layers, int64_t Hk, Head4 h) {
    std::vector<float> rows(2 * h.values());
    float *keys = rows.data(), *values = keys + h.values();
    for (int64_t i = 0; i < layers * 2 * Hk; i++, x += Source::bytes(h), codes += h.bytes()) {
        const bool is_key = i / Hk % 2 == 0;
        Source::read(x, is_key ? keys : values, h, is_key);
        if (!is_key) transpose(values, keys, h.bs, h.D);
        encode_rows<kNarrow>(keys, codes, h);
    }
}

template <class Source>
void decode_layers4(const uint8_t* codes, char* x, int64_t layers, int64_t Hk, Head4 h) {
    std::vector<float> rows(2 * h.values());
    float *keys = rows.data(), *values = keys + h.values();
    for (int64_t i = 0; i < layers * 2 * Hk; i++, x += Source::bytes(h), codes += h.bytes()) {
        const bool is_key = i / Hk % 2 == 0;
        decode_rows<kNarrow>(codes, keys, h);
        if (!is_key) transpose(keys, values, h.D, h.bs);
        Source::write(is_key ? keys : values, x, h, is_key);
    }
}

}  // namespace

// Encodes x [layers, 2, Hk, bs * D] of a block. Kind 0: floats to int8, 1: to e4m3; to int4: 2 floats, 3 int8, 4 e4m3.
extern "C" void encode_block(const char* x, uint8_t* codes, int64_t layers, int64_t Hk, int64_t D, int64_t bs,
                             int64_t kind) {
    const Head h{D, bs};
    const float* floats = reinterpret_cast<const float*>(x);
    if (kind == 0) encode_layers<Int8Pool>(floats, codes, layers, Hk, h);
    else if (kind == 1) encode_layers<Fp8Pool>(floats, codes, layers, Hk, h);
    else if (kind == 2) encode_layers4<Floats>(x, codes, layers, Hk, {h});
    else if (kind == 3) encode_layers4<Codes<Int8Pool>>(x, codes, layers, Hk, {h});
    else encode_layers4<Codes<Fp8Pool>>(x, codes, layers, Hk, {h});
}

extern "C" void decode_block(const uint8_t* codes, char* x, int64_t layers, int64_t Hk, int64_t D, int64_t bs,
                             int64_t kind) {
    const Head h{D, bs};
    float* floats = reinterpret_cast<float*>(x);
    if (kind == 0) decode_layers<Int8Pool>(codes, floats, layers, Hk, h);
    else if (kind == 1) decode_layers<Fp8Pool>(codes, floats, layers, Hk, h);
    else if (kind == 2) decode_layers4<Floats>(codes, x, layers, Hk, {h});
    else if (kind == 3) decode_layers4<Codes<Int8Pool>>(codes, x, layers, Hk, {h});
    else decode_layers4<Codes<Fp8Pool>>(codes, x, layers, Hk, {h});
}

// Copies a piece of each of `count` blocks, given by address, into contiguous memory.
extern "C" void stage_blocks(const int64_t* blocks, int64_t offset, int64_t bytes, int64_t count, char* stage) {
    for (int64_t i = 0; i < count; i++) {
        std::memcpy(stage + i * bytes, reinterpret_cast<const char*>(blocks[i]) + offset, bytes);
    }
}

// As stage_blocks, for quantised blocks: decodes one layer of each, at `offset`, to [count][2][Hk][bs * D] of the pool.
extern "C" void stage_decoded(const int64_t* blocks, int64_t offset, int64_t count, char* stage, int64_t Hk, int64_t D,
                              int64_t bs, int64_t kind) {
    const Head h{D, bs};
    const int64_t piece = 2 * Hk * (kind > 2 ? h.bytes() : 4 * h.values());
    for (int64_t i = 0; i < count; i++) {
        decode_block(reinterpret_cast<const uint8_t*>(blocks[i]) + offset, stage + i * piece, 1, Hk, D, bs, kind);
    }
}
