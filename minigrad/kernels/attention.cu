// Attention in tiles of ROWS queries and KEYS keys, as the launcher says: the scores of a tile live in shared memory alone.
//
// A block of THREADS threads, which are 256, takes ROWS queries of one head (or, for dk and dv, KEYS keys of one head). Of a product of
// tiles each thread computes entries 16 rows and 16 columns apart. HEAD, a multiple of 16, is the size of a head in
// shared memory; features from call.size on are 0 there. Rows of shared arrays are one number longer than they need be,
// so that the threads of a warp read from different banks. MASK, DROPOUT and GRID (of blocks) say whether there are any (1) or
// not (0).
//
// What a query does not see changes no bit of its row: hidden weights are chosen to be 0, and a weight of 0 takes nothing
// from a number that is not finite. Only tiles with such a number pay for that.

#define STRIDE (HEAD + 1)
#define SCORES (KEYS + 1)
#define UNROLL _Pragma("unroll")
// The entries (r, c) of a thread, the a-th and b-th of its rows and columns.
#define ENTRIES(rows, columns) \
    UNROLL for (int a = 0, r = threadIdx.x / 16; a < (rows) / 16; a++, r += 16) \
    UNROLL for (int b = 0, c = threadIdx.x % 16; b < (columns) / 16; b++, c += 16)

// What a call is. q, g, out and dq are (n, h·group, queries, size), k, v, dk and dv (n, h, keys, size), with these
// strides of the first three axes. Query i sees the keys from i - left to i + right, where the mask (n, h·group,
// queries, keys) is true; it has a stride of 0 along axes where it is the same. And where the grid is true, with a row
// for each ``side`` queries, of which ``start`` come before the first, and a column, of ``columns``, for each ``side``
// keys. Then key_tiles holds for each tile of queries where in it the list begins of the tiles of keys that it sees, and
// where the last list ends; after that the lists. query_tiles is the same for each tile of keys.
struct Place { long long n, h, t; };
struct Call {
    Place PLACES, mask;
    long long mask_key, h, group, queries, keys, size, left, right, start, side, columns;
    const bool* grid;
    const int *key_tiles, *query_tiles;
};

__device__ inline bool seen(const Call& call, const bool* mask, int i, int j) {
    return i < call.queries && j < call.keys && j >= i - call.left && j <= i + call.right &&
           (!MASK || mask[i * call.mask.t + j * call.mask_key]) &&
           (!GRID || call.grid[int(i + call.start) / int(call.side) * call.columns + j / int(call.side)]);
}
// The factor of a weight under dropout.
struct Dropout { unsigned long long seed; unsigned int limit; float share; };
__device__ inline float factor(const Dropout& dropout, unsigned int key, int j) {
    return !DROPOUT ? 1 : kept(key, j, dropout.limit) ? dropout.share : 0;
}
// The tiles of SIZE places that OTHER places from ``place`` on meet: those of a list, or of a band up to ``total``.
struct Tiles { int first, stop; const int* list; };
template <int OTHER, int SIZE>
__device__ inline Tiles tiles_of(const int* list, int place, long long before, long long after, long long total) {
    if (GRID) return {list[place / OTHER], list[place / OTHER + 1], list};
    long long last = place + OTHER + after < total ? place + OTHER + after : total;
    return {place > before ? int((place - before) / SIZE) : 0, int((last + SIZE - 1) / SIZE), nullptr};
}
__device__ inline Tiles tiles_of_keys(const Call& call, int i) {
    return tiles_of<ROWS, KEYS>(call.key_tiles, i, call.left, call.right, call.keys);
}
__device__ inline Tiles tiles_of_queries(const Call& call, int j) {
    return tiles_of<KEYS, ROWS>(call.query_tiles, j, call.right, call.left, call.queries);
}
#define EACH(tiles, place, size) \
    for (int at = tiles.first, place; at < tiles.stop && (place = (GRID ? tiles.list[at] : at) * (size), true); at++)
template <class E> __device__ inline E* head_of(E* array, const Place& place, int n, int h) {
    return array + n * place.n + h * place.h;
}

