// Attention of half precision on tensor cores: products of matrices by mma.sync, sums and softmax in float32.
//
// A block of 4 warps takes 64 queries of one head (or, for dk and dv, 64 keys), a warp 16 of them: its rows. ROWS and
// KEYS are 64 both. The other side comes in steps; scores, weights and sums stay in registers, where they lie as
// tensor_cores.cuh says. HEAD, a multiple of 16, is the size of a head in shared memory; features from call.size on are 0
// there. Weights and slopes are rounded to the elements' type before they are multiplied. Exponentials are powers of 2.
#include "attention.cuh"
#include "tensor_cores.cuh"

#define LOG2E 1.4426950408889634f
#define WIDE (Format<T>::brain)  // products of float16 stay in the range of float: there are no far rows
// Features of a query or a key. It is 16 bytes longer than they are, so that eight lines at the same place lie in
// different banks.
typedef Pack<4, Pair> Eight;
struct Line { Eight at[HEAD / 8 + 1]; };
__device__ inline T* elements(Line* line) { return reinterpret_cast<T*>(line); }
__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int first_row() { return threadIdx.x / 32 * 16 + lane() / 4; }
// The entries of a thread: the e-th of the n-th 8 columns lies in row first_row() + e / 2 * 8 and in column c.
#define ENTRIES(columns) \
    UNROLL for (int n = 0; n < (columns) / 8; n++) \
        UNROLL for (int e = 0, c; e < 4 && (c = 8 * n + lane() % 4 * 2 + e % 2, true); e++)

// Rows of an array in shared memory, 0 where there is nothing. Whether this thread met a number that is not finite.
__device__ inline bool fetch(const T* from, const Place& place, int first, int rows, int total, int size, Line* to) {
    Pair found = 0;
    for (int i = threadIdx.x; i < rows * (HEAD / 8); i += blockDim.x) {
        int r = i / (HEAD / 8), c = i % (HEAD / 8) * 8;
        const T* source = from + (first + r) * place.t + c;
        Eight eight = {};
        if (first + r < total) {
            if (PACK == 8 && c + 8 <= size) eight = *reinterpret_cast<const Eight*>(source);
            else UNROLL for (int k = 0; k < 8; k++)
                if (c + k < size) eight.at[k / 2] |= Pair(source[k].bits) << k % 2 * 16;
        }
        UNROLL for (int k = 0; k < 4; k++) found |= nonfinite_bits(eight.at[k]);
        to[r].at[c / 8] = eight;
    }
    return found;
}
// The rows of a warp, 16 of 64 lines, as left factors: read when they are needed, or kept in registers.
struct Left { Pair at[HEAD / 16][4]; };
__device__ inline void left_factor(Line* x, int k, Pair (&to)[4]) {
    load_matrices<false>(elements(x + threadIdx.x / 32 * 16 + lane() % 16) + 16 * k + lane() / 16 * 8, to);
}
__device__ inline void left_factor(const Left& x, int k, Pair (&to)[4]) {
    UNROLL for (int i = 0; i < 4; i++) to[i] = x.at[k][i];
}
__device__ inline void keep(Line* x, Left& to) {
    UNROLL for (int k = 0; k < HEAD / 16; k++) left_factor(x, k, to.at[k]);
}

