// Enough of CUDA to run a kernel on the CPU. Blocks run one after the other; the threads of a block are fibers that
// take turns at each barrier, in ascending or descending order: a missing barrier makes the two differ.
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
    bool begun, done, made;
};
static const size_t STACK = 1 << 16;
static std::vector<Fiber> fibers;
static char* stacks;  // of all fibers; memory is used only as far as they are written to
static jmp_buf scheduler;
static unsigned current, alive;
static const std::function<void()>* body;
static uint64_t lanes[1024];     // what each thread of the block hands to its warp
static unsigned arrived[1024];   // how many barriers each thread has passed

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
// Give the other threads their turn; this one goes on once all have come to a barrier.
static void yield() {
    arrived[current]++;
    if (!_setjmp(fibers[current].resume)) _longjmp(scheduler, 1);
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
    for (volatile unsigned left = count; left;) {
        volatile unsigned barriers = 0, met = 0;
        for (volatile unsigned k = 0; k < count; k++) {
            volatile unsigned t = order ? count - 1 - k : k;
            Fiber& f = fibers[t];
            if (f.done) continue;
            place(t);
            if (!_setjmp(scheduler)) {
                if (f.begun) _longjmp(f.resume, 1);
                f.begun = true;
                setcontext(&f.start);
            }
            if (fibers[t].done) {
                left = left - 1;
            } else {
                if (!met) barriers = arrived[t];
                met = 1;
                if (arrived[t] != barriers) {
                    fprintf(stderr, "a barrier that not all threads reach\n");
                    abort();
                }
            }
        }
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
    yield();
    V got;
    std::memcpy(&got, &lanes[from], sizeof(V));
    yield();
    return got;
}
}  // namespace shim

static inline void __syncthreads() { shim::yield(); }
static inline int __syncthreads_or(int value) {
    std::memcpy(&shim::lanes[shim::current], &value, sizeof(int));
    shim::yield();
    int any = 0, one;
    for (unsigned t = 0; t < blockDim.x; t++) {
        std::memcpy(&one, &shim::lanes[t], sizeof(int));
        any |= one;
    }
    shim::yield();
    return any;
}
static inline void __syncwarp(unsigned = ~0u) { shim::yield(); }
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
