// What all kernels share: element types, packs of elements that are loaded at once, sums and maxima over a block.
//
// ELEMENT is float, double, Half or Bfloat16; numbers are computed in W, which is float for all but double. PACK is how
// many elements a load or store moves: 16 bytes of them, or 1 where addresses or lengths do not allow that.

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

struct Half { unsigned short bits; };
struct Bfloat16 { unsigned short bits; };
template <class E> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };
typedef ELEMENT T;
typedef Wide<T>::type W;
#ifndef RESULT
#define RESULT ELEMENT
#endif
typedef RESULT R;  // what some kernels write, or read the gradient of: half precision beside float32

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(Bfloat16 x) {
    union { unsigned int bits; float number; } u;
    u.bits = (unsigned int)x.bits << 16;
    return u.number;
}
__device__ inline void narrow(float x, float& out) { out = x; }
__device__ inline void narrow(double x, double& out) { out = x; }
__device__ inline void narrow(float x, Bfloat16& out) {  // to the nearest, ties to even
    union { unsigned int bits; float number; } u;
    u.number = x;
    unsigned int rounded = (u.bits + 0x7fffu + (u.bits >> 16 & 1u)) >> 16;
    out.bits = (unsigned short)(x == x ? rounded : 0x7fc0u);
}
#ifdef SHIM
inline float widen(Half x) { _Float16 h; std::memcpy(&h, &x, 2); return (float)h; }
inline void narrow(float x, Half& out) { _Float16 h = (_Float16)x; std::memcpy(&out, &h, 2); }
#else
__device__ inline float widen(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline void narrow(float x, Half& out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
#endif

template <int N, class E = T> struct alignas(N * sizeof(E)) Pack { E at[N]; };

template <int N, class E> __device__ inline void load(const E* from, W (&to)[N]) {
    Pack<N, E> pack = *reinterpret_cast<const Pack<N, E>*>(from);
    for (int k = 0; k < N; k++) to[k] = widen(pack.at[k]);
}
template <int N, class E> __device__ inline void store(const W (&from)[N], E* to) {
    Pack<N, E> pack;
    for (int k = 0; k < N; k++) narrow(from[k], pack.at[k]);
    *reinterpret_cast<Pack<N, E>*>(to) = pack;
}

// The sum over the threads of a block, in the same order at every launch; all threads get it.
template <class V> __device__ inline V block_sum(V value) {
    __shared__ V of_warp[32];
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : V(0);
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    __syncthreads();
    return value;
}
template <class V> __device__ inline V block_max(V value) {
    __shared__ V of_warp[32];
    for (int apart = 16; apart; apart /= 2) value = max(value, __shfl_xor_sync(~0u, value, apart));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[threadIdx.x % 32 < blockDim.x / 32 ? threadIdx.x % 32 : 0];
    for (int apart = 16; apart; apart /= 2) value = max(value, __shfl_xor_sync(~0u, value, apart));
    __syncthreads();
    return value;
}

// A mean of squares above LOWEST has lost no digit that counts; an inverse between 1 / LIMIT and LIMIT has a cube.
#define LOWEST (sizeof(W) == 4 ? W(1e-31) : W(1e-292))
#define LARGEST_POWER (sizeof(W) == 4 ? W(8.507059173023462e37) : W(4.49423283715579e307))  // a power of two
#define LIMIT (sizeof(W) == 4 ? W(4294967296.0) : W(1e77))

// The elements that a thread takes of a row: packs, blockDim.x of them apart.
#define FOR_PACKS(c, width) for (long long c = (long long)threadIdx.x * PACK; c < (width); c += (long long)blockDim.x * PACK)
#define FOR_LANES(k) for (int k = 0; k < PACK; k++)

// All elements, each thread a pack.
#define FOR_ALL(c, size) \
    for (long long c = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * PACK; c < (size); \
         c += (long long)gridDim.x * blockDim.x * PACK)

__device__ inline W logistic(W x) {  // by e^-|x|, which doesn't overflow: far below 0 it is e^x
    W e = exp(-fabs(x));
    return (x < 0 ? e : W(1)) / (1 + e);
}
__device__ inline W silu_slope(W x, W s) { return s * (1 + x * logistic(-x)); }  // 1 - s would be rounded

// The maximum of a row, 0 where it has none that is finite, and Σ e^(x - maximum), for all threads of the block.
__device__ inline void row_total(const T* x, long long width, W& shift, W& total) {
    W top = -INFINITY, sum = 0;
    FOR_PACKS(c, width) {
        W v[PACK], local = top;
        load(x + c, v);
        FOR_LANES(k) local = max(local, v[k]);
        if (local > top) {
            sum *= exp(top - local);
            top = local;
        }
        if (isfinite(top)) FOR_LANES(k) sum += exp(v[k] - top);
    }
    shift = block_max(top);
    if (!isfinite(shift)) shift = 0;
    total = block_sum(top == INFINITY ? top : isfinite(top) ? sum * exp(top - shift) : sum);
}

// Whether dropout keeps a number: a hash of (seed, row, column), of which `key` is the row's part; the same bits as
// `dropout_mask` in attention_tiles.py.
__device__ inline unsigned int row_key(unsigned long long row, unsigned long long seed) {
    unsigned long long key = (row + seed) * 0x9E3779B97F4A7C15ull;
    return (unsigned int)(((key ^ key >> 32) * 0xD6E8FEB86659FD93ull) >> 32);
}
// A seed is a number, or lies on the device, where a CUDA graph finds another one at each replay.
__device__ inline unsigned long long seed_of(unsigned long long seed, const unsigned long long* place) {
    return place ? *place : seed;
}
__device__ inline bool kept(unsigned int key, unsigned int column, unsigned int limit) {
    unsigned int h = key ^ column * 0x9E3779B9u;
    h = (h ^ h >> 16) * 0x7FEB352Du;
    h = (h ^ h >> 15) * 0x846CA68Bu;
    return (h ^ h >> 16) >= limit;
}
