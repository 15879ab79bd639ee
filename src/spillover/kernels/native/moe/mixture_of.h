// The experts of a request: gate_up, a gated activation and down, as the phases of a thread pool's job.
//
// There are two paths, chosen by the number of an expert's rows in the request. With at least Layout::tile_rows rows,
// if the model is bfloat16 and the cores have tiles, x and the activation are rounded to bfloat16 (amx.h); otherwise
// all is float32 (experts.h). On both paths the order of sums does not depend on the number of rows or threads, nor on
// the rest of the request.
#pragma once
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "../amx.h"
#include "../experts.h"
#include "../gated.h"
#include "mixture.h"

namespace {

constexpr int kRows = 4;  // rows of floats that are multiplied together
constexpr int kColumns = 32;  // maximum number of columns of the activation per chunk
constexpr int kPair = 4;  // int32 numbers per pair

float load_one(const uint8_t* p, int64_t index, int64_t type) {
    if (type == kFloat32) return reinterpret_cast<const float*>(p)[index];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(p)[index];
    return type == kBfloat16 ? Bfloat16Form::widen_one(bits) : Float16Form::widen_one(bits);
}

// Memory for floats, aligned to a cache line so that no vector in it crosses one.
class Floats {
  public:
    void grow(int64_t count) {
        if (count <= size_) return;
        data_.reset();
        size_ = 0;
        data_.reset(new (std::align_val_t(64)) float[count]());
        size_ = count;
    }
    float* at(int64_t index) const { return data_.get() + index; }

  private:
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<float[], Free> data_;
    int64_t size_ = 0;
};

template <class Form>
class MixtureOf final : public Mixture {
  public:
    MixtureOf(const Layout& layout, float limit, int threads, int64_t grain)
        : layout_(layout), limit_(limit), threads_(threads) {
        x_stride_ = padded(layout.hidden);
        h_stride_ = padded(layout.inner);
        const int64_t wide = larger(x_stride_, h_stride_) / kStep;
        scale_stride_ = ceil_div(wide * kScaleFloats<Form>, 16) * 16;
        scales_.grow(threads * 2 * scale_stride_);
        columns_ = std::clamp<int64_t>(grain / (2 * row_bytes(layout.hidden)), 1, kColumns);
        rows_ = larger(1, grain / row_bytes(layout.inner) / 2) * 2;
        starts_.resize(layout.experts + 1);
#if HAVE_TILES
        const bool wanted = TileForm<Form>::kThere && layout.bias_type == kBfloat16 && layout.tile_rows > 0;
        if (wanted && tiles_allowed()) tile_rows_ = layout.tile_rows;
#endif
    }

    bool prepare(const Request& request, int64_t (&chunks)[ThreadPool::kPhases]) override {
        request_ = request;
        std::fill(starts_.begin(), starts_.end(), 0);
        for (int64_t i = 0; i < request.count; i++) {
            const int32_t token = request.pairs[i * kPair], expert = request.pairs[i * kPair + 1];
            if (token < 0 || token >= request.tokens || expert < 0 || expert >= layout_.experts) return false;
            starts_[expert + 1]++;
        }
        for (int64_t e = 0; e < layout_.experts; e++) starts_[e + 1] += starts_[e];
        group();
        order_.resize(request.count);
        for (int64_t i = 0; i < request.count; i++) order_[starts_[request.pairs[i * kPair + 1]]++] = i;
        const int64_t plain = groups_.size() - tiled_;
        if (plain) {
            x_.grow(request.tokens * x_stride_);
            h_.grow(request.count * h_stride_);
        }
        chunks[0] = tiles_.size() * ceil_div(layout_.hidden, kPiece) + (plain ? request.tokens : 0);
        chunks[1] = tiled_ * ceil_div(layout_.inner, size(1, true)) + plain * ceil_div(layout_.inner, size(1, false));
        chunks[2] = tiled_ * ceil_div(layout_.hidden, size(2, true)) + plain * ceil_div(layout_.hidden, size(2, false));
        return true;
    }

