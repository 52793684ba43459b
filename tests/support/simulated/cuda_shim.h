// Enough of CUDA to run a kernel on the CPU. Blocks run one after the other; the threads of a block are fibers. A warp
// runs to the next barrier of the block before another does, in ascending or descending order: a missing barrier makes
// the two differ. The lanes of a warp take turns where they exchange something.
// It shows that a kernel computes what it should, not that it is fast, nor that a warp in lockstep does the same.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __constant__ static
#define __restrict__
#define __launch_bounds__(...)
#define SHIM 1

struct dim3 { unsigned x, y, z; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
static const int warpSize = 32;

namespace shim {
struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool begun, done, made, at_barrier;  // of the block, or where its warp exchanges something
};
static const size_t STACK = 1 << 16;
static std::vector<Fiber> fibers;
static char* stacks;  // of all fibers; memory is used only as far as they are written to
static jmp_buf scheduler;
static unsigned current, alive;
static const std::function<void()>* body;
static uint64_t lanes[1024];     // what each thread of the block hands to its warp
static unsigned arrived[1024];   // how often each thread has given others their turn

static void place(unsigned t) {
    current = t;
    threadIdx.x = t % blockDim.x;
    threadIdx.y = t / blockDim.x % blockDim.y;
    threadIdx.z = t / (blockDim.x * blockDim.y);
}
// A fiber runs one thread after another: its stack is made once.
static void enter() {
    for (;;) {
        (*body)();
        fibers[current].done = true;
        if (!_setjmp(fibers[current].resume)) _longjmp(scheduler, 1);
    }
}
// Give others their turn; this thread goes on once all of its block, or of its warp, have come here.
static void yield(bool barrier) {
    arrived[current]++;
    fibers[current].at_barrier = barrier;
    if (!_setjmp(fibers[current].resume)) _longjmp(scheduler, 1);
}
// Run the threads of a warp until they end or come to a barrier of the block; whether they have ended.
static bool to_barrier(unsigned first, unsigned count, int order) {
    const unsigned lanes = std::min(32u, count - first);
    for (;;) {
        volatile unsigned waiting = 0, exchanging = 0;
        for (volatile unsigned k = 0; k < lanes; k = k + 1) {
            volatile unsigned t = first + (order ? lanes - 1 - k : k);
            Fiber& f = fibers[t];
            if (f.done) continue;
            place(t);
            if (!_setjmp(scheduler)) {
                if (f.begun) _longjmp(f.resume, 1);
                f.begun = true;
                setcontext(&f.start);
            }
            if (fibers[t].done) continue;
            if (fibers[t].at_barrier) waiting = waiting + 1;
            else exchanging = exchanging + 1;
        }
        if (waiting && exchanging) {
            fprintf(stderr, "a barrier that not all threads reach\n");
            abort();
        }
        if (!exchanging) return !waiting;
    }
}
static void block(unsigned count, int order) {
    if (fibers.empty()) {
        fibers.resize(1024);  // and never moved
        stacks = (char*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stacks == MAP_FAILED) abort();
    }
    for (unsigned t = 0; t < count; t++) {
        Fiber& f = fibers[t];
        f.done = false;
        arrived[t] = 0;
        if (f.made) continue;
        f.made = true;
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = stacks + t * STACK;
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = nullptr;
        makecontext(&f.start, enter, 0);
        f.begun = false;
    }
    const unsigned warps = (count + 31) / 32;
    for (volatile bool all_done = false; !all_done;) {
        all_done = true;
        for (volatile unsigned w = 0; w < warps; w = w + 1)
            if (!to_barrier((order ? warps - 1 - w : w) * 32, count, order)) all_done = false;
    }
}
// CuPy compiles with -ftz=true: a float32 that is no normal number counts as 0, where a kernel computes in float32.
struct Flushed {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    explicit Flushed(bool flush) { if (flush) _mm_setcsr(before | 0x8040); }
    ~Flushed() { _mm_setcsr(before); }
#else
    explicit Flushed(bool) {}
#endif
};
static void launch(const unsigned* shape, int order, bool flush, const std::function<void()>& run) {
    Flushed flushed(flush);
    body = &run;
    gridDim = {shape[0], shape[1], shape[2]};
    blockDim = {shape[3], shape[4], shape[5]};
    for (unsigned z = 0; z < gridDim.z; z++)
        for (unsigned y = 0; y < gridDim.y; y++)
            for (unsigned x = 0; x < gridDim.x; x++) {
                blockIdx = {x, y, z};
                block(blockDim.x * blockDim.y * blockDim.z, order);
            }
}
template <class V> V exchange(V value, unsigned from) {
    static_assert(sizeof(V) <= 8, "");
    std::memcpy(&lanes[current], &value, sizeof(V));
    yield(false);
    V got;
    std::memcpy(&got, &lanes[from], sizeof(V));
    yield(false);
    return got;
}

// What a lane hands to its warp at a product or a load of matrices. There are two of each, in turn: who hands over the
// next has read what he needs of the one before last.
struct Handed { float x[8], y[4]; const void* line; };
static Handed handed[2][1024];
static const Handed* hand_over(const Handed& mine) {
    unsigned turn = arrived[current] % 2;
    handed[turn][current] = mine;
    yield(false);
    return handed[turn] + (current & ~31u);
}
// mma.sync.m16n8k16 with fragments as the manual of PTX lays them out: see tensor_cores.cuh.
template <class Widen>
void mma(float (&sum)[4], const unsigned (&x)[4], unsigned y0, unsigned y1, Widen widen) {
    Handed mine;
    for (int i = 0; i < 8; i++) mine.x[i] = widen((unsigned short)(x[i / 2] >> i % 2 * 16));
    for (int i = 0; i < 4; i++) mine.y[i] = widen((unsigned short)((i / 2 ? y1 : y0) >> i % 2 * 16));
    const Handed* warp = hand_over(mine);
    unsigned g = current % 32 / 4, t = current % 4;
    for (unsigned e = 0; e < 4; e++)
        for (unsigned k = 0; k < 16; k++)
            sum[e] += warp[4 * g + k % 8 / 2].x[k / 8 * 4 + e / 2 * 2 + k % 2] *
                      warp[4 * (2 * t + e % 2) + k % 8 / 2].y[k / 8 * 2 + k % 2];
}
// ldmatrix.x4: lane 8m + r names line r of matrix m, each of eight 16-bit elements.
static void load_matrices(bool transposed, const void* line, unsigned (&to)[4]) {
    if ((uintptr_t)line % 16) {
        fprintf(stderr, "ldmatrix at an address that is no multiple of 16\n");
        abort();
    }
    Handed mine;
    mine.line = line;
    const Handed* warp = hand_over(mine);
    unsigned g = current % 32 / 4, t = current % 4;
    for (unsigned m = 0; m < 4; m++) {
        unsigned short pair[2];
        for (unsigned k = 0; k < 2; k++) {
            unsigned row = transposed ? 2 * t + k : g, column = transposed ? g : 2 * t + k;
            pair[k] = ((const unsigned short*)warp[8 * m + row].line)[column];
        }
        to[m] = pair[0] | (unsigned)pair[1] << 16;
    }
}
}  // namespace shim

