// What both backward kernels of attention read: D = Σ g · out of each row. A warp takes a row.
#include "attention.cuh"

extern "C" __global__ void attention_row_dots(const Call* given, const T* g, const T* out, float* dots) {
    const Call& call = *given;
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads;
    int i = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const T *up = head_of(g, call.g, n, head) + i * call.g.t, *mean = head_of(out, call.out, n, head) + i * call.out.t;
    float sum = 0;
    if (i < call.queries)
        for (int c = threadIdx.x % 32; c < call.size; c += 32) sum += widen(up[c]) * widen(mean[c]);
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (i < call.queries && threadIdx.x % 32 == 0) dots[blockIdx.x * call.queries + i] = sum;
}
