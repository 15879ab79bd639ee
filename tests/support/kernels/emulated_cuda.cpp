// CUDA C++ on a CPU: the threads of a block, or of the blocks of a cluster, are fibers that run one after another, each
// until it waits for others.
// As much of CUDA as SOURCE needs; the names of instructions.cuh are defined here where it sees EMULATED.
// LATE: whether asynchronous copies are made when they are waited for, else they are made at once.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>
#define EMULATED
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#ifndef CLUSTER  // blocks of a cluster, where the kernel says it itself
#define CLUSTER 1
#endif
constexpr int MOST_BLOCKS = 8, SHARED_BYTES = 1 << 18;  // blocks of a cluster, at most; bytes of each
alignas(1024) static unsigned char memories[MOST_BLOCKS][SHARED_BYTES];
#define dynamic_shared memories[block_rank()]
static unsigned block_rank();
#define DYNAMIC_SHARED(name) unsigned char* name = dynamic_shared
using std::max;
using std::min;
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { unsigned x; };
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
static Index threadIdx, blockIdx, blockDim, gridDim;

static unsigned cluster, first_block;  // blocks of a cluster, and the first of the one that runs
static unsigned block_rank() { return blockIdx.x - first_block; }

constexpr int MOST = 1024 * MOST_BLOCKS, STACK = 1 << 18;  // threads of a cluster; bytes
static jmp_buf scheduler, fiber[MOST];
static bool ended[MOST], moved;
static int live;  // threads that have not ended
static unsigned self() { return block_rank() * 1024 + threadIdx.x; }
static void pass() { if (!_setjmp(fiber[self()])) _longjmp(scheduler, 1); }
struct Barrier { int arrived, turn; };
static Barrier block_barrier[MOST_BLOCKS], first_barrier[MOST_BLOCKS], warp_barrier[MOST / 32], warpgroup_barrier[MOST / 128], cluster_barrier;
static void wait_at(Barrier& barrier, int threads) {
    int turn = barrier.turn;
    moved = true;
    if (++barrier.arrived == threads) { barrier.arrived = 0; barrier.turn++; }
    else while (barrier.turn == turn) pass();
}
static inline void __syncthreads() { wait_at(block_barrier[block_rank()], blockDim.x); }
template <int THREADS> static inline void sync_first() { wait_at(first_barrier[block_rank()], THREADS); }
static inline void warp_sync() { wait_at(warp_barrier[self() / 32], 32); }
static inline void __syncwarp() { warp_sync(); }
static inline void warpgroup_sync() { wait_at(warpgroup_barrier[self() / 128], 128); }
static inline void sync_warpgroup() { warpgroup_sync(); }
static inline void meet_cluster() {  // all that have not ended
    int turn = cluster_barrier.turn;
    moved = true, cluster_barrier.arrived++;
    while (cluster_barrier.turn == turn) {
        if (cluster_barrier.arrived == live) moved = true, cluster_barrier.arrived = 0, cluster_barrier.turn++;
        else pass();
    }
}

static inline void leave_cluster() { meet_cluster(); }

static inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static inline float __int_as_float(int v) { return __uint_as_float(v); }
static inline unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
static inline int __float_as_int(float f) { return __float_as_uint(f); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline int atomicMax(int* p, int v) { int before = *p; *p = max(before, v); return before; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static unsigned sent[MOST];
static inline unsigned __shfl_xor_sync(unsigned, unsigned v, int far) {
    sent[self()] = v;
    warp_sync();
    unsigned found = sent[self() ^ far];
    warp_sync();
    return found;
}
static inline float __shfl_sync(unsigned, float v, int from) {
    sent[self()] = __float_as_uint(v);
    warp_sync();
    unsigned found = sent[self() / 32 * 32 + from];
    warp_sync();
    return __uint_as_float(found);
}
static inline float __shfl_xor_sync(unsigned mask, float v, int far) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(v), far));
}
static inline int __any_sync(unsigned mask, int v) {
    for (int far = 1; far < 32; far *= 2) v |= (int)__shfl_xor_sync(mask, (unsigned)v, far);
    return v;
}
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned n = selector >> (4 * i) & 7;
        r |= ((n < 4 ? a >> (8 * n) : b >> (8 * (n - 4))) & 255) << (8 * i);
    }
    return r;
}
#if defined(__aarch64__)
typedef __fp16 half_type;  // g++ 12 has no _Float16 in C++ there
#else
typedef _Float16 half_type;
#endif
static inline float half_of(unsigned v, int i) { uint16_t bits = v >> (16 * i); half_type h; memcpy(&h, &bits, 2); return (float)h; }
static inline unsigned to_half2(float a, float b) {
    half_type low = (half_type)a, high = (half_type)b;
    uint16_t x, y;
    memcpy(&x, &low, 2), memcpy(&y, &high, 2);
    return x | (unsigned)y << 16;
}
static inline unsigned bf16(float v) { unsigned b; memcpy(&b, &v, 4); return (b + 0x7FFF + (b >> 16 & 1)) >> 16; }
static inline unsigned to_bf16x2(float a, float b) { return bf16(a) | bf16(b) << 16; }
static inline unsigned hmul2(unsigned a, unsigned b) { return to_half2(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1)); }
static inline unsigned hsub2(unsigned a, unsigned b) { return to_half2(half_of(a, 0) - half_of(b, 0), half_of(a, 1) - half_of(b, 1)); }
static inline unsigned fma_half2(unsigned a, unsigned b, unsigned c) {
    return to_half2(fmaf(half_of(a, 0), half_of(b, 0), half_of(c, 0)), fmaf(half_of(a, 1), half_of(b, 1), half_of(c, 1)));
}
static inline unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }
static inline unsigned kept(unsigned v) { return v; }
static inline float* in_memory(float* p) { return p; }
static inline float from_half(unsigned v) { return half_of(v, 0); }
static inline float of_fp8(unsigned v) {
    int exponent = v >> 3 & 15, mantissa = v & 7;
    float size = (v & 127) == 127 ? NAN : exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return v & 128 ? -size : size;
}
struct Fp8Numbers {  // of all codes
    float of[256];
    Fp8Numbers() { for (int code = 0; code < 256; code++) of[code] = of_fp8(code); }
};
static const Fp8Numbers fp8_numbers;
// The nearest of all 127 sizes, which grow with their codes; the even one of two.
static inline unsigned to_fp8(float v) {
    if (v != v) return 127;
    const float size = fabsf(v), *sizes = fp8_numbers.of;
    unsigned above = std::lower_bound(sizes, sizes + 127, size) - sizes, best = min(above, 126u);
    if (above > 0 && above < 127) {
        float down = size - sizes[above - 1], up = sizes[above] - size;
        if (down < up || (down == up && above % 2)) best = above - 1;
    }
    return best | (std::signbit(v) ? 128 : 0);
}
static inline unsigned to_fp8x2(float a, float b) { return to_fp8(a) | to_fp8(b) << 8; }
static inline void halves_of_fp8(unsigned& low, unsigned& high, unsigned v) {
    low = to_half2(of_fp8(v & 255), of_fp8(v >> 8 & 255)), high = to_half2(of_fp8(v >> 16 & 255), of_fp8(v >> 24));
}
template <bool BF16> static inline float number(unsigned v, int i) { return BF16 ? __uint_as_float(i ? v & 0xFFFF0000u : v << 16) : half_of(v, i); }

static inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
    float r[2];
    for (int i = 0; i < 2; i++) r[i] = fmaf(number<true>(a, i), number<true>(b, i), number<true>(c, i));
    return to_bf16x2(r[0], r[1]);
}

