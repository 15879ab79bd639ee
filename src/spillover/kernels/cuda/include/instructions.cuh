// Names of types, and instructions without names in CUDA C++; tests/support/kernels/emulated_cuda.cpp emulates them.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__
#ifdef SUMS
enum { E4M3, BFLOAT16, FLOAT16 };  // element types of operands that are both in shared memory
#endif
#if defined(EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WGMMA true
#else
#define WGMMA false
#endif

#ifndef EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) u8 name[]
DEV void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEV void wait_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
template <bool BF16>
DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Loads four matrices of 8 rows by 16 bytes; each lane passes the address of one row.
DEV uint4 load_matrices(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
// The same, with each matrix of 16-bit elements transposed.
DEV uint4 load_transposed(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
DEV uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
DEV u32 load_shared_word(u32 at) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); return v; }
DEV u32 load_shared_byte(u32 at) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); return v; }
DEV u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEV u32 hsub2(u32 a, u32 b) { u32 d; asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEV u32 fma_half2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEV u32 fma_bf16x2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
// Converts four e4m3 codes to float16: `low` is the first two, `high` the last two.
DEV void halves_of_fp8(u32& low, u32& high, u32 v) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(v));
#else  // codes moved to float16's sign, exponent and mantissa have 2**-8 of their value
    u32 a = __byte_perm(v, 0, 0x1404), b = __byte_perm(v, 0, 0x3424);
    low = hmul2((a & 0x80008000u) | ((a >> 1) & 0x3F803F80u), 0x5C005C00u);
    high = hmul2((b & 0x80008000u) | ((b >> 1) & 0x3F803F80u), 0x5C005C00u);
