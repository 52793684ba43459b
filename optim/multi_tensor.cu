// One kernel over many arrays: a block takes CHUNK elements of one of them. `chunks` says which, and from where on.

struct Entry {
    T ELEMENTS;  // *weight, *gradient
    W WIDE;      // *mean, *square, *master, which is null where the weight itself is of W
    long long size;
};

#define FOR_CHUNK(c, entry) \
    long long start = chunks[2 * blockIdx.x + 1], stop = min(start + CHUNK, entry.size); \
    for (long long c = start + (long long)threadIdx.x * PACK; c < stop; c += (long long)blockDim.x * PACK)

// Elements c … of an array, as many of a pack as there are before stop.
template <class E> __device__ inline void fetch(const E* from, long long c, long long stop, W (&to)[PACK]) {
    FOR_LANES(k) to[k] = c + k < stop ? (W)widen(from[c + k]) : 0;
}
__device__ inline void fetch(const T* from, long long c, long long stop, W (&to)[PACK], bool whole) {
    if (whole) load(from + c, to); else fetch(from, c, stop, to);
}

extern "C" __global__ void square_sums(const Entry* entries, const long long* chunks, double* sums) {
    Entry entry = entries[chunks[2 * blockIdx.x]];
    double sum = 0;
    FOR_CHUNK(c, entry) {
        W g[PACK];
        fetch(entry.gradient, c, stop, g, c + PACK <= stop);
        FOR_LANES(k) sum += (double)g[k] * g[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void scale(const Entry* entries, const long long* chunks, const double* factor) {
    Entry entry = entries[chunks[2 * blockIdx.x]];
    double exact = *factor;
    bool faint = exact < 1.17549435e-38;  // float32 has not all of its digits
    W by = (W)exact;
    FOR_CHUNK(c, entry) {
        W g[PACK];
        fetch(entry.gradient, c, stop, g, c + PACK <= stop);
        FOR_LANES(k) if (c + k < stop) narrow(faint ? (W)(g[k] * exact) : g[k] * by, entry.gradient[c + k]);
    }
}

// v ← β₂ v + (1 - β₂) g², and its root. Where v is no normal number of float32, since |g| is above 1.8e19 or, which counts
// beside a `faint` eps alone, below 1e-19, it is kept as -√v; gpu.py's squares() undoes that.
__device__ inline W mean_square(W kept, W g, W b2, W rest2, bool faint, W& root) {
    const W largest = 3.40282347e38f, smallest = 1.17549435e-38f;
    W v = kept * b2 + g * g * rest2;
    if (kept >= 0 && v <= largest && !(faint && v < smallest)) {
        root = sqrt(v);
        return v;
    }
    double exact = (kept < 0 ? (double)kept * kept : (double)kept) * b2 + (double)g * g * rest2;
    root = (W)sqrt(exact);
    bool normal = exact <= largest && (exact >= smallest || exact == 0 || !faint);
    return normal || !(exact < 1e300) ? (W)exact : -root;
}

// A step of Adam, or of AdamW where `decoupled`; none at all where `where` is false. A master copy collects what half
// precision can't hold; where somebody else assigned an entry of the weight, it follows. `numbers` are what changes from
// step to step: the rate, β₁, β₂, eps, the decay, and the step that each array of the table takes.
extern "C" __global__ void adam(const Entry* entries, const long long* chunks, const double* numbers,
                                const bool* where, const long long* skipped, int decoupled) {
    if (where && !*where) return;
    long long place = chunks[2 * blockIdx.x];
    Entry entry = entries[place];
    double lr = numbers[0], beta1 = numbers[1], beta2 = numbers[2], eps = numbers[3], decay = numbers[4];
    __shared__ double corrections[2];  // powers of float64 are slow: one thread's for all
    if (threadIdx.x < 2)
        corrections[threadIdx.x] = 1 - pow(threadIdx.x ? beta2 : beta1, numbers[5 + place] - (double)*skipped);
    __syncthreads();
    double root_of = sqrt(corrections[1]);
    W root = (W)root_of, rate = (W)(lr * root_of / corrections[0]);
    bool faint = eps * root_of < 9.1e-13;  // adam.py's FAINT of float32
    W b1 = (W)beta1, b2 = (W)beta2, rest1 = (W)(1 - beta1), rest2 = (W)(1 - beta2), kept = (W)(1 - lr * decay);
    FOR_CHUNK(c, entry) {
        W g[PACK], stored[PACK];
        bool whole = c + PACK <= stop;
        fetch(entry.gradient, c, stop, g, whole);
        fetch(entry.weight, c, stop, stored, whole);
        FOR_LANES(k) {
            if (c + k >= stop) break;
            W w = stored[k], m = entry.mean[c + k], root_v;
            if (entry.master) {
                W master = entry.master[c + k];
                T rounded;
                narrow(master, rounded);
                if (widen(rounded) == w) w = master;
            }
            if (decoupled) w *= kept; else g[k] += (W)decay * w;
            m = m * b1 + g[k] * rest1;
            entry.square[c + k] = mean_square(entry.square[c + k], g[k], b2, rest2, faint, root_v);
            w -= m / (root_v + (W)eps * root) * rate;
            entry.mean[c + k] = m;
            if (entry.master) entry.master[c + k] = w;
            narrow(w, entry.weight[c + k]);
        }
    }
}
