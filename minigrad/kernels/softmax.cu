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

// s (g - Σ g s); where one s is above 0.9, with its g taken off all of them first: 1 - s would be noise
extern "C" __global__ void softmax_backward(const T* g, const T* s, T* dx, long long width) {
    g += blockIdx.x * width;
    s += blockIdx.x * width;
    W level = 0, mean = 0;
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) level += v[k] > W(0.9) ? u[k] : 0;
    }
    level = block_sum(level);
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) mean += (u[k] - level) * v[k];
    }
    mean = block_sum(mean);
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(s + c, v);
        FOR_LANES(k) v[k] *= u[k] - level - mean;
        store(v, dx + blockIdx.x * width + c);
    }
}

// g - e^out Σ g, and 0 in a row of only -∞; where e^out is above 0.9 by what the others sum to: 1 - e^out would be noise
extern "C" __global__ void log_softmax_backward(const T* g, const T* out, T* dx, long long width) {
    g += blockIdx.x * width;
    out += blockIdx.x * width;
    W top = 0, others = 0, mass = 0, rest = 0;
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(out + c, v);
        FOR_LANES(k) {
            W p = exp(v[k]);
            bool large = p > W(0.9);
            mass += p;
            rest += large ? 0 : p;
            top += large ? u[k] : 0;
            others += large ? 0 : u[k];
        }
    }
    top = block_sum(top);
    others = block_sum(others);
    mass = block_sum(mass);
    rest = block_sum(rest);
    FOR_PACKS(c, width) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(out + c, v);
        FOR_LANES(k) {
            W p = exp(v[k]);
            v[k] = mass == 0 ? 0 : p > W(0.9) ? u[k] * rest - p * others : u[k] - p * (top + others);
        }
        store(v, dx + blockIdx.x * width + c);
    }
}
