// Cross-entropy of rows of logits against class ids; an id of -1 is a row that counts for nothing.

// log Σ e^x - Σ q x, with q = (1 - smoothing) onehot + smoothing / width; and what the backward pass reads.
extern "C" __global__ void cross_entropy_forward(const T* x, const long long* ids, W* losses, W* shifts, W* totals, long long width,
                                   W smoothing) {
    x += blockIdx.x * width;
    W shift, total, sum = 0;
    row_total(x, width, shift, total);
    if (smoothing) {
        FOR_PACKS(c, width) {
            W v[PACK];
            load(x + c, v);
            FOR_LANES(k) sum += v[k];
        }
        sum = block_sum(sum);
    }
    if (threadIdx.x) return;
    long long id = ids[blockIdx.x];
    W picked = id < 0 ? 0 : (1 - smoothing) * widen(x[id]);
    if (smoothing) picked += smoothing * sum / width;
    losses[blockIdx.x] = id < 0 ? 0 : total == 0 ? INFINITY : log(total) + (shift - picked);
    shifts[blockIdx.x] = shift;
    totals[blockIdx.x] = total;
}

// scale (softmax - q), 0 in a row that doesn't count or is only -∞. A row sums to 0: by that the entry of a target of
// probability nearly 1 is got, since p - 1 would be noise. dx may be x.
extern "C" __global__ void cross_entropy_backward(const T* x, const long long* ids, const W* shifts, const W* totals,
                                    const W* scales, T* dx, long long width, W smoothing) {
    x += blockIdx.x * width;
    dx += blockIdx.x * width;
    long long id = ids[blockIdx.x];
    W shift = shifts[blockIdx.x], total = totals[blockIdx.x];
    bool dead = id < 0 || total == 0;
    W scale = dead ? 0 : scales[blockIdx.x], factor = dead ? 0 : scale / total;
    bool sure = false;  // in the thread that has the target
    W rest = 0;         // of the other entries
    FOR_PACKS(c, width) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) {
            W p = exp(v[k] - shift) * factor - scale * (smoothing / width);
            v[k] = dead ? 0 : c + k == id ? p - scale * (1 - smoothing) : p;
            if (c + k == id) sure = !smoothing && fabs(v[k]) < fabs(scale) * W(0.1); else rest += v[k];
        }
        store(v, dx + c);
    }
    rest = block_sum(rest);
    if (sure) narrow(-rest, dx[id]);
}