    void run(int phase, int64_t chunk, int thread) override {
        if (phase == 0) return arrange(chunk);
        const int64_t total = phase == 1 ? layout_.inner : layout_.hidden;
        const int64_t in_tiles = tiled_ * ceil_div(total, size(phase, true));
        const bool tiled = chunk < in_tiles;
        if (!tiled) chunk -= in_tiles;
        const int64_t step = size(phase, tiled), pieces = ceil_div(total, step);
        const Group& group = groups_[chunk / pieces + (tiled ? 0 : tiled_)];
        const int64_t first = chunk % pieces * step, end = smaller(first + step, total);
        if (tiled) return compute_tiled(phase, group, first, end, thread);
        float* scales = scales_.at(thread * 2 * scale_stride_);
        for (int64_t i = 0; i < group.count; i += kRows) {
            const int64_t* pairs = &order_[group.first + i];
            const int64_t rows = smaller(kRows, group.count - i);
            if (rows == 1) compute<1>(phase, group, pairs, first, end, scales);
            if (rows == 2) compute<2>(phase, group, pairs, first, end, scales);
            if (rows == 3) compute<3>(phase, group, pairs, first, end, scales);
            if (rows == 4) compute<4>(phase, group, pairs, first, end, scales);
        }
    }

  private:
    struct Group {
        int64_t expert, first, count;  // the expert's pairs are order_[first] and the count - 1 after it
        int64_t tile;                  // index of its first token tile
    };

    struct Tile {
        int64_t first, count;  // range in order_ of the pairs that are the tile's tokens
    };

    static constexpr int64_t kPiece = 16 * kStep;  // columns of a token tile that one chunk arranges

    static int64_t row_bytes(int64_t columns) { return columns * Form::kBits / 8; }

    // Number of columns (phase 1) or rows (phase 2) of a chunk.
    int64_t size(int phase, bool tiled) const {
        const int64_t plain = phase == 1 ? columns_ : rows_, strip = phase == 1 ? kTile / 2 : kTile;
        return tiled ? ceil_div(plain, strip) * strip : plain;
    }

    // Makes the groups of pairs per expert from starts_, those computed in tiles first.
    void group() {
        groups_.clear();
        tiles_.clear();
        for (const bool tiled : {true, false}) {
            for (int64_t e = 0; e < layout_.experts; e++) {
                const int64_t first = starts_[e], count = starts_[e + 1] - first;
                if (count == 0 || (count >= tile_rows_) != tiled) continue;
                groups_.push_back({e, first, count, static_cast<int64_t>(tiles_.size())});
                for (int64_t i = 0; tiled && i < count; i += kTile) {
                    tiles_.push_back({first + i, smaller(kTile, count - i)});
                }
            }
            if (tiled) tiled_ = groups_.size();
        }
        if (tiled_) make_room();
    }

    void arrange(int64_t chunk) {
        const int64_t H = layout_.hidden, pieces = ceil_div(H, kPiece), in_tiles = tiles_.size() * pieces;
        if (chunk < in_tiles) return arrange_tile(chunk / pieces, chunk % pieces * kPiece);
        const int64_t token = chunk - in_tiles;
        Form::arrange(request_.x + token * H, x_.at(token * x_stride_), H);
    }

    Row row(const uint8_t* record, const Linear& linear, int64_t columns, int64_t index, int64_t scale_row,
            float* scales) const {
        if constexpr (Form::kScaled) {
            Form::prepare(record + linear.scales + scale_row * Form::scale_bytes(columns), scales, columns);
        }
        return {record + linear.values + index * row_bytes(columns), scales};
    }

    static int64_t scale_row(int64_t row) {
        if constexpr (std::is_same_v<Form, Fp8Form>) return row / Fp8Form::kBlock;
        return row;
    }

    struct Place {
        int64_t index, scale;  // index of a row of weights, and that of its row of scales
    };

    // The row for column c's gate (up = 0) or up projection (up = 1).
    Place gate_up_row(int64_t c, int64_t up) const {
        const int64_t I = layout_.inner;
        if (layout_.clamped) return {2 * c + up, scale_row(2 * c + up)};
        // Gate and up rows follow each other and were quantised separately: each starts a new block of scales.
        return {up * I + c, up * (scale_row(I - 1) + 1) + scale_row(c)};
    }

    template <int B>
    void compute(int phase, const Group& group, const int64_t* pairs, int64_t first, int64_t end, float* scales) {
        if (phase == 1) return inner<B>(group, pairs, first, end, scales);
        outer<B>(group, pairs, first, end, scales);
    }

