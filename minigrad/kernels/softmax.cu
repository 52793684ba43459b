// Softmax and its logarithm. A block takes a row: its maximum and sum in one pass, the result in a second.

#define NEARLY_ONE W(0.9)  // beside such a probability less than 0.1 is left for all others

extern "C" __global__ void softmax(const T* x, T* y, long long width) {
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    W shift, total;
    row_total(x, width, shift, total);
    W factor = 1 / (total == 0 ? 1 : total);
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) v[k] = exp(v[k] - shift) * factor;
        store(v, y + c);
    }
}

extern "C" __global__ void log_softmax(const T* x, T* y, long long width) {
    x += blockIdx.x * width;
    y += blockIdx.x * width;
    W shift, total;
    row_total(x, width, shift, total);
    W rest = log(total == 0 ? 1 : total);
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) v[k] = v[k] - shift - rest;  // beside a large shift the digits of rest would be lost
        store(v, y + c);
    }
}

// s (g - Σ g s); where one s is nearly 1, with its g taken off first: 1 - s would be noise.
extern "C" __global__ void softmax_backward(const T* g, const T* s, T* dx, long long width) {
    g += blockIdx.x * width;
    s += blockIdx.x * width;
    W mean = 0, peak = 0, its_g = 0;
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) {
            mean += u[k] * v[k];
            if (v[k] > NEARLY_ONE) peak = 1, its_g = u[k];
        }
    }
    mean = block_sum(mean);
    if (block_max(peak) != 0) {  // one entry of a row at most
        its_g = block_sum(its_g);
        mean = 0;
        FOR_PACKS(c, width) {
            W u[PACK], v[PACK];
            load(g + c, u);
            load(s + c, v);
            FOR_LANES(k) mean += (u[k] - its_g) * v[k];
        }
        mean = block_sum(mean);
    }
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) v[k] *= u[k] - its_g - mean;
        store(v, dx + blockIdx.x * width + c);
    }
}

// g - e^out Σ g, and 0 in a row of only -∞; a row sums to 0, by which the entry is got whose e^out is nearly 1.
extern "C" __global__ void log_softmax_backward(const T* g, const T* out, T* dx, long long width) {
    g += blockIdx.x * width;
    out += blockIdx.x * width;
    dx += blockIdx.x * width;
    W sum = 0, mass = 0;
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(out + c, v);
        FOR_LANES(k) {
            sum += u[k];
            mass += exp(v[k]);
        }
    }
    sum = block_sum(sum);
    mass = block_sum(mass);
    long long peak = -1;
    W rest = 0;  // of the other entries
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(out + c, v);
        FOR_LANES(k) {
            W s = exp(v[k]);
            v[k] = mass == 0 ? 0 : u[k] - s * sum;
            if (s > NEARLY_ONE) peak = c + k; else rest += v[k];
        }
        store(v, dx + c);
    }
    rest = block_sum(rest);
    if (peak >= 0) narrow(-rest, dx[peak]);
}
