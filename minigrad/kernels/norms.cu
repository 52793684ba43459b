// Layer and root-mean-square normalisation. A block takes a row; the later passes over it find it in the cache.

// The packs of a row that a thread takes, COLUMNS of them at most, with their number.
#ifndef COLUMNS
#define COLUMNS 1
#endif
#define FOR_COLUMNS(i, c, width) \
    _Pragma("unroll") for (int i = 0; i < COLUMNS; i++) \
        if (long long c = ((long long)i * blockDim.x + threadIdx.x) * PACK; c < (width))

// The mean of numbers with a large offset is rounded, so they are centred twice: by ``centre``, and by the mean ``rest``
// of what remains.
extern "C" __global__ void layer_norm_forward(const T* x, const T* weight, const T* bias, T* y, W* centre, W* rest,
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

extern "C" __global__ void rms_norm_forward(const T* x, const T* weight, R* y, W* inverse, long long width, W eps) {
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

// The normalised row again.
extern "C" __global__ void rms_norm_again(const T* x, const T* weight, R* y, const W* inverse, long long width) {
    W r = inverse[blockIdx.x];
    FOR_PACKS(c, width) {
        W v[PACK], w[PACK];
        load(x + blockIdx.x * width + c, v);
        load(weight + c, w);
        FOR_LANES(k) v[k] *= r * w[k];  // the bits of the forward pass
        store(v, y + blockIdx.x * width + c);
    }
}

// With n the normalised row: dx = r (g w - mean(g w) - n mean(g w n)), dweight = Σ g n, dbias = Σ g. Without CENTRE the
// row is not centred, and mean(g w) is no part of dx. A block takes every gridDim.x-th row; each of its threads has the
// sums of its columns in registers, and in the end in a row of ``shares`` of the block, which the host sums. ``dx`` and
// the shares may be null. A thread takes COLUMNS packs of a row, so that n and g w are computed once.
template <bool CENTRE>
__device__ inline void norm_backward(const R* g, const T* x, const T* weight, const W* centre, const W* rest,
                                     const W* inverse, T* dx, W* shares, W* bias_shares, long long rows,
                                     long long width) {
    W sum[COLUMNS][PACK] = {}, bias_sum[COLUMNS][PACK] = {};
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        W n[COLUMNS][PACK], scaled[COLUMNS][PACK], r = inverse[row], up = 0, along = 0;
        W mean = CENTRE ? centre[row] : W(0), remaining = CENTRE ? rest[row] : W(0);
        FOR_COLUMNS(i, c, width) {
            W w[PACK];
            if (weight) load(weight + c, w);
            load(g + row * width + c, scaled[i]);
            load(x + row * width + c, n[i]);
            FOR_LANES(k) {
                n[i][k] = (n[i][k] - mean - remaining) * r;
                sum[i][k] += scaled[i][k] * n[i][k];
                bias_sum[i][k] += scaled[i][k];
                if (weight) scaled[i][k] *= w[k];
                up += scaled[i][k];
                along += scaled[i][k] * n[i][k];
            }
        }
        if (!dx) continue;
        along = block_sum(along) / width;
        up = CENTRE ? block_sum(up) / width : W(0);
        FOR_COLUMNS(i, c, width) {
            FOR_LANES(k) n[i][k] = r * (scaled[i][k] - up - n[i][k] * along);
            store(n[i], dx + row * width + c);
        }
    }
    FOR_COLUMNS(i, c, width) FOR_LANES(k) {
        if (shares) shares[blockIdx.x * width + c + k] = sum[i][k];
        if (bias_shares) bias_shares[blockIdx.x * width + c + k] = bias_sum[i][k];
    }
}
extern "C" __global__ void __launch_bounds__(512) layer_norm_backward(
    const R* g, const T* x, const T* weight, const W* centre, const W* rest, const W* inverse, T* dx, W* shares,
    W* bias_shares, long long rows, long long width) {
    norm_backward<true>(g, x, weight, centre, rest, inverse, dx, shares, bias_shares, rows, width);
}
extern "C" __global__ void __launch_bounds__(512) rms_norm_backward(
    const R* g, const T* x, const T* weight, const W* inverse, T* dx, W* shares, long long rows, long long width) {
    norm_backward<false>(g, x, weight, nullptr, nullptr, inverse, dx, shares, nullptr, rows, width);
}
