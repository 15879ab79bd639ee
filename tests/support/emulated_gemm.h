// What kernels/cuda/ordered_gemm.cu needs of a GPU, on a CPU: threads of a block are fibers that run in turn, each until
// it waits; so are those of all blocks of a cluster. A copy is made at once, with the swizzle that operands are read
// with; a product is made at once, 16 products in their order.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csetjmp>
#include <map>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
using std::max;
using std::min;
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;

constexpr int MOST = 640 * PARTS, STACK = 1 << 16, MEMORY = 1 << 18;
alignas(1024) static unsigned char memories[PARTS][MEMORY];
#define shared memories[blockIdx.x % PARTS]
static jmp_buf scheduler, fiber[MOST];
static bool ended[MOST], moved;
static unsigned threads;
static unsigned self() { return blockIdx.x % PARTS * threads + threadIdx.x; }
static void pass() { if (!_setjmp(fiber[self()])) _longjmp(scheduler, 1); }

struct Meeting { unsigned arrived, turn; };
static void meet(Meeting& meeting, unsigned all) {
    unsigned turn = meeting.turn;
    moved = true;
    if (++meeting.arrived == all) meeting.arrived = 0, meeting.turn++;
    else while (meeting.turn == turn) pass();
}
static Meeting of_blocks[PARTS], of_consumers[PARTS], of_warps[MOST / 32], of_cluster;
static void __syncthreads() { meet(of_blocks[blockIdx.x % PARTS], threads); }
static void __syncwarp() { meet(of_warps[self() / 32], 32); }
static void meet_consumers() { meet(of_consumers[blockIdx.x % PARTS], CONSUMERS); }
static void meet_cluster() { meet(of_cluster, PARTS * CONSUMERS); }
static unsigned exchanged[MOST];
static unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
    exchanged[self()] = value;
    __syncwarp();
    unsigned result = exchanged[self() ^ mask];
    __syncwarp();
    return result;
}

struct Arrivals { int all, left; long bytes; unsigned phase; };
static std::map<unsigned, Arrivals> of_block[PARTS];
#define barriers of_block[blockIdx.x % PARTS]
static void settle_barrier(Arrivals& b) {
    moved = true;
    if (b.left == 0 && b.bytes == 0) b.left = b.all, b.phase ^= 1;
}

static float wide(unsigned short v) {
#ifdef HALF_PRECISION
    _Float16 h;
    memcpy(&h, &v, 2);
    return (float)h;
#else
    unsigned b = unsigned(v) << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
#endif
}
static unsigned narrow(float f) {
#ifdef HALF_PRECISION
    _Float16 h = (_Float16)f;
    unsigned short v;
    memcpy(&v, &h, 2);
    return v;
#else
    unsigned b;
    memcpy(&b, &f, 4);
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
#endif
}
struct Matrix { const unsigned short* data; long rows, inner, stride, box; };  // what a Map says here; stride in bytes
static unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

