// The softmax of triton/attention/softmax.py in CUDA C++, and the sum over the pieces of a sequence. Must be defined
// before: DIM, GROUP, BFLOAT16, THREADS, and RAISED, the factor of weights as operands. P: the type of kernel
// arguments, with the fields that are used here.
constexpr int TILE = 64, FIELDS = 10;  // keys per tile, numbers per item
constexpr float LOG2E = 1.4426950408889634f;
#define NOTHING (-__int_as_float(0x7F800000))

DEV float multiply(float a, float b) { return __fmul_rn(a, b); }
DEV float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV float low_of(u32 v) { return BFLOAT16 ? __uint_as_float(v << 16) : from_half(v & 0xFFFF); }
DEV float high_of(u32 v) { return BFLOAT16 ? __uint_as_float(v & 0xFFFF0000u) : from_half(v >> 16); }
DEV u32 pack(float low, float high) { return BFLOAT16 ? to_bf16x2(low, high) : to_half2(low, high); }
DEV float base_of(float highest) { return highest == NOTHING ? 0.0f : highest; }
// The weights of a tile are added as integers.
DEV u32 whole_number(float weight) { return __float_as_uint(multiply_add(weight, 16777216.0f, 33554432.0f)); }
DEV float sum_of(u32 whole) { return multiply((float)(int)(whole & 0x3FFFFFFFu), 1.0f / 4194304.0f); }
// Returns whether a piece begins at position `start`, as in ordered_splits.bounds.
DEV bool piece_begins(int start, int window_piece) {
    if (window_piece) return (start & (window_piece - 1)) == 0;  // a power of two
    int below = start < 1024 ? start & 127 : start & 255;
    return (start < 4096 ? below : __float_as_int((float)start) & 0x7FFFF) == 0;
}

// The largest score and the sum of weights of a row.
struct Row { float highest, weight; };
struct Change { float mine, theirs; };
DEV Change add_row(Row& row, const Row& piece) {
    float higher = fmaxf(row.highest, piece.highest), base = base_of(higher);
    Change c = {power_of_two(row.highest - base), power_of_two(piece.highest - base)};
    row = {higher, multiply_add(row.weight, c.mine, multiply(piece.weight, c.theirs))};
    return c;
}
// Adds the sums of a piece to the total, for queries 2 t and 2 t + 1 of each eight and for tiles of dimensions.
template <int MT, int NT>
DEV void add_piece(Row (&whole)[NT][2], const Row (&piece)[NT][2], float (&acc)[MT][NT][4], const float (&piece_acc)[MT][NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            Change c = add_row(whole[n][j], piece[n][j]);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                acc[m][n][j] = multiply_add(acc[m][n][j], c.mine, multiply(piece_acc[m][n][j], c.theirs));
                acc[m][n][2 + j] = multiply_add(acc[m][n][2 + j], c.mine, multiply(piece_acc[m][n][2 + j], c.theirs));
            }
        }
}
// Returns the two factors by which the values of a row are multiplied at the end, one after the other.
template <class P> DEV float2 last_factors(const P& p, Row row, int head) {
    float mine = 1.0f;
    if (p.sinks) {
        float raw = p.sinks_float ? ((const float*)p.sinks)[head] : low_of(((const u16*)p.sinks)[head]);
        float higher = fmaxf(row.highest, multiply(raw, LOG2E));
        mine = power_of_two(row.highest - higher);
        row.weight = multiply_add(row.weight, mine, power_of_two(multiply_add(raw, LOG2E, -higher)));
    }
    return make_float2(mine, __fdiv_rn(1.0f / RAISED, row.weight));
}
template <class P> DEV float finished(const P& p, float sum, float2 factors) {
    if (p.sinks) sum = multiply(sum, factors.x);
    return multiply(sum, factors.y) + 0.0f;
}

// Adds up the sums that the pieces of a sequence stored for one KV head, in order.
template <class P> DEV void add_up(const P& p, int row, int first, int parts, int kv_head) {
    constexpr int LANES = DIM / 4, AHEAD = 8;
    int heads = p.kv_heads * GROUP, d = threadIdx.x % LANES;
    for (int member = threadIdx.x / LANES; member < GROUP; member += THREADS / LANES) {
        i64 place = (i64)first * heads + kv_head * GROUP + member;
        const float4* sums = (const float4*)p.sums + place * LANES + d;
        const float2* stats = (const float2*)p.stats + place;
        Row whole = {NOTHING, 0};
        float acc[4] = {};
        for (int part = 0; part < parts; part += AHEAD) {
            float4 v[AHEAD];
            float2 s[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int at = min(part + i, parts - 1);
                v[i] = __ldcg(sums + (i64)at * heads * LANES);  // bypasses L1: other multiprocessors wrote it
                s[i] = __ldcg(stats + (i64)at * heads);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) if (part + i < parts) {
                Change c = add_row(whole, {s[i].x, s[i].y});
                acc[0] = multiply_add(acc[0], c.mine, multiply(v[i].x, c.theirs));
                acc[1] = multiply_add(acc[1], c.mine, multiply(v[i].y, c.theirs));
                acc[2] = multiply_add(acc[2], c.mine, multiply(v[i].z, c.theirs));
                acc[3] = multiply_add(acc[3], c.mine, multiply(v[i].w, c.theirs));
            }
        }
        int head = kv_head * GROUP + member;
        float2 f = last_factors(p, whole, head);
        u32* out = (u32*)p.out + ((i64)row * heads + head) * (DIM / 2) + 2 * d;
        out[0] = pack(finished(p, acc[0], f), finished(p, acc[1], f));
        out[1] = pack(finished(p, acc[2], f), finished(p, acc[3], f));
    }
}
