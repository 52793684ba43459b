// Root-mean-square normalisation. A block takes a row; the second pass over it finds it in the cache.

extern "C" __global__ void forward(const T* x, const T* weight, T* y, W* inverse, long long width, W eps) {
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    W squares = 0, largest = 0;
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) squares += v[k] * v[k];
    }
    W mean = block_sum(squares) / width + eps, scale = 1;
    if (!isfinite(mean) || mean < LOWEST) {  // squares leave the range: those of a multiple of the row
        FOR_PACKS(c, width) {
            W v[PACK];
            load(x + c, v);
            FOR_LANES(k) largest = max(largest, max(v[k], -v[k]));
        }
        largest = block_max(largest);
        if (largest > 0 && isfinite(largest)) scale = min(1 / max(largest, sqrt(eps)), LARGEST_POWER);
        squares = 0;
        FOR_PACKS(c, width) {
            W v[PACK];
            load(x + c, v);
            FOR_LANES(k) squares += v[k] * scale * (v[k] * scale);
        }
        mean = block_sum(squares) / width + eps * scale * scale;
    }
    W r = rsqrt(mean);
    FOR_PACKS(c, width) {
        W v[PACK], w[PACK];
        load(x + c, v);
        if (weight) load(weight + c, w);
        FOR_LANES(k) v[k] = v[k] * scale * (weight ? r * w[k] : r);  // r * scale may be infinite
        store(v, y + c);
    }
    if (threadIdx.x == 0) inverse[blockIdx.x] = r * scale;
}

// dx = r (g w) - x r³ mean(g w x); dweight = Σ g x r. A block takes every gridDim.x-th row, and adds what these give to
// dweight to a row of `shares` of its own, which the host sums. dx and shares may be null.
extern "C" __global__ void backward(const T* g, const T* x, const T* weight, const W* inverse, T* dx, W* shares,
                                    long long rows, long long width) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *gr = g + row * width, *xr = x + row * width;
        W r = inverse[row], slope = 0, scale = 1;
        if (r < 1 / LIMIT || r > LIMIT) {  // its cube, or g x, may leave the range: the normalised row in place of x
            scale = r;
            r = 1;
        }
        FOR_PACKS(c, width) {
            W u[PACK], v[PACK], w[PACK];
            load(gr + c, u);
            load(xr + c, v);
            if (weight) load(weight + c, w);
            FOR_LANES(k) {
                W product = u[k] * (v[k] * scale);
                slope += weight ? product * w[k] : product;
                if (shares) {
                    W* share = shares + blockIdx.x * width + c + k;
                    *share = product * r + (row < gridDim.x ? W(0) : *share);
                }
            }
        }
        slope = block_sum(slope) * r * r * r / width;
        if (!dx) continue;
        FOR_PACKS(c, width) {
            W u[PACK], v[PACK], w[PACK];
            load(gr + c, u);
            load(xr + c, v);
            if (weight) load(weight + c, w);
            FOR_LANES(k) v[k] = (u[k] * (weight ? w[k] * r : r) - v[k] * scale * slope) * scale;
            store(v, dx + row * width + c);
        }
    }
}
