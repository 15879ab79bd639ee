// Attention over a paged pool of FP8 or int8 codes, in the order of sums of triton/attention/softmax.py, with the same
// bits as the Triton kernels for codes. Shared by attention.cu (new tokens) and attention_prompt.cu.
//
// DIM: dimensions per head; GROUP: query heads per KV head; BLOCK: tokens per block; INT8: whether codes are int8,
// otherwise FP8; BFLOAT16: whether queries and results are bfloat16, otherwise float16. A tile is 64 keys: each of four
// warps copies 16 of them and their values to shared memory, and multiplies these keys; each warp multiplies a quarter
// of the dimensions of all values. Keys and values are the left operands of mma or wgmma, queries and weights the right
// ones. Matrices of 16-bit elements are loaded transposed, an element being two codes: a word then holds codes of two
// neighbours along the inner dimension, for each of two tokens or dimensions.
#include "instructions.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr float RAISED = 256.0f;  // factor of weights as operands, which suits the range of float16
#include "attention_softmax.cuh"

constexpr int MT = DIM / 64;      // tiles of 16 dimensions per warp
constexpr int CHUNKS = DIM / 16;  // chunks of 16 bytes per token's values
constexpr float LARGEST = 65504.0f;
#define KERNEL(BLOCKS) extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void

// Kernel arguments; must match kernels/cuda/attention.py.
struct Product {
    const u16* q; const u8* kv; u16* out;
    float* sums; float* stats; int* finished;  // DecodeScratch
    const int* items; const int* num_items; const int* table;
    const void* sinks;                         // may be null
    const int* tiles; const int* query_start; const int* seq_lens; const int* slots;  // for prompts; slots may be null
    i64 q_stride, table_stride, block_stride, kv_stride, head_stride;
    float scale;
    int programs, kv_heads, window, window_piece, sinks_float;
};

DEV float cut(float v) { return fminf(fmaxf(v, -LARGEST), LARGEST); }
DEV u32 query_operand(u32 v) { return to_half2(cut(low_of(v)), cut(high_of(v))); }
// Converts a word of codes, bytes 0, 1 of one neighbour and 2, 3 of the other: the first bytes of both, and the second.
DEV void spread(u32 word, u32& first, u32& second) {
#if INT8
    // A code plus 128 becomes the low byte of a float16 of at least 1,024.
    word ^= 0x80808080u;
    first = hsub2(__byte_perm(word, 0x64646464u, 0x4240), 0x64806480u);
    second = hsub2(__byte_perm(word, 0x64646464u, 0x4341), 0x64806480u);
#else
    word = __byte_perm(word, 0, 0x3120);
    halves_of_fp8(first, second, word);
#endif
}
// Converts the operands of two instructions.
DEV void spread(u32 (&a)[8], const uint4& r) {
    spread(r.x, a[0], a[1]), spread(r.y, a[2], a[3]), spread(r.z, a[4], a[5]), spread(r.w, a[6], a[7]);
}

// Two tiles of keys and of values, one in use and one in flight.
struct Tiles {
    alignas(128) u8 keys[2][WARPS][16 * DIM];  // [DIM][16] for each 16 tokens
    alignas(128) u8 values[2][TILE * DIM];     // [TILE][DIM], with the chunks of a token in the order of value_place
};
// Returns the offset of a token's chunk in a tile's values, in bytes; that of eight tokens is in different banks.
DEV int value_place(int token, int chunk) {
    return token * DIM + ((chunk ^ (DIM == 64 ? token >> 1 & 3 : token & 7)) << 4);
}
// Loads 32 tokens of a tile's values, as operands of 16 tokens each by tiles of dimensions: those of `chunk`, and with
// MT = 2 of the chunk `apart` chunks after it.
DEV void load_values(u32 (&a)[2][MT][4], u32 values, int half, int chunk, int apart) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        // MT = 2: matrices are tokens 0 to 7 and 8 to 15 of two chunks; MT = 1: 0 to 31 of one.
        int at = half * 32 + (MT == 2 ? i * 16 + (lane & 15) : lane);
        uint4 r = load_transposed(values + value_place(at, MT == 2 ? chunk + lane / 16 * apart : chunk));
        int group0 = MT == 2 ? i : 0, group1 = MT == 2 ? i : 1;
        spread(r.x, a[group0][0][0], a[group0][0][1]);
        spread(r.y, a[group0][0][2], a[group0][0][3]);
        spread(r.z, a[group1][MT - 1][0], a[group1][MT - 1][1]);
        spread(r.w, a[group1][MT - 1][2], a[group1][MT - 1][3]);
    }
}

