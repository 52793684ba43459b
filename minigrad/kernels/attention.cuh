// What the kernels of attention in float32 (attention.cu) and on tensor cores (attention_mma.cu) share: what a call is,
// which tiles of ROWS queries and KEYS keys it has, what a query sees, and what is known of a row.
//
// MASK, DROPOUT and GRID (of blocks) say whether there are any (1) or not (0).
//
// What a query does not see changes no bit of its row: hidden weights are chosen to be 0, and a weight of 0 takes nothing
// from a number that is not finite. Only tiles with such a number pay for that.

#define UNROLL _Pragma("unroll")

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

// Whether query i sees key j by the mask and by the grid.
__device__ inline bool allowed(const Call& call, const bool* mask, int i, int j) {
    return (!MASK || mask[i * call.mask.t + j * call.mask_key]) &&
           (!GRID || call.grid[int(i + call.start) / int(call.side) * call.columns + j / int(call.side)]);
}
// The factor of a weight under dropout.
struct Dropout { unsigned int limit; float share; };
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

// A row is far if scores of finite numbers leave the range of float in it. Far rows get a pass of their own, in which
// both factors of a score are 2⁻⁷⁰ of what they are: what underflows then is nothing beside the largest score, of which a
// unit in the last place is more than any difference that leaves a weight. A score of -∞ counts where there is no other.
#define SHARE 8.470329472543003e-22f
__device__ inline float difference(float x, float y, bool far) { return far ? (x - y) / SHARE / SHARE : x - y; }
enum { NEAR, BELOW, FAR };
__device__ inline int distance(float score) { return isfinite(score) ? NEAR : score == -INFINITY ? BELOW : FAR; }
__device__ inline bool is_far(int most, float top) { return most == FAR || (most == BELOW && top == -INFINITY); }

// What the backward kernels know of a row: of its weights p = e^(s - shift) / total, and D. In attention_mma.cu the shift
// is one of s · log₂ e, and the base is 2. The total of a far row is kept with a minus, its shift is one of such scores.
struct Rows { float shift[ROWS], inverse[ROWS], dot[ROWS]; bool far[ROWS]; unsigned int key[DROPOUT ? ROWS : 1]; };
__device__ inline bool fetch_rows(const Call& call, const float* total, const float* shift, const float* dots,
                                  unsigned long long seed, int head, int i0, Rows& rows) {
    bool some = false;
    for (int r = threadIdx.x; r < ROWS; r += blockDim.x) {
        bool there = i0 + r < call.queries;
        long long place = head * call.queries + i0 + r;
        rows.shift[r] = there ? shift[place] : 0;
        rows.inverse[r] = there && total[place] != 0 ? 1 / fabsf(total[place]) : 0;
        rows.dot[r] = there ? dots[place] : 0;
        some |= rows.far[r] = there && total[place] < 0;
        if (DROPOUT) rows.key[r] = row_key(place, seed);
    }
    return some;
}
