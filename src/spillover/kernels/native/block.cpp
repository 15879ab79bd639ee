// The two halves of a decoder layer, dense or a mixture of experts, each a sequence of the other kernels: Python
// between two kernels costs more than a small kernel itself, most of all when a step has few rows.
#include "products.h"

extern "C" {
void rms_norm(const float* x, const float* weight, float* y, int64_t outer, int64_t inner, int64_t D, int64_t stride,
              float eps);
void add_rms_norm(const float* x, const float* residual, const float* weight, float* y, float* total, int64_t rows,
                  int64_t D, float eps);
void silu_and_mul(const float* x, float* y, int64_t rows, int64_t I);
void rope(float* q, float* k, const float* cos, const float* sin, const int64_t* positions, int64_t T, int64_t H,
          int64_t Hk, int64_t half, int64_t q_stride, int64_t k_stride);
void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, void* kv, int64_t block_stride,
              const int64_t* positions, const int32_t* rows, const int32_t* table, int64_t table_stride, int64_t T,
              int64_t Hk, int64_t D, int64_t bs, int64_t kind);
void attention(const float* q, int64_t q_stride, const void* kv, int64_t block_stride, float* out,
               const int32_t* query_start, const int32_t* seq_lens, const int32_t* table, int64_t table_stride,
               int64_t B, int64_t H, int64_t Hk, int64_t D, int64_t bs, float scale, int64_t window,
               const float* sinks, int64_t kind);
void route(const float* scores, int64_t T, int64_t E, int64_t k, int64_t renormalize, int64_t* ids, float* shares);
void expert_mlps(const float* x, const int64_t* ids, const float* shares, float* out, const void* gate_up,
                 int64_t gate_up_stride, const float* gate_up_bias, int64_t gate_up_bias_stride, int64_t gate_up_kind,
                 const void* down, int64_t down_stride, const float* down_bias, int64_t down_bias_stride,
                 int64_t down_kind, int64_t T, int64_t k, int64_t hidden, int64_t inner, float limit, float* scratch);

// Multiplies by panels of a kind.
static void product(const float* x, const void* w, int64_t kind, const float* bias, float* y, int64_t M, int64_t N,
                    int64_t K) {
    const Product one{x, w, bias, y, M};
    products(kind, &one, 1, N, K);
}

// residual [T, hidden] += x; x = attention(norm(residual)). q_norm, k_norm, biases and sinks may be null.
// scratch: T * (hidden + (2H + 2Hk) * D) floats, and T * (H + Hk) * D more with q_norm.
void attention_block(float* x, float* residual, const float* norm, float eps, const void* qkv, int64_t qkv_kind,
                     const float* qkv_bias, const float* q_norm, const float* k_norm, const float* cos,
                     const float* sin, void* kv, int64_t block_stride, const int64_t* positions, const int32_t* rows,
                     const int32_t* query_start, const int32_t* seq_lens, const int32_t* table, int64_t table_stride,
                     int64_t B, float scale, int64_t window, const float* sinks, const void* o, int64_t o_kind,
                     const float* o_bias, int64_t T, int64_t hidden, int64_t H, int64_t Hk, int64_t D, int64_t bs,
                     int64_t kind, float* scratch) {
    const int64_t width = (H + 2 * Hk) * D;
    float* normed = scratch;                 // [T, hidden]
    float* projected = normed + T * hidden;  // [T, H + 2 Hk, D]
    float* out = projected + T * width;      // [T, H, D]
    add_rms_norm(x, residual, norm, normed, residual, T, hidden, eps);
    product(normed, qkv, qkv_kind, qkv_bias, projected, T, width, hidden);
    float *q = projected, *k = projected + H * D;
    int64_t q_stride = width, k_stride = width;
    if (q_norm) {
        float *q_normed = out + T * H * D, *k_normed = q_normed + T * H * D;
        rms_norm(q, q_norm, q_normed, T, H, D, width, eps);
        rms_norm(k, k_norm, k_normed, T, Hk, D, width, eps);
        q = q_normed, q_stride = H * D;
        k = k_normed, k_stride = Hk * D;
    }
    rope(q, k, cos, sin, positions, T, H, Hk, D / 2, q_stride, k_stride);
    store_kv(k, k_stride, projected + (H + Hk) * D, width, kv, block_stride, positions, rows, table, table_stride, T,
             Hk, D, bs, kind);
    attention(q, q_stride, kv, block_stride, out, query_start, seq_lens, table, table_stride, B, H, Hk, D, bs, scale,
              window, sinks, kind);
    product(out, o, o_kind, o_bias, x, T, hidden, H * D);
}

