// Softmax and its logarithm. A block takes a row: its maximum and sum in one pass, the result in a second.

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

// s (g - Σ g s)
extern "C" __global__ void softmax_backward(const T* g, const T* s, T* dx, long long width) {
    g += blockIdx.x * width;
    s += blockIdx.x * width;
    W mean = 0;
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) mean += u[k] * v[k];
    }
    mean = block_sum(mean);
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) v[k] *= u[k] - mean;
        store(v, dx + blockIdx.x * width + c);
    }
}

// g - e^out Σ g, and 0 in a row of only -∞
extern "C" __global__ void log_softmax_backward(const T* g, const T* out, T* dx, long long width) {
    g += blockIdx.x * width;
    out += blockIdx.x * width;
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
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(out + c, v);
        FOR_LANES(k) v[k] = mass == 0 ? 0 : u[k] - exp(v[k]) * sum;
        store(v, dx + blockIdx.x * width + c);
    }
}
