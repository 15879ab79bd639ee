// Collective operations of ranks: every rank writes its part to its own buffer, which the other ranks have mapped, sets
// flags at all ranks, waits for the flags of all, and reads. Each is one kernel, which a CUDA graph can contain.
//
// A sum is one-shot if it is small or there are two ranks: each rank reads all parts. Otherwise it is two-shot: each
// rank adds up a share of the elements, signals the others, and reads their shares, which moves 2 (N - 1) / N times the
// bytes over a link instead of N - 1 times. Both add in the same order, so both give the same bits.
//
// A buffer is [ranks][BLOCKS] flags, then twice `capacity` bytes. Calls use the two halves in turn: a rank that starts
// call n + 2 has in call n + 1 received flags of all other ranks, which had completed call n by then.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int MOST_RANKS = 8;
constexpr int BLOCKS = 64;      // maximum number of blocks of threads per call
constexpr int LOOKS = 256;      // reads of a flag between two reads of the clock and of `stop`
constexpr u64 SECONDS = 120;    // timeout of waiting for the other ranks

struct Arguments {
    u8* x;                   // this rank's part, `bytes` long; sums are written over it
    u8* out;                 // gather: destination of the parts at rank 0, `stride` bytes apart
    u8* buffers[MOST_RANKS]; // buffers of all ranks, as mapped by this one
    u32* state;              // number of completed calls, number of completed blocks of the current call
    u64* totals;             // nanoseconds that block 0 waited for the next rank, bytes contributed
    volatile u64* told;      // in host memory: number of calls, and those totals
    volatile u32* stop;      // in host memory: not 0 once a rank is lost
    u64 bytes, capacity, stride;
    int rank, size;
    int shots;               // 1 or 2 for one-shot or two-shot sums
};

__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ void tell(u32* flag, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ u32 look(const u32* flag) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

__device__ u8* data(const Arguments& a, int rank, u32 call) {
    return a.buffers[rank] + (u64)a.size * BLOCKS * sizeof(u32) + (call & 1) * a.capacity;
}

// Signals all ranks that this block's part is ready, and waits for theirs; `round`: 1 for a call's second time, else 0.
__device__ void meet(const Arguments& a, u32 call, u32 round = 0) {
    const u32 told = 2 * call + round;
    __syncthreads();
    if (threadIdx.x < a.size) {
        __threadfence_system();
        const u64 begun = nanoseconds();
        tell((u32*)a.buffers[threadIdx.x] + a.rank * BLOCKS + blockIdx.x, told);
        const u32* theirs = (u32*)a.buffers[a.rank] + threadIdx.x * BLOCKS + blockIdx.x;
        for (u32 looks = 1; (int)(look(theirs) - told) < 0; looks++) {
            if (looks % LOOKS != 0) continue;
            if (nanoseconds() - begun > SECONDS * 1000000000ull) *a.stop = 1;
            if (*a.stop != 0) break;
        }
        const u64 waited = nanoseconds() - begun;
        if (blockIdx.x == 0 && threadIdx.x == (a.rank + 1) % a.size) a.totals[0] += waited;
    }
    __syncthreads();
}

// Completes a call: its last block counts the call.
__device__ void end(const Arguments& a, u32 call) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(a.state + 1, 1) != gridDim.x - 1) return;
    a.state[1] = 0;
    a.state[0] = call;
    a.totals[1] += a.bytes;
    a.told[0] = call;
    for (int i = 0; i < 2; i++) a.told[1 + i] = ((volatile u64*)a.totals)[i];
}


// Copies a run of bytes with all threads of all blocks; both addresses are multiples of 16.
__device__ void copy(u8* into, const u8* from, u64 bytes) {
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    for (u64 i = first; i < bytes / 16; i += step)
        ((uint4*)into)[i] = __ldcg((const uint4*)from + i);
    for (u64 i = bytes / 16 * 16 + first; i < bytes; i += step) into[i] = *(const volatile u8*)(from + i);
}

struct Bfloat {
    using Stored = u16;
    static __device__ float wide(u16 v) { return __uint_as_float((u32)v << 16); }
    static __device__ u16 narrow(float v) {
        u16 out;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
        return out;
    }
};