    // Computes columns [first, end) of the activation of B pairs.
    template <int B>
    void inner(const Group& group, const int64_t* pairs, int64_t first, int64_t end, float* scales) {
        const int64_t H = layout_.hidden;
        const uint8_t* record = request_.records + group.expert * layout_.record_bytes;
        const Linear& linear = layout_.gate_up;
        const float* x[B];
        for (int b = 0; b < B; b++) x[b] = x_.at(request_.pairs[pairs[b] * kPair] * x_stride_);
        float sums[2][B][kColumns] = {};
        for (int64_t c = first; c < end; c++) {
            const Place at[2] = {gate_up_row(c, 0), gate_up_row(c, 1)};
            const Row rows[2] = {row(record, linear, H, at[0].index, at[0].scale, scales),
                                 row(record, linear, H, at[1].index, at[1].scale, scales + scale_stride_)};
            float out[B][2];
            products<Form, kLanes, B>(rows, x, H, out);
            for (int i = 0; i < 2; i++) {
                const int64_t index = at[i].index;
                const float bias = linear.bias < 0 ? 0.0f : load_one(record + linear.bias, index, layout_.bias_type);
                for (int b = 0; b < B; b++) sums[i][b][c - first] = out[b][i] + bias;
            }
        }
        for (int b = 0; b < B; b++) {
            float gated[kColumns];
            for (int64_t c = 0; c < end - first; c += kLanes) {
                const auto gate = load<kLanes>(sums[0][b] + c), up = load<kLanes>(sums[1][b] + c);
                store<kLanes>(gated + c, layout_.clamped ? swiglu<kLanes>(gate, up, limit_) : silu<kLanes>(gate, up));
            }
            float* h = h_.at(pairs[b] * h_stride_);
            for (int64_t c = first; c < end; c++) h[Form::place(c)] = gated[c - first];
        }
    }

    // Computes columns [first, end) of the result of B pairs.
    template <int B>
    void outer(const Group& group, const int64_t* pairs, int64_t first, int64_t end, float* scales) {
        const int64_t I = layout_.inner;
        const uint8_t* record = request_.records + group.expert * layout_.record_bytes;
        const Linear& linear = layout_.down;
        const float* h[B];
        for (int b = 0; b < B; b++) h[b] = h_.at(pairs[b] * h_stride_);
        for (int64_t r = first; r < end; r += 2) {
            const int64_t next = smaller(r + 1, end - 1);
            const Row rows[2] = {row(record, linear, I, r, scale_row(r), scales),
                                 row(record, linear, I, next, scale_row(next), scales + scale_stride_)};
            float out[B][2];
            products<Form, kLanes, B>(rows, h, I, out);
            for (int64_t i = 0; i <= next - r; i++) {
                const float bias = linear.bias < 0 ? 0.0f : load_one(record + linear.bias, r + i, layout_.bias_type);
                for (int b = 0; b < B; b++) request_.out[pairs[b] * layout_.hidden + r + i] = out[b][i] + bias;
            }
        }
    }

#if HAVE_TILES
    void make_room() {
        int64_t most = 0;
        for (int64_t g = 0; g < tiled_; g++) most = larger(most, ceil_div(groups_[g].count, kTile));
        memory_stride_ = TileMemory::floats(most);
        memory_.grow(threads_ * memory_stride_);
        x_tiles_.grow(tiles_.size() * x_stride_ * kTile / 2);
        h_tiles_.grow(tiles_.size() * h_stride_ * kTile / 2);
    }

    uint16_t* x_tile(int64_t tile) { return reinterpret_cast<uint16_t*>(x_tiles_.at(tile * x_stride_ * kTile / 2)); }
    uint16_t* h_tile(int64_t tile) { return reinterpret_cast<uint16_t*>(h_tiles_.at(tile * h_stride_ * kTile / 2)); }

    void arrange_tile(int64_t tile, int64_t first) {
        const int64_t H = layout_.hidden;
        for (int64_t i = 0; i < tiles_[tile].count; i++) {
            const int64_t token = request_.pairs[order_[tiles_[tile].first + i] * kPair];
            store_token(x_tile(tile), i, request_.x + token * H, first, smaller(first + kPiece, H));
        }
    }

    void compute_tiled(int phase, const Group& group, int64_t first, int64_t end, int thread) {
        if constexpr (TileForm<Form>::kThere) {
            const TileScope scope;
            TileMemory& memory = *reinterpret_cast<TileMemory*>(memory_.at(thread * memory_stride_));
            if (phase == 1) {
                for (int64_t c = first; c < end; c += kTile / 2) inner_strip(group, c, memory);
            } else {
                for (int64_t r = first; r < end; r += kTile) outer_strip(group, r, memory);
            }
        }
    }

    void place(Strip& strip, int64_t at, const uint8_t* record, const Linear& linear, int64_t columns, int64_t index,
               int64_t scale_row) const {
        strip.weights[at] = record + linear.values + index * row_bytes(columns);
        if constexpr (Form::kScaled) {
            strip.scales[at] = record + linear.scales + scale_row * Form::scale_bytes(columns);
        }
    }

