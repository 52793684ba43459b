// Dropout: what is kept depends on (seed, row, column) alone.

extern "C" __global__ void dropout(const T* x, T* y, long long size, long long width, unsigned long long seed,
                                   const unsigned long long* seeds, unsigned int limit, W share) {
    seed = seed_of(seed, seeds);
    for (long long c = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * PACK; c < size;
         c += (long long)gridDim.x * blockDim.x * PACK) {
        unsigned int key = row_key(c / width, seed);
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) v[k] = kept(key, (unsigned int)(c % width) + k, limit) ? v[k] * share : 0;
        store(v, y + c);
    }
}