// Rows of an array times a factor, as floats in shared memory, 0 where there is nothing. Whether this thread met a number
// that is not finite.
__device__ inline bool fetch(const T* from, const Place& place, int first, int rows, int total, int size, float factor,
                             float* to) {
    bool endless = false;
    for (int i = threadIdx.x; i < rows * (HEAD / 4); i += blockDim.x) {
        int r = i / (HEAD / 4), c = i % (HEAD / 4) * 4;
        const T* source = from + (first + r) * place.t + c;
        float *target = to + r * STRIDE + c, v[4] = {0, 0, 0, 0};
        if (first + r < total) {
            if (PACK > 1 && c + 4 <= size) load(source, v);
            else for (int k = 0; k < 4; k++) if (c + k < size) v[k] = widen(source[k]);
        }
        for (int k = 0; k < 4; k++) endless |= !isfinite(target[k] = v[k] * factor);
    }
    return endless;
}

// sum += x y of tiles in shared memory, entry by entry: x is read at r · xr + k · xk, y at c · yc + k · yk, for k < n.
// CAREFUL: where x is 0 the product is 0, whatever y is.
template <bool CAREFUL, int A, int B>
__device__ inline void sum_products(const float* x, int xr, int xk, const float* y, int yc, int yk, int n,
                                float (&sum)[A][B]) {
    x += threadIdx.x / 16 * xr;
    y += threadIdx.x % 16 * yc;
    for (int k = 0; k < n; k++) {
        float left[A], right[B];
        UNROLL for (int a = 0; a < A; a++) left[a] = x[16 * a * xr + k * xk];
        UNROLL for (int b = 0; b < B; b++) right[b] = y[16 * b * yc + k * yk];
        UNROLL for (int a = 0; a < A; a++)
            UNROLL for (int b = 0; b < B; b++) sum[a][b] += CAREFUL && left[a] == 0 ? 0 : left[a] * right[b];
    }
}
template <int A, int B>
__device__ inline void multiply(const float* x, int xr, int xk, const float* y, int yc, int yk, int n,
                                float (&sum)[A][B], bool careful = false) {
    if (careful) sum_products<true>(x, xr, xk, y, yc, yk, n, sum);
    else sum_products<false>(x, xr, xk, y, yc, yk, n, sum);
}

extern "C" __global__ void attention_forward(const Call* given, const T* q, const T* k, const T* v, T* out, float* total,
                                   float* shift, float scale, const bool* mask, unsigned long long seed,
                                   unsigned int limit, float share) {
    __shared__ float queries[ROWS * STRIDE], keys[KEYS * STRIDE], weights[ROWS * SCORES];
    __shared__ float top[ROWS], sum[ROWS], fade[ROWS];
    const Call& call = *given;
    const Dropout dropout = {seed, limit, share};
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads, i0 = blockIdx.y * ROWS;
    k = head_of(k, call.k, n, head / call.group);
    v = head_of(v, call.v, n, head / call.group);
    mask = head_of(mask, call.mask, n, head);
    fetch(head_of(q, call.q, n, head), call.q, i0, ROWS, call.queries, call.size, scale, queries);
    for (int r = threadIdx.x; r < ROWS; r += blockDim.x) {
        top[r] = -INFINITY;
        sum[r] = 0;
    }
    float mean[ROWS / 16][HEAD / 16] = {};
    const Tiles tiles = tiles_of_keys(call, i0);
    EACH(tiles, j0, KEYS) {
        fetch(k, call.k, j0, KEYS, call.keys, call.size, 1, keys);
        __syncthreads();
        float scores[ROWS / 16][KEYS / 16] = {};
        multiply(queries, STRIDE, 1, keys, STRIDE, 1, HEAD, scores);
        ENTRIES(ROWS, KEYS) weights[r * SCORES + c] = seen(call, mask, i0 + r, j0 + c) ? scores[a][b] : -INFINITY;
        __syncthreads();
        bool endless = fetch(v, call.v, j0, KEYS, call.keys, call.size, 1, keys);
        for (int r = threadIdx.x / 32; r < ROWS; r += blockDim.x / 32) {  // a warp takes a row, a thread a key
            float* place = weights + r * SCORES + threadIdx.x % 32;
            float highest = *place, before = top[r];
            for (int apart = 16; apart; apart /= 2) highest = max(highest, __shfl_xor_sync(~0u, highest, apart));
            highest = max(highest, before);
            float base = highest == -INFINITY ? 0 : highest, weight = expf(*place - base), added = weight;
            for (int apart = 16; apart; apart /= 2) added += __shfl_xor_sync(~0u, added, apart);
            unsigned int key = DROPOUT ? row_key(blockIdx.x * call.queries + i0 + r, seed) : 0;
            *place = weight * factor(dropout, key, j0 + threadIdx.x % 32);
            if (threadIdx.x % 32 == 0) {
                fade[r] = expf(before - base);
                sum[r] = sum[r] * fade[r] + added;
                top[r] = highest;
            }
        }
        endless = __syncthreads_or(endless);
        ENTRIES(ROWS, HEAD) mean[a][b] *= fade[r];
        multiply(weights, SCORES, 1, keys, 1, STRIDE, KEYS, mean, endless);
        __syncthreads();
    }
    __syncthreads();
    out = head_of(out, call.out, n, head);
    ENTRIES(ROWS, HEAD)
        if (i0 + r < call.queries && c < call.size)
            narrow(sum[r] == 0 ? 0 : mean[a][b] / sum[r], out[(i0 + r) * call.out.t + c]);
    for (int r = threadIdx.x; r < ROWS && i0 + r < call.queries; r += blockDim.x) {
        total[blockIdx.x * call.queries + i0 + r] = sum[r];
        shift[blockIdx.x * call.queries + i0 + r] = top[r] == -INFINITY ? 0 : top[r];
    }
}