#endif
}
DEV float from_half(u32 v) { float d; asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"((u16)v)); return d; }
DEV u32 to_half2(float low, float high) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }
DEV u32 to_bf16x2(float low, float high) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }
DEV float power_of_two(float v) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
// The same, but volatile: the compiler keeps the order in which these are written.
DEV float power_in_order(float v) { float d; asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
// Keeps the code after it from being moved before it: compilers move instructions only within straight code, and this
// is a branch, which is never taken.
DEV void part_ways(bool never) { if (__any_sync(~0u, never)) asm volatile("nanosleep.u32 0;" ::: "memory"); }
DEV float near_inverse(float v) { float d; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
DEV float inverse_root(float v) { float d; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
// Divides as Triton does.
DEV float divided(float a, float b) { float d; asm("div.full.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
DEV float fast_exp(float v) { return power_of_two(v * 1.4426950408889634f); }
// The operations that Triton uses for a sigmoid, as few rows of a gated product are computed by a Triton kernel.
DEV float sigmoid(float v) {
    float d;
    asm("{.reg .f32 t; sub.f32 t, 0f00000000, %1; mul.f32 t, t, 0f3FB8AA3B; ex2.approx.f32 t, t; add.f32 t, t, 0f3F800000; "
        "div.full.f32 %0, 0f3F800000, t;}" : "=f"(d) : "f"(v));
    return d;
}
// Tells the compiler that a number is the same in all lanes of a warp, so that values derived from it are kept once.
DEV int uniform(int v) { return __shfl_sync(~0u, v, 0); }
DEV u32 clock_now() { u32 v; asm volatile("mov.u32 %0, %clock;" : "=r"(v) :: "memory"); return v; }
DEV void pause(u32 clocks) { for (u32 begun = clock_now(); clock_now() - begun < clocks;); }
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void copy_async(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory"); }
DEV void copy_async_or_zeros(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEV void copy_word_async(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory"); }
DEV void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEV void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
// Loads what other kernels wrote, bypassing the cache of this multiprocessor.
DEV int load_fresh(const int* p) { int v; asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV int count_up(int* p) { int v; asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory"); return v; }
// Barriers in shared memory, 8 bytes each, at which threads and bulk copies arrive; a phase is 0, the next one 1, ...
DEV void make_barrier(u32 at, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(arrivals) : "memory"); }
DEV void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); }
DEV void expect(u32 at, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory"); }
DEV void await(u32 at, u32 phase) {
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(at), "r"(phase) : "memory");
}
// Copies a range of memory; addresses and size are multiples of 16 bytes.
DEV void copy_range(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
struct alignas(64) Map { char bytes[128]; };  // a CUtensorMap
// Copies a box of a tensor of three dimensions that begins at (0, row, layer).
DEV void copy_box(u32 to, const Map& map, int row, int layer, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(to), "l"(&map), "r"(0), "r"(row), "r"(layer), "r"(barrier) : "memory");
}
// Copies a box of a matrix that begins at (column, row).
DEV void copy_tile(u32 to, const Map& map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
// Copies a box of a tensor of four dimensions that begins at (column, 0, 0, group).
DEV void copy_groups(u32 to, const Map& map, int column, int group, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(0), "r"(group), "r"(barrier) : "memory");
}
// Clusters of blocks: a barrier of all threads that have not exited, and a read of another block's shared memory.
DEV void meet_cluster() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
// The same barrier, without making what was written visible to other blocks.
DEV void leave_cluster() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory"); }
DEV float4 fetch(u32 at, int block) {
    float4 v;
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(block) : "memory");
    return v;
}
DEV void put(u32 at, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// Converts two numbers to e4m3, saturating.
DEV u32 to_fp8x2(float low, float high) { u16 d; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low)); return d; }
// Transposes a matrix of 8 x 8 elements of 16 bits, of which lane 4 g + t has elements 2 t and 2 t + 1 of row g.
DEV u32 transposed(u32 v) { u32 d; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v)); return d; }
DEV u32 and_or(u32 a, u32 b, u32 c) { u32 d; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEV u32 kept(u32 v) { asm volatile("" : "+r"(v)); return v; }  // keeps a value in a register: not recomputed
DEV void sync_warpgroup() { asm volatile("bar.sync %0, 128;" :: "r"((int)threadIdx.x / 128 + 2) : "memory"); }
template <int THREADS> DEV void sync_first() { asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory"); }  // first THREADS
DEV float* in_memory(float* p) { asm volatile("" : "+l"(p) :: "memory"); return p; }  // keeps *p out of registers
template <int REGISTERS> DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
template <int REGISTERS> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
DEV void shared_is_ready() { if (WGMMA) asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }
#define C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define C16(n) C4(n), C4(n + 1), C4(n + 2), C4(n + 3)
#define D16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h ",%" #i ",%" #j ",%" #k ",%" #l ",%" #m ",%" #n ",%" #o ",%" #p
#define WGMMA_OF(N, TYPE, ORDER, D, A0, A1, A2, A3, B, MORE, ...) \
    asm volatile("{.reg .pred more; setp.ne.b32 more, %" #MORE ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D \
                 "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", more, 1, 1, " ORDER ";}" \
                 : __VA_ARGS__ : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(more))
#define D32 D16(0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15) "," D16(16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31)
#define D64 D32 "," D16(32,33,34,35,36,37,38,39,40,41,42,43,44,45,46,47) "," D16(48,49,50,51,52,53,54,55,56,57,58,59,60,61,62,63)
#define WGMMA_TYPE(TYPE, ORDER) \
    if constexpr (NT == 4) WGMMA_OF(32, TYPE, ORDER, D16(0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15), 16, 17, 18, 19, 20, 21, C16(0)); \
    else if constexpr (NT == 8) WGMMA_OF(64, TYPE, ORDER, D32, 32, 33, 34, 35, 36, 37, C16(0), C16(4)); \
    else WGMMA_OF(128, TYPE, ORDER, D64, 64, 65, 66, 67, 68, 69, C16(0), C16(4), C16(8), C16(12))
// c = a b, or with `more` c += a b: a warpgroup's 64 rows by 8 NT tokens, in the order of mma's registers. A row of b
// in shared memory is a token or, with BY_INPUTS, one input of all tokens.
template <bool BF16, int NT, bool BY_INPUTS = false>
DEV void wgmma(float (&c)[NT][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
    if constexpr (BY_INPUTS && BF16) { WGMMA_TYPE("bf16", "1"); }
    else if constexpr (BY_INPUTS) { WGMMA_TYPE("f16", "1"); }
    else if constexpr (BF16) { WGMMA_TYPE("bf16", "0"); }
    else { WGMMA_TYPE("f16", "0"); }
}
// The same for 64 tokens, with a in shared memory too.
template <bool BF16>
DEV void wgmma(float (&c)[8][4], u64 a, u64 b, int more) {
#define WGMMA_SHARED(TYPE) \
    asm volatile("{.reg .pred more; setp.ne.b32 more, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" D32 \
                 "}, %32, %33, more, 1, 1, 0, 0;}" : C16(0), C16(4) : "l"(a), "l"(b), "r"(more))
    if constexpr (BF16) { WGMMA_SHARED("bf16"); } else { WGMMA_SHARED("f16"); }
}
template <int NT>
DEV void wgmma_ends(float (&c)[NT][4]) {  // waits, and keeps reads of the sums after the wait
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < NT; n++) asm volatile("" : C4(n) :: "memory");
}
// The descriptor of swizzled rows of 128 bytes in shared memory, in groups of 8 rows; adding 2 advances it by 32 bytes.
DEV u64 tile_operand(u32 at) { return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | (at & 0x3FFFF) >> 4; }
// The same with rows by inputs: the next 64 tokens are `apart` bytes further; adding 128 advances it by 16 inputs.
DEV u64 rows_operand(u32 at, int apart) { return tile_operand(at) & ~((u64)0x3FFF << 16) | (u64)(apart / 16) << 16; }
#ifdef SUMS  // number of sums of a thread in a product of 64 rows by WIDTH; NAMES and VALUES: the sums as operands
#define TEXT_(...) #__VA_ARGS__
#define TEXT(...) TEXT_(__VA_ARGS__)
#define COMMA ,  // for options, which may not contain a comma
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PRODUCT(TYPE, INPUTS, ORDERS) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" TEXT(SUMS_2) ", 0; wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH) "k" INPUTS ".f32." TYPE "." TYPE \
                 " {" TEXT(NAMES) "}, %" TEXT(SUMS) ", %" TEXT(SUMS_1) ", p, 1, 1" ORDERS ";}" : VALUES : "l"(a), "l"(b), "r"(add))
// d = a b' over 32 bytes of each row, or with `add` d += a b'.
template <int TYPE>
DEV void multiply(float (&d)[SUMS], u64 a, u64 b, int add) {
    if constexpr (TYPE == E4M3) PRODUCT("e4m3", "32", "");
    else if constexpr (TYPE == BFLOAT16) PRODUCT("bf16", "16", ", 0, 0");
    else PRODUCT("f16", "16", ", 0, 0");
}
// Keeps reads of the sums after the wait for them.
DEV void settle(float (&d)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(d[i])::"memory");
}
#endif
#endif

#ifndef EMULATED
template <int NT>
DEV void wgmma_settle(float (&c)[NT][4]) {  // keeps reads of the sums after the wait for them
#pragma unroll
    for (int n = 0; n < NT; n++) asm volatile("" : C4(n) :: "memory");
}
#endif