// sum += x yᵀ: the products of a warp's rows with COLUMNS lines.
template <int COLUMNS, class X> __device__ inline void multiply(X& x, Line* y, float (&sum)[COLUMNS / 8][4]) {
    UNROLL for (int k = 0; k < HEAD / 16; k++) {
        Pair left[4], right[4];
        left_factor(x, k, left);
        UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
            Line* line = y + 16 * n + lane() % 8 + lane() / 16 * 8;
            load_matrices<false>(elements(line) + 16 * k + lane() / 8 % 2 * 8, right);
            mma(sum[2 * n], left, right[0], right[1]);
            mma(sum[2 * n + 1], left, right[2], right[3]);
        }
    }
}
// sum += weights · y of numbers that are not finite, which are replaced by 0: a weight of 0 takes nothing from them.
template <int COLUMNS>
__device__ inline void take_nonfinite(const float (&weights)[COLUMNS / 8][4], Line* y, float (&sum)[HEAD / 8][4]) {
    for (int j = 0; j < COLUMNS; j++) {
        float upper = 0, lower = 0;
        ENTRIES(COLUMNS) if (c == j) (e < 2 ? upper : lower) = weights[n][e];
        int holder = lane() / 4 * 4 + j % 8 / 2;
        upper = __shfl_sync(~0u, upper, holder);
        lower = __shfl_sync(~0u, lower, holder);
        const T* line = elements(y + j);
        ENTRIES(HEAD) {
            float weight = e < 2 ? upper : lower;
            if (weight != 0 && is_nonfinite(line[c])) sum[n][e] += weight * widen(line[c]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS * HEAD; i += blockDim.x) {
        T& number = elements(y + i / HEAD)[i % HEAD];
        if (is_nonfinite(number)) number.bits = 0;
    }
    __syncthreads();
}
// sum += weights · y, of weights that lie as sums do and are rounded, and COLUMNS lines.
template <int COLUMNS>
__device__ inline void add_product(const float (&weights)[COLUMNS / 8][4], Line* y, float (&sum)[HEAD / 8][4],
                                   bool nonfinite) {
    if (nonfinite) take_nonfinite<COLUMNS>(weights, y, sum);
    UNROLL for (int k = 0; k < COLUMNS / 16; k++) {
        Pair left[4], right[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float(&pieces)[4] = weights[2 * k + i / 2];
            left[i] = pair(pieces[i % 2 * 2], pieces[i % 2 * 2 + 1]);
        }
        UNROLL for (int n = 0; n < HEAD / 16; n++) {
            load_matrices<true>(elements(y + 16 * k + lane() % 16) + 16 * n + lane() / 16 * 8, right);
            mma(sum[2 * n], left, right[0], right[1]);
            mma(sum[2 * n + 1], left, right[2], right[3]);
        }
    }
}
// A warp's rows of a result, each of a thread's two rows times a factor of its own, if it is wanted.
__device__ inline void write(const float (&sum)[HEAD / 8][4], float upper, float lower, const Place& place, int first,
                             int total, int size, T* to, bool first_wanted = true, bool second_wanted = true) {
    UNROLL for (int n = 0; n < HEAD / 8; n++)
        UNROLL for (int half = 0; half < 2; half++) {
            int i = first + first_row() + 8 * half, c = 8 * n + lane() % 4 * 2;
            float factor = half ? lower : upper, a = sum[n][2 * half] * factor, b = sum[n][2 * half + 1] * factor;
            T* target = to + i * place.t + c;
            if (i >= total || c >= size || !(half ? second_wanted : first_wanted)) continue;
            if (PACK == 8 && c + 1 < size) *reinterpret_cast<Pair*>(target) = pair(a, b);
            else {
                narrow(a, target[0]);
                if (c + 1 < size) narrow(b, target[1]);
            }
        }
}
__device__ inline const T* row_of(const T* x, const Place& place, int i, long long total) {  // the last one beyond them
    return x + min((long long)i, total - 1) * place.t;
}
// What a row sees of the other side by the band: ``count`` places from ``first`` on.
struct Sight { int first, count; };
__device__ inline Sight sight(int place, long long places, long long before, long long after, long long others) {
    long long first = max(place - before, 0ll), last = min(place + after + 1, others);
    return {int(first), place < places && last > first ? int(last - first) : 0};
}
__device__ inline bool within(const Sight& sight, int place) {
    return (unsigned int)(place - sight.first) < (unsigned int)sight.count;
}
// Blocks of queries begin with the last ones, which see most under a causal mask: so the card is busy to the end.
__device__ inline int last_first() { return gridDim.y - 1 - blockIdx.y; }
// The four lanes that share a row.
__device__ inline float row_max(float x) {
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
// The scores of far rows, in place of those that left the range: of a thread's rows x with COLUMNS lines, by ordinary
// instructions, one column after the other. ``far`` has an entry for each of the rows, or for each line, if there is any.
template <int COLUMNS>
__device__ inline void far_scores(const T* first, const T* second, Line* y, int size, const bool* far, bool of_lines,
                                  float (&scores)[COLUMNS / 8][4]) {
    for (int j = 0; j < COLUMNS; j++) {
        float upper = 0, lower = 0;
        for (int d = lane() % 4; d < size; d += 4) {
            float factor = widen(elements(y + j)[d]) * SHARE;
            upper += widen(first[d]) * SHARE * factor;
            lower += widen(second[d]) * SHARE * factor;
        }
        upper = row_sum(upper);
        lower = row_sum(lower);
        ENTRIES(COLUMNS)
            if (c == j && (!far || far[of_lines ? j : e / 2 * 8])) scores[n][e] = e < 2 ? upper : lower;
    }
}

extern "C" __global__ void attention_mma_forward(const Call* given, const T* q, const T* k, const T* v, T* out,
                                       float* total, float* shift, float scale, const bool* mask,
                                       unsigned long long seed,
                                      const unsigned long long* seeds, unsigned int limit, float share) {
    __shared__ Line keys[KEYS], values[KEYS];
    const Call& call = *given;
    const Dropout dropout = {limit, share};
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads, i0 = last_first() * ROWS;
    k = head_of(k, call.k, n, head / call.group);
    v = head_of(v, call.v, n, head / call.group);
    mask = head_of(mask, call.mask, n, head);
    q = head_of(q, call.q, n, head);
    fetch(q, call.q, i0, ROWS, call.queries, call.size, keys);
    __syncthreads();
    Left queries;
    keep(keys, queries);
    __syncthreads();
    Sight seen[2];
    const T* row[2];
    unsigned int key[2];
    int most[2] = {NEAR, NEAR};  // then whether the row is far
    UNROLL for (int half = 0; half < 2; half++) {
        int i = i0 + first_row() + 8 * half;
        seen[half] = sight(i, call.queries, call.left, call.right, call.keys);
        row[half] = row_of(q, call.q, i, call.queries);
        key[half] = DROPOUT ? row_key(blockIdx.x * call.queries + i, seed_of(seed, seeds)) : 0;
    }
    const Tiles tiles = tiles_of_keys(call, i0);
    for (int far = 0, passes = 1; far < passes; far++) {
        float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, mean[HEAD / 8][4] = {};
        EACH(tiles, j0, KEYS) {
            fetch(k, call.k, j0, KEYS, call.keys, call.size, keys);
            bool nonfinite = __syncthreads_or(fetch(v, call.v, j0, KEYS, call.keys, call.size, values));
            float weights[KEYS / 8][4] = {}, highest[2] = {top[0], top[1]}, base[2], fade[2];
            multiply<KEYS>(queries, keys, weights);
            if (far) far_scores<KEYS>(row[0], row[1], keys, call.size, nullptr, false, weights);
            ENTRIES(KEYS) {
                int half = e / 2, i = i0 + first_row() + 8 * half, j = j0 + c;
                bool there = within(seen[half], j) && allowed(call, mask, i, j);
                weights[n][e] = there ? weights[n][e] * (scale * LOG2E) : -INFINITY;
                if (WIDE && !far && there) most[half] = max(most[half], distance(weights[n][e]));
                highest[half] = max(highest[half], weights[n][e]);
            }
            UNROLL for (int half = 0; half < 2; half++) {
                float before = top[half];
                top[half] = row_max(highest[half]);
                base[half] = top[half] == -INFINITY ? 0 : top[half];
                fade[half] = exp2f(difference(before, base[half], far));
                sum[half] *= fade[half];
            }
            ENTRIES(KEYS) {
                float weight = exp2f(difference(weights[n][e], base[e / 2], far));
                sum[e / 2] += weight;
                weights[n][e] = weight * factor(dropout, key[e / 2], j0 + c);
            }
            UNROLL for (int m = 0; m < HEAD / 8; m++) UNROLL for (int e = 0; e < 4; e++) mean[m][e] *= fade[e / 2];
            add_product<KEYS>(weights, values, mean, nonfinite);
            __syncthreads();
        }
        UNROLL for (int half = 0; half < 2; half++) {
            int i = i0 + first_row() + 8 * half;
            sum[half] = row_sum(sum[half]);
            if (WIDE && !far) most[half] = is_far(int(row_max(most[half])), top[half]);
            if (lane() % 4 == 0 && i < call.queries && most[half] == far) {
                total[blockIdx.x * call.queries + i] = far ? -sum[half] : sum[half];
                shift[blockIdx.x * call.queries + i] = top[half] == -INFINITY ? 0 : top[half];
            }
        }
        passes += __syncthreads_or(most[0] || most[1]) && !far && WIDE;
        float upper = sum[0] == 0 ? 0 : 1 / sum[0], lower = sum[1] == 0 ? 0 : 1 / sum[1];
        T* to = head_of(out, call.out, n, head);
        write(mean, upper, lower, call.out, i0, call.queries, call.size, to, most[0] == far, most[1] == far);
    }
}

// dq = scale Σ_j ds k, with ds = p (f g·v - D) and f the factor of dropout.
#define STEP 32
extern "C" __global__ void attention_mma_backward_q(const Call* given, const T* q, const T* k, const T* v, const T* g,
                                      const float* total, const float* shift, const float* dots, T* dq, float scale,
                                      const bool* mask, unsigned long long seed,
                                      const unsigned long long* seeds, unsigned int limit, float share) {
    __shared__ Line tile[2 * STEP];
    __shared__ Rows rows;
    Line *keys = tile, *values = tile + STEP;
    const Call& call = *given;
    const Dropout dropout = {limit, share};
    int heads = call.h * call.group, head = blockIdx.x % heads, n = blockIdx.x / heads, i0 = last_first() * ROWS;
    k = head_of(k, call.k, n, head / call.group);
    v = head_of(v, call.v, n, head / call.group);
    mask = head_of(mask, call.mask, n, head);
    Left queries, ups;
    int some = __syncthreads_or(fetch_rows(call, total, shift, dots, seed_of(seed, seeds), blockIdx.x, i0, rows)) && WIDE;
    fetch(head_of(q, call.q, n, head), call.q, i0, ROWS, call.queries, call.size, tile);
    __syncthreads();
    keep(tile, queries);
    __syncthreads();
    fetch(head_of(g, call.g, n, head), call.g, i0, ROWS, call.queries, call.size, tile);
    __syncthreads();
    keep(tile, ups);
    __syncthreads();
    float sum[HEAD / 8][4] = {};
    const Sight seen[2] = {sight(i0 + first_row(), call.queries, call.left, call.right, call.keys),
                           sight(i0 + first_row() + 8, call.queries, call.left, call.right, call.keys)};
    const Tiles tiles = tiles_of_keys(call, i0);
    EACH(tiles, first, KEYS) for (int j0 = first; j0 < first + KEYS && j0 < call.keys; j0 += STEP) {
        fetch(v, call.v, j0, STEP, call.keys, call.size, values);
        bool nonfinite = __syncthreads_or(fetch(k, call.k, j0, STEP, call.keys, call.size, keys));
        float slopes[STEP / 8][4] = {}, products[STEP / 8][4] = {};
        multiply<STEP>(queries, keys, slopes);
        multiply<STEP>(ups, values, products);
        if (some) {
            const T* own = head_of(q, call.q, n, head);
            far_scores<STEP>(row_of(own, call.q, i0 + first_row(), call.queries),
                             row_of(own, call.q, i0 + first_row() + 8, call.queries), keys, call.size,
                             rows.far + first_row(), false, slopes);
        }
        ENTRIES(STEP) {
            int half = e / 2, r = first_row() + 8 * half, j = j0 + c;
            float rise = difference(slopes[n][e] * (scale * LOG2E), rows.shift[r], WIDE && rows.far[r]);
            float p = exp2f(rise) * rows.inverse[r];
            float slope = p * (factor(dropout, rows.key[DROPOUT ? r : 0], j) * products[n][e] - rows.dot[r]);
            slopes[n][e] = within(seen[half], j) && allowed(call, mask, i0 + r, j) ? slope : 0;
        }
        add_product<STEP>(slopes, keys, sum, nonfinite);
        __syncthreads();
    }
    write(sum, scale, scale, call.dq, i0, call.queries, call.size, head_of(dq, call.dq, n, head));
}

// dv = Σ_i f p g and dk = scale Σ_i ds q, over all queries of the heads that share these keys: keys are rows here.
#undef STEP
#define STEP (HEAD > 112 ? 16 : 32)  // what fits into 48 KB
extern "C" __global__ void attention_mma_backward_kv(const Call* given, const T* q, const T* k, const T* v, const T* g,
                                       const float* total, const float* shift, const float* dots, T* dk, T* dv,
                                       float scale, const bool* mask, unsigned long long seed,
                                      const unsigned long long* seeds, unsigned int limit, float share) {
    __shared__ Line keys[KEYS], values[KEYS], queries[STEP], ups[STEP];
    __shared__ Rows rows;
    const Call& call = *given;
    const Dropout dropout = {limit, share};
    int h = blockIdx.x % call.h, n = blockIdx.x / call.h, j0 = blockIdx.y * KEYS;
    fetch(head_of(k, call.k, n, h), call.k, j0, KEYS, call.keys, call.size, keys);
    fetch(head_of(v, call.v, n, h), call.v, j0, KEYS, call.keys, call.size, values);
    float sum_k[HEAD / 8][4] = {}, sum_v[HEAD / 8][4] = {};
    const Sight seen[2] = {sight(j0 + first_row(), call.keys, call.right, call.left, call.queries),
                           sight(j0 + first_row() + 8, call.keys, call.right, call.left, call.queries)};
    const Tiles tiles = tiles_of_queries(call, j0);
    for (int head = h * call.group; head < (h + 1) * call.group; head++) {
        const T *of_q = head_of(q, call.q, n, head), *of_g = head_of(g, call.g, n, head);
        const bool* of_mask = head_of(mask, call.mask, n, head);
        EACH(tiles, first, ROWS) {
            int some = __syncthreads_or(
                fetch_rows(call, total, shift, dots, seed_of(seed, seeds), n * call.h * call.group + head, first, rows)) && WIDE;
            for (int i0 = first; i0 < first + ROWS && i0 < call.queries; i0 += STEP) {
                bool nonfinite = fetch(of_q, call.q, i0, STEP, call.queries, call.size, queries);
                nonfinite |= fetch(of_g, call.g, i0, STEP, call.queries, call.size, ups);
                nonfinite = __syncthreads_or(nonfinite);
                float weights[STEP / 8][4] = {}, slopes[STEP / 8][4] = {};
                multiply<STEP>(keys, queries, weights);
                multiply<STEP>(values, ups, slopes);
                if (some) far_scores<STEP>(elements(keys + first_row()), elements(keys + first_row() + 8), queries,
                                           call.size, rows.far + (i0 - first), true, weights);
                ENTRIES(STEP) {
                    int half = e / 2, r = i0 - first + c, i = i0 + c, j = j0 + first_row() + 8 * half;
                    bool there = within(seen[half], i) && allowed(call, of_mask, i, j);
                    float rise = difference(weights[n][e] * (scale * LOG2E), rows.shift[r], WIDE && rows.far[r]);
                    float p = there ? exp2f(rise) * rows.inverse[r] : 0;
                    float f = factor(dropout, rows.key[DROPOUT ? r : 0], j);
                    weights[n][e] = f * p;
                    slopes[n][e] = there ? p * (f * slopes[n][e] - rows.dot[r]) : 0;
                }
                add_product<STEP>(weights, ups, sum_v, nonfinite);
                add_product<STEP>(slopes, queries, sum_k, nonfinite);
                __syncthreads();
            }
        }
    }
    write(sum_k, scale, scale, call.dk, j0, call.keys, call.size, head_of(dk, call.dk, n, h));
    write(sum_v, 1, 1, call.dv, j0, call.keys, call.size, head_of(dv, call.dv, n, h));
}
