// Dropout: what is kept depends on (seed, row, column) alone, by the hash of `kept` in attention_tiles.py.

extern "C" __global__ void dropout(const T* x, T* y, long long size, long long width, unsigned long long seed,
                                   unsigned int limit, W share) {
    for (long long c = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * PACK; c < size;
         c += (long long)gridDim.x * blockDim.x * PACK) {
        unsigned long long key = (c / width + seed) * 0x9E3779B97F4A7C15ull;
        key = ((key ^ key >> 32) * 0xD6E8FEB86659FD93ull) >> 32;
        W v[PACK];
        load(x + c, v);
        FOR_LANES(k) {
            unsigned int h = (unsigned int)key ^ (unsigned int)(c % width + k) * 0x9E3779B9u;
            h = (h ^ h >> 16) * 0x7FEB352Du;
            h = (h ^ h >> 15) * 0x846CA68Bu;
            v[k] = (h ^ h >> 16) >= limit ? v[k] * share : 0;
        }
        store(v, y + c);
    }
}
