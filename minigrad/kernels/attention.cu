// Attention of float32 in tiles of ROWS queries and KEYS keys: the scores of a tile live in shared memory alone.
//
// A block of 256 threads takes ROWS queries of one head (or, for dk and dv, KEYS keys of one head). Of a product of tiles
// each thread computes entries 16 rows and 16 columns apart. HEAD, a multiple of 16, is the size of a head in shared
// memory; features from call.size on are 0 there. Rows of shared arrays are one number longer than they need be, so that
// the threads of a warp read from different banks.
#include "attention.cuh"

#define STRIDE (HEAD + 1)
#define SCORES (KEYS + 1)
// The entries (r, c) of a thread, the a-th and b-th of its rows and columns.
#define ENTRIES(rows, columns) \
    UNROLL for (int a = 0, r = threadIdx.x / 16; a < (rows) / 16; a++, r += 16) \
    UNROLL for (int b = 0, c = threadIdx.x % 16; b < (columns) / 16; b++, c += 16)

__device__ inline bool seen(const Call& call, const bool* mask, int i, int j) {
    return i < call.queries && j < call.keys && j >= i - call.left && j <= i + call.right && allowed(call, mask, i, j);
}
// Rows of an array as floats in shared memory, 0 where there is nothing. Whether this thread met a number that is not
// finite.
__device__ inline bool fetch(const T* from, const Place& place, int first, int rows, int total, int size, float* to) {
    bool nonfinite = false;
    for (int i = threadIdx.x; i < rows * (HEAD / 4); i += blockDim.x) {
        int r = i / (HEAD / 4), c = i % (HEAD / 4) * 4;
        const T* source = from + (first + r) * place.t + c;
        float *target = to + r * STRIDE + c, v[4] = {0, 0, 0, 0};
        if (first + r < total) {
            if (PACK > 1 && c + 4 <= size) load(source, v);
            else for (int k = 0; k < 4; k++) if (c + k < size) v[k] = widen(source[k]);
        }
        for (int k = 0; k < 4; k++) nonfinite |= !isfinite(target[k] = v[k]);
    }
    return nonfinite;
}

// sum += x y of tiles in shared memory, entry by entry: x is read at r · xr + k · xk, y at c · yc + k · yk, for k < n.
// CAREFUL: where x is 0 the product is 0, whatever y is. SHRUNK: of SHARE of each factor.
enum Way { PLAIN, CAREFUL, SHRUNK };
template <Way WAY, int A, int B>
__device__ inline void sum_products(const float* x, int xr, int xk, const float* y, int yc, int yk, int n,
                                float (&sum)[A][B]) {
    const float part = WAY == SHRUNK ? SHARE : 1;
    x += threadIdx.x / 16 * xr;
    y += threadIdx.x % 16 * yc;
    for (int k = 0; k < n; k++) {
        float left[A], right[B];
        UNROLL for (int a = 0; a < A; a++) left[a] = x[16 * a * xr + k * xk] * part;
        UNROLL for (int b = 0; b < B; b++) right[b] = y[16 * b * yc + k * yk] * part;
        UNROLL for (int a = 0; a < A; a++)
            UNROLL for (int b = 0; b < B; b++) sum[a][b] += WAY == CAREFUL && left[a] == 0 ? 0 : left[a] * right[b];
    }
}
template <int A, int B>
__device__ inline void multiply(const float* x, int xr, int xk, const float* y, int yc, int yk, int n,
                                float (&sum)[A][B], Way way = PLAIN) {
    if (way == CAREFUL) sum_products<CAREFUL>(x, xr, xk, y, yc, yk, n, sum);
    else if (way == SHRUNK) sum_products<SHRUNK>(x, xr, xk, y, yc, yk, n, sum);
    else sum_products<PLAIN>(x, xr, xk, y, yc, yk, n, sum);
}

