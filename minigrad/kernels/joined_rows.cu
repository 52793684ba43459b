// Rows of up to three matrices side by side, so that one product serves all of them.

// out's row = a's, b's and c's row, which are `widths` long and begin `steps` apart, in the type of the product.
extern "C" __global__ void join(const T* a, const T* b, const T* c, long long width_a, long long width_b,
                                long long width, long long step_a, long long step_b, long long step_c, R* out,
                                long long size) {
    FOR_ALL(i, size) {
        long long row = i / width, column = i - row * width;
        const T* from = column < width_a ? a + row * step_a + column
                      : column < width_a + width_b ? b + row * step_b + (column - width_a)
                      : c + row * step_c + (column - width_a - width_b);
        W v[PACK];
        load(from, v);
        store(v, out + i);
    }
}

// The units silu(gate) up, of which gate and up lie side by side in a row, each `width` long.
extern "C" __global__ void joined_swiglu(const T* both, T* y, long long width, long long size) {
    FOR_ALL(i, size) {
        const T* gate = both + (i + i / width * width);
        W a[PACK], b[PACK];
        load(gate, a);
        load(gate + width, b);
        FOR_LANES(k) a[k] *= logistic(a[k]) * b[k];
        store(a, y + i);
    }
}

// The units again, and the gradients of gate and up, side by side, from g, that of the units.
extern "C" __global__ void joined_swiglu_backward(const T* g, const T* both, T* y, T* dboth, long long width,
                                                  long long size) {
    FOR_ALL(i, size) {
        long long place = i + i / width * width;
        W u[PACK], a[PACK], b[PACK], h[PACK];
        load(g + i, u);
        load(both + place, a);
        load(both + place + width, b);
        FOR_LANES(k) {
            W s = logistic(a[k]), silu = a[k] * s;
            h[k] = silu * b[k];
            a[k] = silu_slope(a[k], s) * (u[k] * b[k]);
            b[k] = u[k] * silu;
        }
        store(h, y + i);
        store(a, dboth + place);
        store(b, dboth + place + width);
    }
}
