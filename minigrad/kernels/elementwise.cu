// Activations, forward and backward: each thread takes one pack. The backward kernels compute again what a NumPy kernel
// would keep, since an exponential costs less than a load.

extern "C" __global__ void relu(const T* x, T* y, long long size) {
    FOR_ALL(c, size) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) v[k] = v[k] <= 0 ? W(0) : v[k];
        store(v, y + c);
    }
}

extern "C" __global__ void relu_backward(const T* g, const T* x, T* dx, long long size) {
    FOR_ALL(c, size) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(x + c, v);
        FOR_LANES(k) v[k] = v[k] <= 0 ? W(0) : u[k];
        store(v, dx + c);
    }
}

extern "C" __global__ void silu(const T* x, T* y, long long size) {
    FOR_ALL(c, size) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) v[k] *= logistic(v[k]);
        store(v, y + c);
    }
}

extern "C" __global__ void silu_backward(const T* g, const T* x, T* dx, long long size) {
    FOR_ALL(c, size) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(x + c, v);
        FOR_LANES(k) v[k] = u[k] * silu_slope(v[k], logistic(v[k]));
        store(v, dx + c);
    }
}

extern "C" __global__ void swiglu(const T* gate, const T* up, T* y, long long size) {
    FOR_ALL(c, size) {
        W a[PACK], b[PACK];
        load(gate + c, a);
        load(up + c, b);
        FOR_LANES(k) a[k] *= logistic(a[k]) * b[k];
        store(a, y + c);
    }
}

extern "C" __global__ void swiglu_backward(const T* g, const T* gate, const T* up, T* dgate, T* dup, long long size) {
    FOR_ALL(c, size) {
        W u[PACK], a[PACK], b[PACK];
        load(g + c, u);
        load(gate + c, a);
        load(up + c, b);
        FOR_LANES(k) {
            W s = logistic(a[k]);
            b[k] *= u[k] * silu_slope(a[k], s);
            a[k] *= u[k] * s;
        }
        store(b, dgate + c);
        store(a, dup + c);
    }
}

// Φ(x), exact or by (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2 = σ(2 √(2/π) (x + 0.044715 x³)).
__device__ inline W inner(W x) { return W(1.5957691216057308) * (x + W(0.044715) * x * x * x); }
__device__ inline W normal(W x, int exact) {
    return exact ? W(0.5) * erfc(x * W(-0.7071067811865476)) : logistic(inner(x));
}

extern "C" __global__ void gelu(const T* x, T* y, long long size, int exact) {
    FOR_ALL(c, size) {
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) v[k] *= normal(v[k], exact);
        store(v, y + c);
    }
}

extern "C" __global__ void gelu_backward(const T* g, const T* x, T* dx, long long size, int exact) {
    FOR_ALL(c, size) {
        W u[PACK], v[PACK];
        load(g + c, u);
        load(x + c, v);
        FOR_LANES(k) {
            W p = normal(v[k], exact);
            W square = min(v[k] * v[k], W(3000));  // beyond it the density is 0, in float64 too
            W density = exact ? W(0.3989422804014327) * exp(W(-0.5) * square)
                              : p * logistic(-inner(v[k])) * W(1.5957691216057308) * (1 + W(3 * 0.044715) * square);
            v[k] = u[k] * (p + v[k] * density);
        }
        store(v, dx + c);
    }
}