extern "C" __global__ void attention_forward(const Call* given, const T* q, const T* k, const T* v, T* out, float* total,
                                   float* shift, float scale, const bool* mask, unsigned long long seed,
                                      const unsigned long long* seeds, unsigned int limit, float share) {
    __shared__ float queries[ROWS * STRIDE], keys[KEYS * STRIDE], weights[ROWS * SCORES];
    __shared__ float top[ROWS], sum[ROWS], fade[ROWS];
    __shared__ int found[ROWS];
    const Call& call = *given;
    const Dropout dropout = {limit, share};
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads, i0 = blockIdx.y * ROWS;
    k = head_of(k, call.k, n, head / call.group);
    v = head_of(v, call.v, n, head / call.group);
    out = head_of(out, call.out, n, head);
    mask = head_of(mask, call.mask, n, head);
    fetch(head_of(q, call.q, n, head), call.q, i0, ROWS, call.queries, call.size, queries);
    for (int r = threadIdx.x; r < ROWS; r += blockDim.x) found[r] = NEAR;
    const Tiles tiles = tiles_of_keys(call, i0);
    for (int far = 0, passes = 1; far < passes; far++) {
        for (int r = threadIdx.x; r < ROWS; r += blockDim.x) {
            top[r] = -INFINITY;
            sum[r] = 0;
        }
        float mean[ROWS / 16][HEAD / 16] = {};
        EACH(tiles, j0, KEYS) {
            fetch(k, call.k, j0, KEYS, call.keys, call.size, keys);
            __syncthreads();
            float scores[ROWS / 16][KEYS / 16] = {};
            multiply(queries, STRIDE, 1, keys, STRIDE, 1, HEAD, scores, far ? SHRUNK : PLAIN);
            ENTRIES(ROWS, KEYS) {
                float score = scores[a][b] * scale;
                bool there = seen(call, mask, i0 + r, j0 + c);
                weights[r * SCORES + c] = there ? score : -INFINITY;
                if (!far && there && distance(score) > NEAR) atomicMax(found + r, distance(score));
            }
            __syncthreads();
            bool nonfinite = fetch(v, call.v, j0, KEYS, call.keys, call.size, keys);
            for (int r = threadIdx.x / 32; r < ROWS; r += blockDim.x / 32) {  // a warp takes a row, a thread a key
                float* place = weights + r * SCORES + threadIdx.x % 32;
                float highest = *place, before = top[r];
                for (int apart = 16; apart; apart /= 2) highest = max(highest, __shfl_xor_sync(~0u, highest, apart));
                highest = max(highest, before);
                float base = highest == -INFINITY ? 0 : highest, weight = expf(difference(*place, base, far));
                float added = weight;
                for (int apart = 16; apart; apart /= 2) added += __shfl_xor_sync(~0u, added, apart);
                unsigned int key = DROPOUT ? row_key(blockIdx.x * call.queries + i0 + r, seed_of(seed, seeds)) : 0;
                *place = weight * factor(dropout, key, j0 + threadIdx.x % 32);
                if (threadIdx.x % 32 == 0) {
                    fade[r] = expf(difference(before, base, far));
                    sum[r] = sum[r] * fade[r] + added;
                    top[r] = highest;
                }
            }
            nonfinite = __syncthreads_or(nonfinite);
            ENTRIES(ROWS, HEAD) mean[a][b] *= fade[r];
            multiply(weights, SCORES, 1, keys, 1, STRIDE, KEYS, mean, nonfinite ? CAREFUL : PLAIN);
            __syncthreads();
        }
        __syncthreads();
        bool some = false;
        for (int r = threadIdx.x; r < ROWS && i0 + r < call.queries; r += blockDim.x) {
            if (!far) found[r] = is_far(found[r], top[r]);
            some |= found[r];
            if (found[r] != far) continue;
            total[blockIdx.x * call.queries + i0 + r] = far ? -sum[r] : sum[r];
            shift[blockIdx.x * call.queries + i0 + r] = top[r] == -INFINITY ? 0 : top[r];
        }
        passes += __syncthreads_or(some) && !far;
        ENTRIES(ROWS, HEAD)
            if (found[r] == far && i0 + r < call.queries && c < call.size)
                narrow(sum[r] == 0 ? 0 : mean[a][b] / sum[r], out[(i0 + r) * call.out.t + c]);
        __syncthreads();
    }
}

// dq = scale Σ_j ds k, with ds = p (f g·v - D) and f the factor of dropout.
extern "C" __global__ void attention_backward_q(const Call* given, const T* q, const T* k, const T* v, const T* g,
                                      const float* total, const float* shift, const float* dots, T* dq, float scale,
                                      const bool* mask, unsigned long long seed,
                                      const unsigned long long* seeds, unsigned int limit, float share) {
    __shared__ float queries[ROWS * STRIDE], ups[ROWS * STRIDE], keys[KEYS * STRIDE], slopes[ROWS * SCORES];
    __shared__ Rows rows;
    const Call& call = *given;
    const Dropout dropout = {limit, share};
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads, i0 = blockIdx.y * ROWS;
    k = head_of(k, call.k, n, head / call.group);
    v = head_of(v, call.v, n, head / call.group);
    mask = head_of(mask, call.mask, n, head);
    fetch(head_of(q, call.q, n, head), call.q, i0, ROWS, call.queries, call.size, queries);
    fetch(head_of(g, call.g, n, head), call.g, i0, ROWS, call.queries, call.size, ups);
    int some = __syncthreads_or(fetch_rows(call, total, shift, dots, seed_of(seed, seeds), blockIdx.x, i0, rows));
    float sum[ROWS / 16][HEAD / 16] = {};
    const Tiles tiles = tiles_of_keys(call, i0);
    EACH(tiles, j0, KEYS) {
        float products[ROWS / 16][KEYS / 16] = {};
        fetch(v, call.v, j0, KEYS, call.keys, call.size, keys);
        __syncthreads();
        multiply(ups, STRIDE, 1, keys, STRIDE, 1, HEAD, products);
        __syncthreads();
        bool nonfinite = __syncthreads_or(fetch(k, call.k, j0, KEYS, call.keys, call.size, keys));
        for (int far = 0; far <= some; far++) {
            float scores[ROWS / 16][KEYS / 16] = {};
            multiply(queries, STRIDE, 1, keys, STRIDE, 1, HEAD, scores, far ? SHRUNK : PLAIN);
            ENTRIES(ROWS, KEYS) {
                if (rows.far[r] != far) continue;
                float p = expf(difference(scores[a][b] * scale, rows.shift[r], far)) * rows.inverse[r];
                float f = factor(dropout, rows.key[DROPOUT ? r : 0], j0 + c);
                float slope = p * (f * products[a][b] - rows.dot[r]);
                slopes[r * SCORES + c] = seen(call, mask, i0 + r, j0 + c) ? slope : 0;
            }
        }
        __syncthreads();
        multiply(slopes, SCORES, 1, keys, 1, STRIDE, KEYS, sum, nonfinite ? CAREFUL : PLAIN);
        __syncthreads();
    }
    dq = head_of(dq, call.dq, n, head);
    ENTRIES(ROWS, HEAD)
        if (i0 + r < call.queries && c < call.size) narrow(sum[a][b] * scale, dq[(i0 + r) * call.dq.t + c]);
}