    // Computes eight columns of the activation, from eight rows of gate and then eight rows of up.
    void inner_strip(const Group& group, int64_t first, TileMemory& memory) {
        constexpr int64_t kHalf = kTile / 2;
        const int64_t H = layout_.hidden, I = layout_.inner, tiles = ceil_div(group.count, kTile);
        const uint8_t* record = request_.records + group.expert * layout_.record_bytes;
        const Linear& linear = layout_.gate_up;
        Strip strip;
        strip.next = (layout_.clamped ? kTile : kHalf) * row_bytes(H);
        float bias[kTile] = {};
        for (int64_t r = 0; r < kTile; r++) {
            const int64_t column = smaller(first + r % kHalf, I - 1);  // past the end the last one is repeated
            const auto [index, scale] = gate_up_row(column, r / kHalf);
            place(strip, r, record, linear, H, index, scale);
            if (linear.bias >= 0) bias[r] = load_one(record + linear.bias, index, layout_.bias_type);
        }
        tile_products<Form>(strip, H, x_tile(group.tile), x_stride_ * kTile, tiles, memory);
        for (int64_t t = 0; t < tiles; t++) {
            const float* sums = memory.sums() + t * kTileFloats;
            Vec<kTile>::F gated[kHalf] = {};  // [column][token]; zeros past the end
            for (int64_t c = 0; c < smaller(kHalf, I - first); c++) {
                const auto gate = load<kTile>(sums + c * kTile) + bias[c];
                const auto up = load<kTile>(sums + (kHalf + c) * kTile) + bias[kHalf + c];
                gated[c] = layout_.clamped ? swiglu<kTile>(gate, up, limit_) : silu<kTile>(gate, up);
            }
            uint16_t* h = h_tile(group.tile + t) + first * kTile;
            for (int64_t c = 0; c < kHalf; c += 2) store_pair(h + c * kTile, gated[c], gated[c + 1]);
        }
    }

    // Computes sixteen columns of the result.
    void outer_strip(const Group& group, int64_t first, TileMemory& memory) {
        const int64_t H = layout_.hidden, I = layout_.inner, tiles = ceil_div(group.count, kTile);
        const int64_t count = smaller(kTile, H - first);
        const uint8_t* record = request_.records + group.expert * layout_.record_bytes;
        const Linear& linear = layout_.down;
        Strip strip;
        strip.next = kTile * row_bytes(I);
        float bias[kTile] = {};
        for (int64_t r = 0; r < kTile; r++) {
            const int64_t index = first + smaller(r, count - 1);
            place(strip, r, record, linear, I, index, scale_row(index));
            if (linear.bias >= 0) bias[r] = load_one(record + linear.bias, index, layout_.bias_type);
        }
        tile_products<Form>(strip, I, h_tile(group.tile), h_stride_ * kTile, tiles, memory);
        for (int64_t i = 0; i < group.count; i++) {
            const auto row = token_sums(memory.sums() + i / kTile * kTileFloats, i % kTile) + load<kTile>(bias);
            float* out = request_.out + order_[group.first + i] * H + first;
            if (count == kTile) {
                store<kTile>(out, row);
            } else {
                for (int64_t r = 0; r < count; r++) out[r] = row[r];
            }
        }
    }
#else
    void make_room() {}
    void arrange_tile(int64_t, int64_t) {}
    void compute_tiled(int, const Group&, int64_t, int64_t, int) {}
#endif

    const Layout layout_;
    const float limit_;
    const int threads_;
    int64_t x_stride_, h_stride_, scale_stride_, columns_, rows_, memory_stride_ = 0;
    int64_t tile_rows_ = std::numeric_limits<int64_t>::max();
    Request request_{};
    std::vector<int64_t> starts_, order_;
    std::vector<Group> groups_;
    int64_t tiled_ = 0;  // number of groups that are computed in tiles
    std::vector<Tile> tiles_;
    Floats x_, h_, x_tiles_, h_tiles_;  // padded with zeros
    Floats scales_, memory_;            // per thread
};

// Makes a mixture of the n-th form.
template <class Form, class... Others>
std::unique_ptr<Mixture> nth_mixture(int64_t n, const Layout& layout, float limit, int threads, int64_t grain) {
    if constexpr (sizeof...(Others) > 0)
        if (n > 0) return nth_mixture<Others...>(n - 1, layout, limit, threads, grain);
    return std::make_unique<MixtureOf<Form>>(layout, limit, threads, grain);
}

}  // namespace