static inline void __syncthreads() { shim::yield(true); }
static inline int atomicMax(int* place, int value) {
    int before = *place;
    *place = std::max(before, value);
    return before;
}
static inline int __syncthreads_or(int value) {
    std::memcpy(&shim::lanes[shim::current], &value, sizeof(int));
    shim::yield(true);
    int any = 0, one;
    for (unsigned t = 0; t < blockDim.x; t++) {
        std::memcpy(&one, &shim::lanes[t], sizeof(int));
        any |= one;
    }
    shim::yield(true);
    return any;
}
static inline void __syncwarp(unsigned = ~0u) { shim::yield(false); }
template <class V> V __shfl_xor_sync(unsigned, V value, int mask, int = 32) {
    return shim::exchange(value, shim::current ^ (unsigned)mask);
}
template <class V> V __shfl_sync(unsigned, V value, int lane, int = 32) {
    return shim::exchange(value, (shim::current & ~31u) + (unsigned)lane % 32);
}

template <class V> V max(V a, V b) { return a > b ? a : b; }
template <class V> V min(V a, V b) { return a < b ? a : b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrt(float x) { return 1 / std::sqrt(x); }
static inline double rsqrt(double x) { return 1 / std::sqrt(x); }
using std::exp; using std::log; using std::sqrt; using std::fabs; using std::erf; using std::fma; using std::isfinite;