// D = Σ g · out of each row, which both backward kernels read. A warp takes a row.
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

// What the backward kernels know of a row: of its weights p = e^(s - shift) / total, and D.
struct Rows { float shift[ROWS], inverse[ROWS], dot[ROWS]; unsigned int key[DROPOUT ? ROWS : 1]; };
__device__ inline void fetch_rows(const Call& call, const float* total, const float* shift, const float* dots,
                                  unsigned long long seed, int head, int i0, Rows& rows) {
    for (int r = threadIdx.x; r < ROWS; r += blockDim.x) {
        bool there = i0 + r < call.queries;
        long long place = head * call.queries + i0 + r;
        rows.shift[r] = there ? shift[place] : 0;
        rows.inverse[r] = there && total[place] != 0 ? 1 / total[place] : 0;
        rows.dot[r] = there ? dots[place] : 0;
        if (DROPOUT) rows.key[r] = row_key(place, seed);
    }
}

// dq = scale Σ_j ds k, with ds = p (f g·v - D) and f the factor of dropout.
extern "C" __global__ void attention_backward_q(const Call* given, const T* q, const T* k, const T* v, const T* g,
                                      const float* total, const float* shift, const float* dots, T* dq, float scale,
                                      const bool* mask, unsigned long long seed, unsigned int limit, float share) {
    __shared__ float queries[ROWS * STRIDE], ups[ROWS * STRIDE], keys[KEYS * STRIDE], slopes[ROWS * SCORES];
    __shared__ Rows rows;
    const Call& call = *given;
    const Dropout dropout = {seed, limit, share};
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads, i0 = blockIdx.y * ROWS;
    k = head_of(k, call.k, n, head / call.group);
    v = head_of(v, call.v, n, head / call.group);
    mask = head_of(mask, call.mask, n, head);
    fetch(head_of(q, call.q, n, head), call.q, i0, ROWS, call.queries, call.size, scale, queries);
    fetch(head_of(g, call.g, n, head), call.g, i0, ROWS, call.queries, call.size, 1, ups);
    fetch_rows(call, total, shift, dots, seed, blockIdx.x, i0, rows);
    float sum[ROWS / 16][HEAD / 16] = {};
    const Tiles tiles = tiles_of_keys(call, i0);
    EACH(tiles, j0, KEYS) {
        float scores[ROWS / 16][KEYS / 16] = {}, products[ROWS / 16][KEYS / 16] = {};
        fetch(v, call.v, j0, KEYS, call.keys, call.size, 1, keys);
        __syncthreads();
        multiply(ups, STRIDE, 1, keys, STRIDE, 1, HEAD, products);
        __syncthreads();
        bool endless = __syncthreads_or(fetch(k, call.k, j0, KEYS, call.keys, call.size, 1, keys));
        multiply(queries, STRIDE, 1, keys, STRIDE, 1, HEAD, scores);
        ENTRIES(ROWS, KEYS) {
            float p = expf(scores[a][b] - rows.shift[r]) * rows.inverse[r];
            float f = factor(dropout, rows.key[DROPOUT ? r : 0], j0 + c);
            float slope = p * (f * products[a][b] - rows.dot[r]);
            slopes[r * SCORES + c] = seen(call, mask, i0 + r, j0 + c) ? slope : 0;
        }
        __syncthreads();
        multiply(slopes, SCORES, 1, keys, 1, STRIDE, KEYS, sum, endless);
        __syncthreads();
    }
    dq = head_of(dq, call.dq, n, head);
    ENTRIES(ROWS, HEAD)
        if (i0 + r < call.queries && c < call.size) narrow(sum[a][b] * scale, dq[(i0 + r) * call.dq.t + c]);
}