// dv = Σ_i f p g and dk = scale Σ_i ds q, over all queries of the heads that share these keys.
extern "C" __global__ void attention_backward_kv(const Call* given, const T* q, const T* k, const T* v, const T* g,
                                       const float* total, const float* shift, const float* dots, T* dk, T* dv,
                                       float scale, const bool* mask, unsigned long long seed,
                                      const unsigned long long* seeds, unsigned int limit, float share) {
    __shared__ float keys[KEYS * STRIDE], values[KEYS * STRIDE], tile[ROWS * STRIDE];
    __shared__ float weights[ROWS * SCORES], slopes[ROWS * SCORES];
    __shared__ Rows rows;
    const Call& call = *given;
    const Dropout dropout = {limit, share};
    int h = blockIdx.x % call.h, n = blockIdx.x / call.h, j0 = blockIdx.y * KEYS;
    fetch(head_of(k, call.k, n, h), call.k, j0, KEYS, call.keys, call.size, keys);
    fetch(head_of(v, call.v, n, h), call.v, j0, KEYS, call.keys, call.size, values);
    float sum_k[KEYS / 16][HEAD / 16] = {}, sum_v[KEYS / 16][HEAD / 16] = {};
    const Tiles tiles = tiles_of_queries(call, j0);
    for (int head = h * call.group; head < (h + 1) * call.group; head++) {
        const T *queries = head_of(q, call.q, n, head), *ups = head_of(g, call.g, n, head);
        const bool* allowed = head_of(mask, call.mask, n, head);
        EACH(tiles, i0, ROWS) {
            float products[ROWS / 16][KEYS / 16] = {};
            fetch(ups, call.g, i0, ROWS, call.queries, call.size, tile);
            int some = __syncthreads_or(
                fetch_rows(call, total, shift, dots, seed_of(seed, seeds), n * call.h * call.group + head, i0, rows));
            multiply(tile, STRIDE, 1, values, STRIDE, 1, HEAD, products);
            __syncthreads();
            bool nonfinite = __syncthreads_or(fetch(queries, call.q, i0, ROWS, call.queries, call.size, tile));
            for (int far = 0; far <= some; far++) {
                float scores[ROWS / 16][KEYS / 16] = {};
                multiply(tile, STRIDE, 1, keys, STRIDE, 1, HEAD, scores, far ? SHRUNK : PLAIN);
                ENTRIES(ROWS, KEYS) {
                    if (rows.far[r] != far) continue;
                    bool there = seen(call, allowed, i0 + r, j0 + c);
                    float weight = expf(difference(scores[a][b] * scale, rows.shift[r], far));
                    float p = there ? weight * rows.inverse[r] : 0, f = factor(dropout, rows.key[DROPOUT ? r : 0], j0 + c);
                    weights[r * SCORES + c] = f * p;
                    slopes[r * SCORES + c] = there ? p * (f * products[a][b] - rows.dot[r]) : 0;
                }
            }
            __syncthreads();
            multiply(slopes, 1, SCORES, tile, 1, STRIDE, ROWS, sum_k, nonfinite ? CAREFUL : PLAIN);
            __syncthreads();
            nonfinite = __syncthreads_or(fetch(ups, call.g, i0, ROWS, call.queries, call.size, tile));
            multiply(weights, 1, SCORES, tile, 1, STRIDE, ROWS, sum_v, nonfinite ? CAREFUL : PLAIN);
            __syncthreads();
        }
    }
    dk = head_of(dk, call.dk, n, h);
    dv = head_of(dv, call.dv, n, h);
    ENTRIES(KEYS, HEAD)
        if (j0 + r < call.keys && c < call.size) {
            narrow(sum_k[a][b] * scale, dk[(j0 + r) * call.dk.t + c]);
            narrow(sum_v[a][b], dv[(j0 + r) * call.dv.t + c]);
        }
}
