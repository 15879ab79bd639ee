// CUDA C++ on a CPU: the threads of a block are fibers that run one after another, each until it waits for others.
// As much of CUDA as SOURCE needs; the names of instructions.cuh are defined here where it sees EMULATED.
// LATE: whether asynchronous copies are made when they are waited for, else they are made at once.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <ucontext.h>
#include <vector>
#define EMULATED
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DYNAMIC_SHARED(name) unsigned char* name = dynamic_shared
alignas(1024) static unsigned char dynamic_shared[1 << 18];
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

constexpr int MOST = 1024, STACK = 1 << 18;
static jmp_buf scheduler, fiber[MOST];
static bool ended[MOST], moved;
static void pass() { if (!_setjmp(fiber[threadIdx.x])) _longjmp(scheduler, 1); }
struct Barrier { int arrived, turn; };
static Barrier block_barrier, first_barrier, warp_barrier[MOST / 32], warpgroup_barrier[MOST / 128];
static void wait_at(Barrier& barrier, int threads) {
    int turn = barrier.turn;
    moved = true;
    if (++barrier.arrived == threads) { barrier.arrived = 0; barrier.turn++; }
    else while (barrier.turn == turn) pass();
}
static inline void __syncthreads() { wait_at(block_barrier, blockDim.x); }
template <int THREADS> static inline void sync_first() { wait_at(first_barrier, THREADS); }
static inline void warp_sync() { wait_at(warp_barrier[threadIdx.x / 32], 32); }
static inline void __syncwarp() { warp_sync(); }
static inline void warpgroup_sync() { wait_at(warpgroup_barrier[threadIdx.x / 128], 128); }

static inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static inline float __int_as_float(int v) { return __uint_as_float(v); }
static inline unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
static inline int __float_as_int(float f) { return __float_as_uint(f); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static unsigned sent[MOST];
static inline unsigned __shfl_xor_sync(unsigned, unsigned v, int far) {
    sent[threadIdx.x] = v;
    warp_sync();
    unsigned found = sent[threadIdx.x ^ far];
    warp_sync();
    return found;
}
static inline float __shfl_xor_sync(unsigned mask, float v, int far) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(v), far));
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
static inline float half_of(unsigned v, int i) { uint16_t bits = v >> (16 * i); _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static inline unsigned to_half2(float a, float b) {
    _Float16 low = (_Float16)a, high = (_Float16)b;
    uint16_t x, y;
    memcpy(&x, &low, 2), memcpy(&y, &high, 2);
    return x | (unsigned)y << 16;
}
static inline unsigned bf16(float v) { unsigned b; memcpy(&b, &v, 4); return (b + 0x7FFF + (b >> 16 & 1)) >> 16; }
static inline unsigned to_bf16x2(float a, float b) { return bf16(a) | bf16(b) << 16; }
static inline unsigned hmul2(unsigned a, unsigned b) { return to_half2(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1)); }
static inline unsigned hsub2(unsigned a, unsigned b) { return to_half2(half_of(a, 0) - half_of(b, 0), half_of(a, 1) - half_of(b, 1)); }
static inline unsigned hadd2(unsigned a, unsigned b) { return to_half2(half_of(a, 0) + half_of(b, 0), half_of(a, 1) + half_of(b, 1)); }
static inline unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }
static inline unsigned kept(unsigned v) { return v; }
static inline float* in_memory(float* p) { return p; }
static inline float from_half(unsigned v) { return half_of(v, 0); }
static inline float of_fp8(unsigned v) {
    int exponent = v >> 3 & 15, mantissa = v & 7;
    float size = (v & 127) == 127 ? NAN : exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return v & 128 ? -size : size;
}
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
    for (int i = 0; i < 12; i++) operands[threadIdx.x][i] = number<BF16>(words[i / 2], i % 2);
    warp_sync();
    int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
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
static inline float fast_exp(float v) { return expf(v); }
static inline void launch_dependents() {}
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
    Copy copy = {to, from, size, there, groups[threadIdx.x]};
    if (LATE) copies[threadIdx.x].push_back(copy);
    else make(copy);
}
static inline void copy_async(unsigned to, const void* from) { send(to, from, 16, true); }
static inline void copy_async_or_zeros(unsigned to, const void* from, bool there) { send(to, from, 16, there); }
static inline void copy_word_async(unsigned to, const void* from) { send(to, from, 4, true); }
static inline void copies_commit() { groups[threadIdx.x]++; }
template <int LEFT> static inline void copies_wait() {
    std::vector<Copy>& mine = copies[threadIdx.x];
    auto end = std::find_if(mine.begin(), mine.end(), [](const Copy& each) { return each.group >= groups[threadIdx.x] - LEFT; });
    std::for_each(mine.begin(), end, make);
    mine.erase(mine.begin(), end);
}
// Barriers that copies of ranges and boxes arrive at, each by its bytes.
struct Arrivals { int all, left; long bytes; unsigned phase; };
static std::map<unsigned, Arrivals> barriers;
struct Range { unsigned to; const void* from; unsigned size; };
static std::map<unsigned, std::vector<Range>> ranges;  // on their way, by barrier; zeros where they come from nowhere
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
    if ((uintptr_t)from % 16 || to % 16 || size % 16 || to + size > sizeof dynamic_shared) abort();
    ranges[barrier].push_back({to, from, size});
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
struct alignas(64) Map { const char* data; long rows, layers, stride, box, box_layers; char rest[80]; };
static inline void copy_box(unsigned to, const Map& map, int row, int layer, unsigned barrier) {
    if (to % 128) abort();
    for (int l = 0; l < map.box_layers; l++)
        for (int r = 0; r < map.box; r++)
            for (int unit = 0; unit < 8; unit++) {
                unsigned at = to + (l * map.box + r) * 128 + unit * 16;
                bool there = row + r < map.rows && layer + l < map.layers;
                send_range(at ^ (at >> 7 & 7) << 4, there ? map.data + (row + r) * map.stride + (layer + l) * 128 + unit * 16 : nullptr, 16, barrier);
            }
    if (!LATE) bring(barrier);
}
template <int REGISTERS> static inline void give_registers() {}
template <int REGISTERS> static inline void take_registers() {}
static inline int count_up(int* p) { return (*p)++; }
static inline int load_fresh(const int* p) { return *p; }
static inline uint4 load_shared(unsigned at) { Unit u = *shared<Unit>(at); return {u.words[0], u.words[1], u.words[2], u.words[3]}; }
static inline unsigned load_shared_word(unsigned at) { return *shared<unsigned>(at); }
static inline unsigned load_shared_byte(unsigned at) { return dynamic_shared[at]; }
static unsigned addresses[MOST];
template <bool TRANSPOSED> static inline uint4 matrices(unsigned at) {
    addresses[threadIdx.x] = at;
    warp_sync();
    int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
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
// The right operand lies where a descriptor says: rows of 128 bytes, units of 16 bytes swizzled by bits 7 to 9 of their
// address.
template <bool BF16, int NT>
static inline void wgmma(float (&c)[NT][4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b, int more) {
    if (b >> 62 != 1) abort();
    unsigned words[] = {a0, a1, a2, a3}, start = (b & 0x3FFF) << 4, apart = (b >> 32 & 0x3FFF) << 4;
    for (int i = 0; i < 8; i++) operands[threadIdx.x][i] = number<BF16>(words[i / 2], i % 2);
    warpgroup_sync();
    int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int n = 0; n < NT; n++)
        for (int i = 0; i < 4; i++) {
            int row = i / 2, column = 2 * t + i % 2;
            double sum = 0;
            for (int k = 0; k < 16; k++) {
                unsigned at = start + n * apart + column * 128 + k * 2;
                at ^= (at >> 7 & 7) << 4;
                unsigned word = *shared<uint16_t>(at);
                sum += (double)operands[warp + g * 4 + k % 8 / 2][2 * row + k / 8 * 4 + k % 2] * number<BF16>(word, 0);
            }
            c[n][i] = (float)((more ? c[n][i] : 0) + sum);
        }
    warpgroup_sync();
}

#include SOURCE

static void (*kernel)(Product);
static Product argument;
static int live;
static void enter() {
    kernel(argument);
    ended[threadIdx.x] = moved = true;
    live--;
    _longjmp(scheduler, 1);
}
// Runs the fiber of threadIdx until it waits or ends; one that has a context has not begun.
__attribute__((noinline)) static void resume(const ucontext_t* begins) {
    if (_setjmp(scheduler)) return;
    if (begins) setcontext(begins);
    _longjmp(fiber[threadIdx.x], 1);
}
extern "C" void emulate(void (*run)(Product), unsigned grid, unsigned threads, const Product* given) {
    static char* stacks = (char*)malloc((size_t)MOST * STACK);
    kernel = run, argument = *given, blockDim.x = threads, gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        live = threads, block_barrier = first_barrier = {}, barriers.clear(), ranges.clear();
        memset(warp_barrier, 0, sizeof warp_barrier), memset(warpgroup_barrier, 0, sizeof warpgroup_barrier);
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {
            ucontext_t begins;
            getcontext(&begins);
            begins.uc_stack.ss_sp = stacks + (size_t)threadIdx.x * STACK, begins.uc_stack.ss_size = STACK;
            makecontext(&begins, enter, 0);
            ended[threadIdx.x] = false;
            resume(&begins);
        }
        while (live) {
            moved = false;
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
                if (!ended[threadIdx.x]) resume(nullptr);
            if (!moved) abort();  // threads wait for others that have ended, or wait elsewhere
        }
    }
}