// Sums of 16 products, rounded once: a tensor core rounds otherwise, but an element's sum depends on its own inputs
// alone here too.
static float operands[MOST][12];
template <bool BF16> static inline void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    unsigned words[] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 12; i++) operands[self()][i] = number<BF16>(words[i / 2], i % 2);
    warp_sync();
    int warp = self() / 32 * 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        int row = i / 2, column = 2 * t + i % 2;
        double sum = 0;
        for (int q = 0; q < 4; q++) {
            const float *a = operands[warp + g * 4 + q] + 2 * row, *b = operands[warp + column * 4 + q] + 8;
            sum += (double)a[0] * b[0] + (double)a[1] * b[1] + (double)a[4] * b[2] + (double)a[5] * b[3];
        }
        c[i] = (float)(c[i] + sum);
    }
    warp_sync();
}
static inline float power_of_two(float v) { float r = exp2f(v); return r < 0x1p-126f ? 0.0f : r; }
static inline int uniform(int v) { return v; }
static inline float power_in_order(float v) { return power_of_two(v); }
static inline void part_ways(bool) {}
static inline float near_inverse(float v) { return 1.0f / v; }
static inline float inverse_root(float v) { return 1.0f / sqrtf(v); }
static inline float divided(float a, float b) { return a / b; }
static inline float fast_exp(float v) { return expf(v); }
static inline void launch_dependents() {}
static inline void pause(unsigned) {}
static inline void wait_before() {}
static inline unsigned shared_address(const void* p) { return (unsigned char*)p - dynamic_shared; }
// Memory that is not aligned as the device wants it ends the process.
template <class T> static inline T* aligned(const void* p) { if ((uintptr_t)p % sizeof(T)) abort(); return (T*)p; }
template <class T> static inline T* shared(unsigned at) { return aligned<T>(dynamic_shared + at); }
struct alignas(16) Unit { unsigned words[4]; };
struct Copy { unsigned to; const void* from; unsigned size; bool there; int group; };
static std::vector<Copy> copies[MOST];
static int groups[MOST];
static void make(const Copy& copy) {
    if ((uintptr_t)copy.from % copy.size || copy.to % copy.size) abort();
    if (copy.there) memcpy(dynamic_shared + copy.to, copy.from, copy.size);
    else memset(dynamic_shared + copy.to, 0, copy.size);
}
static void send(unsigned to, const void* from, unsigned size, bool there) {
    Copy copy = {to, from, size, there, groups[self()]};
    if (LATE) copies[self()].push_back(copy);
    else make(copy);
}
static inline void copy_async(unsigned to, const void* from) { send(to, from, 16, true); }
static inline void copy_async_or_zeros(unsigned to, const void* from, bool there) { send(to, from, 16, there); }
static inline void copy_word_async(unsigned to, const void* from) { send(to, from, 4, true); }
static inline void copies_commit() { groups[self()]++; }
template <int LEFT> static inline void copies_wait() {
    std::vector<Copy>& mine = copies[self()];
    auto end = std::find_if(mine.begin(), mine.end(), [](const Copy& each) { return each.group >= groups[self()] - LEFT; });
    std::for_each(mine.begin(), end, make);
    mine.erase(mine.begin(), end);
}
// Barriers that copies of ranges and boxes arrive at, each by its bytes.
struct Arrivals { int all, left; long bytes; unsigned phase; };
static std::map<unsigned, Arrivals> of_block[MOST_BLOCKS];
#define barriers of_block[block_rank()]
struct Range { unsigned to; const void* from; unsigned size; };
static std::map<unsigned, std::vector<Range>> sent_to[MOST_BLOCKS];
#define ranges sent_to[block_rank()]  // on their way, by barrier; zeros where they come from nowhere
static void settle(Arrivals& b) {
    moved = true;
    if (b.left == 0 && b.bytes == 0) b.left = b.all, b.phase ^= 1;
}
static void bring(unsigned barrier) {
    for (const Range& each : ranges[barrier]) {
        if (each.from) memcpy(dynamic_shared + each.to, each.from, each.size);
        else memset(dynamic_shared + each.to, 0, each.size);
        barriers.at(barrier).bytes -= each.size;
    }
    ranges[barrier].clear();
    settle(barriers.at(barrier));
}
static void send_range(unsigned to, const void* from, unsigned size, unsigned barrier) {
    if ((uintptr_t)from % 16 || to % 16 || size % 16 || to + size > SHARED_BYTES) abort();
    ranges[barrier].push_back({to, from, size}), moved = true;
}
static inline void make_barrier(unsigned at, int arrivals) { if (at % 8) abort(); barriers[at] = {arrivals, arrivals, 0, 0}; }
static inline void publish_barriers() {}
static inline void arrive(unsigned at) {
    if (--barriers.at(at).left < 0) abort();
    settle(barriers.at(at));
}
static inline void expect(unsigned at, int bytes) { barriers.at(at).bytes += bytes; arrive(at); }
static inline void await(unsigned at, unsigned phase) {
    while (barriers.at(at).phase == phase) {
        if (LATE && !ranges[at].empty()) bring(at);
        else pass();
    }
}
static inline void copy_range(unsigned to, const void* from, int bytes, unsigned barrier) {
    send_range(to, from, bytes, barrier);
    if (!LATE) bring(barrier);
}
// A tensor, its innermost dimension first; strides in bytes. Rows of a box are 128 bytes, swizzled.
struct alignas(64) Map { const char* data; int rank, itemsize, sizes[4]; long strides[4]; int box[4]; };
static_assert(sizeof(Map) == 128, "as large as a CUtensorMap");
static void send_box(unsigned to, const Map& map, const int (&from)[4], unsigned barrier) {
    if (to % 128 || map.box[0] * map.itemsize != 128) abort();
    int at[4];
    for (at[3] = 0; at[3] < map.box[3]; at[3]++)
        for (at[2] = 0; at[2] < map.box[2]; at[2]++)
            for (at[1] = 0; at[1] < map.box[1]; at[1]++, to += 128)
                for (int unit = 0; unit < 8; unit++) {
                    int column = from[0] + unit * 16 / map.itemsize;
                    bool there = column < map.sizes[0];
                    const char* address = map.data + column * map.itemsize;
                    for (int d = 1; d < 4; d++) there = there && from[d] + at[d] < map.sizes[d], address += (from[d] + at[d]) * map.strides[d];
                    unsigned where = to + unit * 16;
                    send_range(where ^ (where >> 7 & 7) << 4, there ? address : nullptr, 16, barrier);
                }
    if (!LATE) bring(barrier);
}
static inline void copy_tile(unsigned to, const Map& map, int column, int row, unsigned barrier) { send_box(to, map, {column, row, 0, 0}, barrier); }
static inline void copy_box(unsigned to, const Map& map, int row, int layer, unsigned barrier) { send_box(to, map, {0, row, layer, 0}, barrier); }
static inline void copy_groups(unsigned to, const Map& map, int column, int group, unsigned barrier) { send_box(to, map, {column, 0, 0, group}, barrier); }
static inline float sigmoid(float v) { return 1.0f / (1.0f + std::exp2(-v * 1.4426950408889634f)); }
static inline float4 fetch(unsigned at, int block) { float4 v; memcpy(&v, memories[block] + at, 16); return v; }
static inline void put(unsigned at, float a, float b, float c, float d) { *shared<float4>(at) = {a, b, c, d}; }
// Registers, counted by thread of a warpgroup: who takes more than were given up waits.
static int given_up[MOST_BLOCKS];
static int registers() { return 65536 / blockDim.x / 8 * 8; }
template <int REGISTERS> static inline void give_registers() { if (threadIdx.x % 128 == 0) given_up[block_rank()] += registers() - REGISTERS, moved = true; }
template <int REGISTERS> static inline void take_registers() {
    int& free = given_up[block_rank()];
    if (threadIdx.x % 128) return;
    while (free < REGISTERS - registers()) pass();
    free -= REGISTERS - registers(), moved = true;
}
static inline int count_up(int* p) { return (*p)++; }
static inline int load_fresh(const int* p) { return *p; }
static inline uint4 load_shared(unsigned at) { Unit u = *shared<Unit>(at); return {u.words[0], u.words[1], u.words[2], u.words[3]}; }
static inline unsigned load_shared_word(unsigned at) { return *shared<unsigned>(at); }
static inline unsigned load_shared_byte(unsigned at) { return dynamic_shared[at]; }
static unsigned addresses[MOST];
template <bool TRANSPOSED> static inline uint4 matrices(unsigned at) {
    addresses[self()] = at;
    warp_sync();
    int warp = self() / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    unsigned r[4];
    for (int i = 0; i < 4; i++) {
        auto element = [&](int row, int column) { return ((uint16_t*)shared<Unit>(addresses[warp + i * 8 + row]))[column]; };
        r[i] = TRANSPOSED ? element(2 * t, g) | (unsigned)element(2 * t + 1, g) << 16
                          : element(g, 2 * t) | (unsigned)element(g, 2 * t + 1) << 16;
    }
    warp_sync();
    return {r[0], r[1], r[2], r[3]};
}
static inline uint4 load_matrices(unsigned at) { return matrices<false>(at); }
static inline uint4 load_transposed(unsigned at) { return matrices<true>(at); }
static inline void shared_is_ready() {}
static inline void wgmma_fence() {}
static inline void wgmma_commit() {}
template <int LEFT> static inline void wgmma_wait() {}
template <int NT> static inline void wgmma_ends(float (&)[NT][4]) {}
template <int NT> static inline void wgmma_settle(float (&)[NT][4]) {}
// The right operand lies where a descriptor says: rows of 128 bytes, units of 16 bytes swizzled by bits 7 to 9 of their
// address.
template <bool BF16, int NT, bool BY_INPUTS = false>
static inline void wgmma(float (&c)[NT][4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b, int more) {
    if (b >> 62 != 1) abort();
    unsigned words[] = {a0, a1, a2, a3}, start = (b & 0x3FFF) << 4, apart = (b >> 32 & 0x3FFF) << 4, far = (b >> 16 & 0x3FFF) << 4;
    for (int i = 0; i < 8; i++) operands[self()][i] = number<BF16>(words[i / 2], i % 2);
    warpgroup_sync();
    int warp = self() / 32 * 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int n = 0; n < NT; n++)
        for (int i = 0; i < 4; i++) {
            int row = i / 2, column = 2 * t + i % 2;
            double sum = 0;
            for (int k = 0; k < 16; k++) {
                unsigned at = start + (BY_INPUTS ? n / 8 * far + k / 8 * apart + k % 8 * 128 + n % 8 * 16 + column * 2
                                                 : n * apart + column * 128 + k * 2);
                at ^= (at >> 7 & 7) << 4;
                unsigned word = *shared<uint16_t>(at);
                sum += (double)operands[warp + g * 4 + k % 8 / 2][2 * row + k / 8 * 4 + k % 2] * number<BF16>(word, 0);
            }
            c[n][i] = (float)((more ? c[n][i] : 0) + sum);
        }
    warpgroup_sync();
}

