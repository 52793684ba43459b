// Rotary position embedding of x (n, h, t, d) with any strides but that of d, which is 1. A thread turns one pair.
// cos and sin are (n, h, t, d/2) of W, with stride 0 along the axes over which they are broadcast.

extern "C" __global__ void rope(const T* x, const W* cos, const W* sin, T* y, long long h, long long t, int half,
                                long long pairs, long long xn, long long xh, long long xt, long long cn, long long ch,
                                long long ct, long long sn, long long sh, long long st, long long yn, long long yh,
                                long long yt, int step, int apart) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < pairs;
         i += (long long)gridDim.x * blockDim.x) {
        long long k = i % half, row = i / half, place = row % t, head = row / t % h, batch = row / t / h;
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