struct Half {
    using Stored = u16;
    static __device__ float wide(u16 v) {
        float out;
        asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v));
        return out;
    }
    static __device__ u16 narrow(float v) {
        u16 out;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
        return out;
    }
};

struct Single {
    using Stored = float;
    static __device__ float wide(float v) { return v; }
    static __device__ float narrow(float v) { return v; }
};

// Returns sixteen bytes of the sum: the parts are added in float32 from rank 0 on, and rounded once.
template <class Type>
__device__ uint4 added(const Arguments& a, u32 call, u64 i) {
    using Stored = typename Type::Stored;
    constexpr int WIDTH = 16 / sizeof(Stored);
    float total[WIDTH];
    for (int rank = 0; rank < a.size; rank++) {
        uint4 words = __ldcg((const uint4*)data(a, rank, call) + i);
        Stored part[WIDTH];
        memcpy(part, &words, 16);
        for (int j = 0; j < WIDTH; j++) total[j] = rank == 0 ? Type::wide(part[j]) : total[j] + Type::wide(part[j]);
    }
    Stored rounded[WIDTH];
    for (int j = 0; j < WIDTH; j++) rounded[j] = Type::narrow(total[j]);
    uint4 words;
    memcpy(&words, rounded, 16);
    return words;
}

template <class Type>
__device__ void sum(const Arguments& a) {
    using Stored = typename Type::Stored;
    constexpr int WIDTH = 16 / sizeof(Stored);
    const u32 call = a.state[0] + 1;
    copy(data(a, a.rank, call), a.x, a.bytes);
    meet(a, call);
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    if (a.shots == 1) {
        for (u64 i = first; i < a.bytes / 16; i += step) ((uint4*)a.x)[i] = added<Type>(a, call, i);
    } else {
        // Strides of the grid belong to the ranks in turn. No other rank reads this rank's part of its own strides, so
        // the sum overwrites it.
        for (u64 i = first + a.rank * step; i < a.bytes / 16; i += step * a.size)
            ((uint4*)data(a, a.rank, call))[i] = added<Type>(a, call, i);
        meet(a, call, 1);
        int owner = 0;
        for (u64 i = first; i < a.bytes / 16; i += step) {
            ((uint4*)a.x)[i] = __ldcg((const uint4*)data(a, owner, call) + i);
            owner = owner + 1 == a.size ? 0 : owner + 1;
        }
    }
    // Every rank adds the last bytes, fewer than sixteen.
    for (u64 i = a.bytes / 16 * WIDTH + first; i < a.bytes / sizeof(Stored); i += step) {
        float total = 0;
        for (int rank = 0; rank < a.size; rank++) {
            const float part = Type::wide(((const volatile Stored*)data(a, rank, call))[i]);
            total = rank == 0 ? part : total + part;
        }
        ((Stored*)a.x)[i] = Type::narrow(total);
    }
    end(a, call);
}

extern "C" __global__ void sum_bfloat16(const __grid_constant__ Arguments a) { sum<Bfloat>(a); }
extern "C" __global__ void sum_float16(const __grid_constant__ Arguments a) { sum<Half>(a); }
extern "C" __global__ void sum_float32(const __grid_constant__ Arguments a) { sum<Single>(a); }

// Copies all parts to rank 0, one after another.
extern "C" __global__ void gather(const __grid_constant__ Arguments a) {
    const u32 call = a.state[0] + 1;
    copy(data(a, a.rank, call), a.x, a.bytes);
    meet(a, call);
    for (int rank = 0; a.rank == 0 && rank < a.size; rank++)
        copy(a.out + rank * a.stride, data(a, rank, call), a.bytes);
    end(a, call);
}

// Copies the part of rank 0 to all ranks.
extern "C" __global__ void broadcast(const __grid_constant__ Arguments a) {
    const u32 call = a.state[0] + 1;
    if (a.rank == 0) copy(data(a, 0, call), a.x, a.bytes);
    meet(a, call);
    if (a.rank != 0) copy(a.x, data(a, 0, call), a.bytes);
    end(a, call);
}