// The left one too.
template <bool BF16> static inline void wgmma(float (&c)[8][4], unsigned long long a, unsigned long long b, int more) {
    unsigned start = (a & 0x3FFF) << 4, words[4];
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        unsigned at = start + (row / 8 + i % 2) * 1024 + row % 8 * 128 + (2 * t + i / 2 * 8) * 2;
        words[i] = *shared<unsigned>(at ^ (at >> 7 & 7) << 4);
    }
    wgmma<BF16, 8>(c, words[0], words[1], words[2], words[3], b, more);
}

static inline unsigned transposed(unsigned v) {
    sent[self()] = v;
    warp_sync();
    int warp = self() / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto element = [&](int row, int column) { return sent[warp + row * 4 + column / 2] >> column % 2 * 16 & 0xFFFF; };
    unsigned r = element(2 * t, g) | element(2 * t + 1, g) << 16;
    warp_sync();
    return r;
}
static inline unsigned long long tile_operand(unsigned at) { return 1ull << 62 | 64ull << 32 | 1ull << 16 | at >> 4; }
static inline unsigned long long rows_operand(unsigned at, int apart) { return 1ull << 62 | 64ull << 32 | (unsigned long long)(apart / 16) << 16 | at >> 4; }
#ifdef SUMS  // both operands in shared memory; products are added in their order
static inline void settle(float (&)[SUMS]) {}
// The numbers of a row of an operand, in their order.
template <int TYPE, int COUNT> static inline void operand_row(float (&numbers)[COUNT], unsigned long long from, int row) {
    unsigned start = ((from & 0x3FFF) << 4) + row / 8 * 1024 + row % 8 * 128;
    for (int k = 0; k < COUNT; k++) {
        unsigned at = start + k * (TYPE == 0 ? 1 : 2);
        at ^= (at >> 7 & 7) << 4;
        numbers[k] = TYPE == 0 ? fp8_numbers.of[dynamic_shared[at]] : number<TYPE == 1>(*(uint16_t*)(dynamic_shared + at), 0);
    }
}
template <int TYPE> static inline void multiply(float (&d)[SUMS], unsigned long long a, unsigned long long b, int add) {
    constexpr int COUNT = TYPE == 0 ? 32 : 16;
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    float rows[2][COUNT], right[COUNT];
    for (int i = 0; i < 2; i++) operand_row<TYPE>(rows[i], a, row + i * 8);
    for (int i = 0; i < SUMS / 2; i++) {
        operand_row<TYPE>(right, b, i / 2 * 8 + column + i % 2);
        for (int lower = 0; lower < 2; lower++) {
            float& to = d[i / 2 * 4 + lower * 2 + i % 2];
            float sum = add ? to : 0;
            for (int k = 0; k < COUNT; k++) sum += rows[lower][k] * right[k];
            to = sum;
        }
    }
}
#endif