static void begin_multiplying() {}
static void commit() {}
template <int LEFT> static void await_products() {}
static void settle(float (&)[SUMS]) {}
static u64 operand(u32 address) { return address >> 4; }
static float element(u64 from, int row, int k) {
    unsigned short v;
    memcpy(&v, &shared[swizzled(unsigned(from << 4) + row / 8 * 1024 + row % 8 * 128 + k * 2)], 2);
    return wide(v);
}
static void multiply(float (&d)[SUMS], u64 a, u64 b, int add) {
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < SUMS; i++) {
        int m = row + i / 2 % 2 * 8, n = i / 4 * 8 + column + i % 2;
        float sum = add ? d[i] : 0;
        for (int k = 0; k < 16; k++) sum += element(a, m, k) * element(b, n, k);
        d[i] = sum;
    }
}
static u32 shared_memory() { return 0; }
static void make_barrier(u32 barrier, int arrivals) { barriers[barrier] = {arrivals, arrivals, 0, 0}; }
static void publish_barriers() {}
static void await(u32 barrier, u32 phase) { while (barriers.at(barrier).phase == phase) pass(); }
static void expect(u32 barrier, int bytes) {
    Arrivals& b = barriers.at(barrier);
    b.bytes += bytes, b.left--;
    settle_barrier(b);
}
static void arrive(u32 barrier) {
    Arrivals& b = barriers.at(barrier);
    if (--b.left < 0) fprintf(stderr, "too many arrivals\n"), abort();
    settle_barrier(b);
}
static void copy(u32 to, const Map& map, int k, int row, u32 barrier) {
    Matrix m;
    memcpy(&m, &map, sizeof m);
    for (int r = 0; r < m.box; r++)
        for (int i = 0; i < STEP; i++) {
            unsigned short v = 0;
            if (row + r < m.rows && k + i < m.inner) v = m.data[(row + r) * (m.stride / 2) + k + i];
            memcpy(&shared[swizzled(to + r * 128 + i * 2)], &v, 2);
        }
    Arrivals& b = barriers.at(barrier);
    b.bytes -= m.box * STEP * 2;
    settle_barrier(b);
}
static void put(u32 address, float a, float b, float c, float d) {
    float4 v = {a, b, c, d};
    memcpy(&shared[address], &v, 16);
}
static float4 fetch(u32 address, int block) {
    float4 v;
    memcpy(&v, &memories[block][address], 16);
    return v;
}
static u32 packed(float low, float high) { return narrow(low) | narrow(high) << 16; }
static float widened(unsigned short v) { return wide(v); }
static float sigmoid(float v) { return 1.0f / (1.0f + std::exp2(-v * 1.4426950408889634f)); }
static void let_next_begin() {}
static void await_previous() {}
static int given_up[PARTS];  // registers of a block that no thread has
static void give_registers() { given_up[blockIdx.x % PARTS] += REGISTERS - FEW_REGISTERS, moved = true; }
static void take_registers() {
    int& free = given_up[blockIdx.x % PARTS];
    while (free < MANY_REGISTERS - REGISTERS) pass();
    free -= MANY_REGISTERS - REGISTERS, moved = true;
}

extern "C" void ordered_gemm(const Arguments a);

static Arguments given;
static void run_fiber() {
    unsigned which = self();
    if (!_setjmp(fiber[which])) _longjmp(scheduler, 1);
    ordered_gemm(given);
    ended[which] = moved = true;
    _longjmp(scheduler, 1);
}

// Runs one cluster after another, whose shared memory holds NaN; false if its threads wait for one another for ever.
extern "C" bool emulate(unsigned grid, unsigned block_threads, const void* arguments) {
    static char* stacks = static_cast<char*>(malloc(size_t(MOST) * STACK));
    memcpy(&given, arguments, sizeof given);
    threads = block_threads;
    gridDim.x = grid;
    const unsigned fibers = threads * PARTS;
    for (unsigned first = 0; first < grid; first += PARTS) {
        memset(memories, 0xFF, sizeof memories);
        memset(given_up, 0, sizeof given_up);
        auto turn = [&](unsigned i) { threadIdx.x = i % threads, blockIdx.x = first + i / threads; };
        ucontext_t begin, back;
        for (unsigned i = 0; i < fibers; i++) {
            turn(i);
            ended[i] = false;
            getcontext(&begin);
            begin.uc_stack.ss_sp = stacks + size_t(i) * STACK;
            begin.uc_stack.ss_size = STACK;
            begin.uc_link = nullptr;
            makecontext(&begin, run_fiber, 0);
            if (!_setjmp(scheduler)) swapcontext(&back, &begin);
        }
        for (bool all = false; !all;) {
            all = true, moved = false;
            for (unsigned i = 0; i < fibers; i++) {
                if (ended[i]) continue;
                all = false;
                turn(i);
                if (!_setjmp(scheduler)) _longjmp(fiber[i], 1);
            }
            if (!all && !moved) return false;
        }
    }
    return true;
}
