// Rotary position embedding of x (n, h, t, d) with any strides but that of d, which is 1. A thread turns one pair, of
// the head that the second index of its block says.
// cos and sin are (n, h, t, d/2) of W, with stride 0 along the axes over which they are broadcast.

extern "C" __global__ void rope(const T* x, const W* cos, const W* sin, T* y, long long heads, long long h, int half,
                                int pairs, long long xn, long long xh, long long xt, long long cn, long long ch,
                                long long ct, long long sn, long long sh, long long st, long long yn, long long yh,
                                long long yt, int step, int apart) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, place = i / half, k = i - place * half;
    if (i >= pairs) return;
    for (long long both = blockIdx.y; both < heads; both += gridDim.y) {
        long long batch = both / h, head = both - batch * h;
        const T* from = x + batch * xn + head * xh + place * xt + k * step;
        T* to = y + batch * yn + head * yh + place * yt + k * step;
        W c = cos[batch * cn + head * ch + place * ct + k], s = sin[batch * sn + head * sh + place * st + k];
        if (PACK > 1 && apart == 1) {  // the two lie together
            W v[2];
            load(from, v);
            W turned[2] = {v[0] * c - v[1] * s, v[0] * s + v[1] * c};
            store(turned, to);
        } else {
            W a = widen(from[0]), b = widen(from[apart]);
            narrow(a * c - b * s, to[0]);
            narrow(a * s + b * c, to[apart]);
        }
    }
}