#include SOURCE

static void (*kernel)(Product);
static Product argument;
static void enter() {
    kernel(argument);
    ended[self()] = moved = true;
    live--;
    _longjmp(scheduler, 1);
}
// Runs the fiber of threadIdx and blockIdx until it waits or ends; one that has a context has not begun.
__attribute__((noinline)) static void resume(const ucontext_t* begins) {
    if (_setjmp(scheduler)) return;
    if (begins) setcontext(begins);
    _longjmp(fiber[self()], 1);
}
// Runs blocks, `together` of them at a time as a cluster, whose shared memory holds NaN at first.
extern "C" void emulate(void (*run)(Product), unsigned grid, unsigned threads, unsigned together, const void* given) {
    memcpy(&argument, given, sizeof argument);  // which may not be aligned as a Product is
    kernel = run, blockDim.x = threads, gridDim.x = grid, cluster = max(together, (unsigned)CLUSTER);
    if (threads > 1024 || cluster > MOST_BLOCKS) abort();
    // Given back at the end: a process has many of these libraries, and what it holds it must be able to fork.
    const size_t room = (size_t)cluster * 1024 * STACK;
    char* stacks = (char*)mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    for (unsigned first = 0; first < grid; first += cluster) {
        first_block = first;
        const unsigned beside = min(cluster, grid - first);
        auto each = [&](auto&& visit) {
            for (blockIdx.x = first; blockIdx.x < first + beside; blockIdx.x++)
                for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) visit();
        };
        live = threads * beside, cluster_barrier = {};
        for (unsigned i = 0; i < cluster; i++) {
            memset(memories[i], 0xFF, SHARED_BYTES);
            block_barrier[i] = first_barrier[i] = {}, of_block[i].clear(), sent_to[i].clear();
        }
        memset(given_up, 0, sizeof given_up), memset(warp_barrier, 0, sizeof warp_barrier), memset(warpgroup_barrier, 0, sizeof warpgroup_barrier);
        each([&] {
            ucontext_t begins;
            getcontext(&begins);
            begins.uc_stack.ss_sp = stacks + (size_t)self() * STACK, begins.uc_stack.ss_size = STACK;
            makecontext(&begins, enter, 0);
            ended[self()] = false;
            resume(&begins);
        });
        while (live) {
            moved = false;
            each([] { if (!ended[self()]) resume(nullptr); });
            if (!moved) abort();  // threads wait for others that have ended, or wait elsewhere
        }
    }
    munmap(stacks, room);
}