// The codes of a sequence for one KV head, in tiles from `begin` to `end`; tokens before `oldest`, which is not
// negative, are unused. The functions below process a warp's 16 tokens of a tile.
struct Codes {
    const Product& p;
    const int* table;
    const u8* slab;
    int oldest, end, begin, tiles;
    u32 keys, values;  // addresses in shared memory of this warp's keys, and of all values
    int next, after;   // block numbers for the next tile, and for the one after it
    float2 key_scales, value_scales;  // scales of tokens 2 g and 2 g + 1
};
DEV int own_token(int start) { return start + threadIdx.x / 32 * 16; }
// Returns the block of a tile; past either end of the sequence, its nearest block.
DEV int block_of(const Codes& c, int start) {
    return c.table[min(max(own_token(start) / BLOCK, c.oldest / BLOCK), (c.end - 1) / BLOCK)];
}
DEV const u8* block_at(const Codes& c, int block) { return c.slab + (u32)block * c.p.block_stride; }
DEV void copy_keys(const Codes& c, int index, int start, int block) {
    int lane = threadIdx.x & 31;
    const u8* from = block_at(c, block) + (own_token(start) % BLOCK + lane * BLOCK);
    u32 to = c.keys + (index & 1) * (TILE * DIM) + lane * 16;
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) copy_async(to + j * 512, from + j * (32 * BLOCK));
}
DEV void copy_values(const Codes& c, int index, int start, int block) {
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u8* from = block_at(c, block) + c.p.kv_stride + (own_token(start) % BLOCK * DIM + lane * 16);
    u32 to = c.values + (index & 1) * (TILE * DIM);
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) {
        int token = 16 * warp + j * (32 / CHUNKS) + lane / CHUNKS, n = start + token;
        copy_async_or_zeros(to + value_place(token, lane % CHUNKS), from + j * 512, n >= c.oldest && n < c.end);
    }
}
DEV void load_scales(const Codes& c, float2& keys, float2& values, int start, int block) {
    int g = threadIdx.x % 32 / 4;
    const u8* from = block_at(c, block) + (BLOCK * DIM + (own_token(start) % BLOCK + 2 * g) * 4);
    keys = *(const float2*)from;
    values = *(const float2*)(from + c.p.kv_stride);
}
// Multiplies products with the codes of two keys by the scales of these keys.
template <int NT> DEV void scale_scores(float (&scores)[NT][4], float2 keys) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = multiply(scores[n][i], i < 2 ? keys.x : keys.y);
}
// Starts the copies of the first tiles; each group of copies is one tile's keys or values.
DEV Codes codes_of(const Product& p, int slot, int kv_head, int begin, int oldest, int end, Tiles& room) {
    Codes c = {p, p.table + slot * p.table_stride, p.kv + kv_head * p.head_stride, oldest, end, begin,
               (end - begin + TILE - 1) / TILE, shared_address(room.keys[0][threadIdx.x / 32]), shared_address(room.values[0])};
    int block = block_of(c, begin);
    c.next = block_of(c, begin + TILE), c.after = block_of(c, begin + 2 * TILE);
    copy_keys(c, 0, begin, block);
    copies_commit();
    if (c.tiles > 1) copy_keys(c, 1, begin + TILE, c.next);
    copies_commit();
    copy_values(c, 0, begin, block);
    copies_commit();
    load_scales(c, c.key_scales, c.value_scales, begin, block);
    return c;
}