// residual [T, hidden] += x; x = down(silu(gate) * up) of norm(residual). scratch: T * (hidden + 3 * inner) floats.
void mlp_block(float* x, float* residual, const float* norm, float eps, const void* gate_up, int64_t gate_up_kind,
               const float* gate_up_bias, const void* down, int64_t down_kind, const float* down_bias, int64_t T,
               int64_t hidden, int64_t inner, float* scratch) {
    float* normed = scratch;
    float* both = normed + T * hidden;     // [T, 2 * inner]
    float* active = both + T * 2 * inner;  // [T, inner]
    add_rms_norm(x, residual, norm, normed, residual, T, hidden, eps);
    product(normed, gate_up, gate_up_kind, gate_up_bias, both, T, 2 * inner, hidden);
    silu_and_mul(both, active, T, inner);
    product(active, down, down_kind, down_bias, x, T, hidden, inner);
}

// All pointers of a layer; the same ones may be null as in the functions above.
struct Layer {
    const float* input_norm;
    const void* qkv;
    int64_t qkv_kind;
    const float *qkv_bias, *q_norm, *k_norm, *sinks;
    const void* o;
    int64_t o_kind;
    const float* o_bias;
    const float* mlp_norm;
    const void* gate_up;
    int64_t gate_up_kind;
    const float* gate_up_bias;
    const void* down;
    int64_t down_kind;
    const float* down_bias;
    void* kv;
    int64_t group, window, inner;
    // Of a mixture, whose gate_up and down are those of the first expert; null and 0 in a dense layer. The strides are
    // the bytes from an expert to the next, of biases the floats.
    const void* router;
    int64_t router_kind;
    const float* router_bias;
    int64_t gate_up_stride, gate_up_bias_stride, down_stride, down_bias_stride, experts, k, renormalize;
};

// Positions of a step's rows and block tables of their requests, for the layers of one group.
struct Batch {
    const int64_t* positions;
    const int32_t *rows, *query_start, *seq_lens, *table;
    int64_t table_stride, B;
};

// residual [T, hidden] += x; x = the mixture of norm(residual). limit: as in expert_mlps. scratch: T * (hidden + experts
// + k * (3 + 2 * hidden + 3 * inner)) floats.
static void mixture_block(float* x, float* residual, float eps, const Layer& l, int64_t T, int64_t hidden, float limit,
                          float* scratch) {
    int64_t* ids = reinterpret_cast<int64_t*>(scratch);  // [T, k]
    float* shares = scratch + T * l.k * 2;               // [T, k]
    float* scores = shares + T * l.k;                    // [T, experts]
    float* normed = scores + T * l.experts;              // [T, hidden]
    add_rms_norm(x, residual, l.mlp_norm, normed, residual, T, hidden, eps);
    product(normed, l.router, l.router_kind, l.router_bias, scores, T, l.experts, hidden);
    route(scores, T, l.experts, l.k, l.renormalize, ids, shares);
    expert_mlps(normed, ids, shares, x, l.gate_up, l.gate_up_stride, l.gate_up_bias, l.gate_up_bias_stride,
                l.gate_up_kind, l.down, l.down_stride, l.down_bias, l.down_bias_stride, l.down_kind, T, l.k, hidden,
                l.inner, limit, normed + T * hidden);
}

// Computes the layers in order. limit: as in expert_mlps. scratch: the size that the larger half of a layer needs.
void decoder_layers(const Layer* layers, int64_t count, const Batch* batches, float* x, float* residual, float eps,
                    const float* cos, const float* sin, int64_t block_stride, float scale, int64_t T, int64_t hidden,
                    int64_t H, int64_t Hk, int64_t D, int64_t bs, int64_t kind, float limit, float* scratch) {
    for (const Layer* l = layers; l < layers + count; l++) {
        const Batch& b = batches[l->group];
        attention_block(x, residual, l->input_norm, eps, l->qkv, l->qkv_kind, l->qkv_bias, l->q_norm, l->k_norm, cos,
                        sin, l->kv, block_stride, b.positions, b.rows, b.query_start, b.seq_lens, b.table,
                        b.table_stride, b.B, scale, l->window, l->sinks, l->o, l->o_kind, l->o_bias, T, hidden, H, Hk,
                        D, bs, kind, scratch);
        if (l->router) {
            mixture_block(x, residual, eps, *l, T, hidden, limit, scratch);
        } else {
            mlp_block(x, residual, l->mlp_norm, eps, l->gate_up, l->gate_up_kind, l->gate_up_bias, l->down,
                      l->down_kind, l->down_bias, T, hidden, l->inner, scratch);
        }
    }
}
}