// dv = Σ_i f p g and dk = scale Σ_i ds q, over all queries of the heads that share these keys.
extern "C" __global__ void attention_backward_kv(const Call* given, const T* q, const T* k, const T* v, const T* g,
                                       const float* total, const float* shift, const float* dots, T* dk, T* dv,
                                       float scale, const bool* mask, unsigned long long seed, unsigned int limit,
                                       float share) {
    __shared__ float keys[KEYS * STRIDE], values[KEYS * STRIDE], tile[ROWS * STRIDE];
    __shared__ float weights[ROWS * SCORES], slopes[ROWS * SCORES];
    __shared__ Rows rows;
    const Call& call = *given;
    const Dropout dropout = {seed, limit, share};
    int h = blockIdx.x % call.h, n = blockIdx.x / call.h, j0 = blockIdx.y * KEYS;
    fetch(head_of(k, call.k, n, h), call.k, j0, KEYS, call.keys, call.size, 1, keys);
    fetch(head_of(v, call.v, n, h), call.v, j0, KEYS, call.keys, call.size, 1, values);
    float sum_k[KEYS / 16][HEAD / 16] = {}, sum_v[KEYS / 16][HEAD / 16] = {};
    const Tiles tiles = tiles_of_queries(call, j0);
    for (int head = h * call.group; head < (h + 1) * call.group; head++) {
        const T *queries = head_of(q, call.q, n, head), *ups = head_of(g, call.g, n, head);
        const bool* allowed = head_of(mask, call.mask, n, head);
        EACH(tiles, i0, ROWS) {
            float scores[ROWS / 16][KEYS / 16] = {}, products[ROWS / 16][KEYS / 16] = {};
            fetch(ups, call.g, i0, ROWS, call.queries, call.size, 1, tile);
            fetch_rows(call, total, shift, dots, seed, n * call.h * call.group + head, i0, rows);
            __syncthreads();
            multiply(tile, STRIDE, 1, values, STRIDE, 1, HEAD, products);
            __syncthreads();
            bool endless = __syncthreads_or(fetch(queries, call.q, i0, ROWS, call.queries, call.size, scale, tile));
            multiply(tile, STRIDE, 1, keys, STRIDE, 1, HEAD, scores);
            ENTRIES(ROWS, KEYS) {
                bool there = seen(call, allowed, i0 + r, j0 + c);
                float p = there ? expf(scores[a][b] - rows.shift[r]) * rows.inverse[r] : 0;
                float f = factor(dropout, rows.key[DROPOUT ? r : 0], j0 + c);
                weights[r * SCORES + c] = f * p;
                slopes[r * SCORES + c] = there ? p * (f * products[a][b] - rows.dot[r]) : 0;
            }
            __syncthreads();
            multiply(slopes, 1, SCORES, tile, 1, STRIDE, ROWS, sum_k, endless);
            __syncthreads();
            endless = __syncthreads_or(fetch(ups, call.g, i0, ROWS, call.queries, call.size, 1, tile));
            multiply(weights, 1, SCORES, tile, 1, STRIDE, ROWS, sum_v, endless);
            __syncthreads();
        }
    }
    dk = head_of(dk, call.dk, n, h);
    dv = head_of(dv, call.dv, n, h);
    ENTRIES(KEYS, HEAD)
        if (j0 + r < call.keys && c < call.size) {
            narrow(sum_k[a][b], dk[(j0 + r) * call.dk.t + c]);
            narrow(sum_v[a][b], dv[(j0 + r) * call.dv.t + c]);
        }
}
