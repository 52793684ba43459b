// Layer normalisation. A block takes a row; the later passes over it find it in the cache. The mean of numbers with a
// large offset is rounded, so they are centred twice: by ``centre``, and by the mean ``rest`` of what remains.

extern "C" __global__ void forward(const T* x, const T* weight, const T* bias, T* y, W* centre, W* rest,
                                   W* inverse, long long width, W eps) {
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    W sum = 0, remaining = 0, squares = 0;
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) sum += v[k];
    }
    W mean = block_sum(sum) / width;
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) remaining += v[k] - mean;
    }
    remaining = block_sum(remaining) / width;
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) {
            W n = v[k] - mean - remaining;
            squares += n * n;
        }
    }
    W variance = block_sum(squares) / width + eps, scale = 1, largest = 0;
    if (!isfinite(variance) || variance < LOWEST) {  // squares leave the range: those of a multiple of the row
        FOR_PACKS(c, width) {
            W v[PACK];
            load(x + c, v);
            FOR_LANES(k) {
                W n = v[k] - mean - remaining;
                largest = max(largest, max(n, -n));
            }
        }
        largest = block_max(largest);
        if (largest > 0 && isfinite(largest)) scale = min(1 / max(largest, sqrt(eps)), LARGEST_POWER);
        squares = 0;
        FOR_PACKS(c, width) {
            W v[PACK];
            load(x + c, v);
            FOR_LANES(k) {
                W n = (v[k] - mean - remaining) * scale;
                squares += n * n;
            }
        }
        variance = block_sum(squares) / width + eps * scale * scale;
    }
    W r = rsqrt(variance);
    FOR_PACKS(c, width) {
        W v[PACK], w[PACK], b[PACK];
        load(x + c, v);
        if (weight) load(weight + c, w);
        if (bias) load(bias + c, b);
        FOR_LANES(k) {
            v[k] = (v[k] - mean - remaining) * scale * r;  // r * scale may be infinite
            if (weight) v[k] *= w[k];
            if (bias) v[k] += b[k];
        }
        store(v, y + c);
    }
    if (threadIdx.x == 0) {
        centre[blockIdx.x] = mean;
        rest[blockIdx.x] = remaining;
        inverse[blockIdx.x] = r * scale;
    }
}

// With n the normalised row: dx = r (g w - mean(g w) - n mean(g w n)), dweight = Σ g n, dbias = Σ g. A block takes every
// gridDim.x-th row, and adds what these give to dweight and dbias to rows of its own, which the host sums.
extern "C" __global__ void backward(const T* g, const T* x, const T* weight, const W* centre, const W* rest, const W* inverse,
                                    T* dx, W* shares, W* bias_shares, long long rows, long long width) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *gr = g + row * width, *xr = x + row * width;
        W mean = centre[row], remaining = rest[row], r = inverse[row], up = 0, along = 0;
        FOR_PACKS(c, width) {
            W u[PACK], v[PACK], w[PACK];
            load(gr + c, u);
            load(xr + c, v);
            if (weight) load(weight + c, w);
            FOR_LANES(k) {
                W n = (v[k] - mean - remaining) * r, scaled = weight ? u[k] * w[k] : u[k];
                up += scaled;
                along += scaled * n;
                long long place = blockIdx.x * width + c + k;
                if (shares) shares[place] = u[k] * n + (row < gridDim.x ? W(0) : shares[place]);
                if (bias_shares) bias_shares[place] = u[k] + (row < gridDim.x ? W(0) : bias_shares[place]);
            }
        }
        up = block_sum(up) / width;
        along = block_sum(along) / width;
        if (!dx) continue;
        FOR_PACKS(c, width) {
            W u[PACK], v[PACK], w[PACK];
            load(gr + c, u);
            load(xr + c, v);
            if (weight) load(weight + c, w);
            FOR_LANES(k) {
                W n = (v[k] - mean - remaining) * r, scaled = weight ? u[k] * w[k] : u[k];
                v[k] = r * (scaled - up - n * along);
            }
            store(v, dx + row * width + c);
        }
    }
}
