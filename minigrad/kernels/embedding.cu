// Rows of a table picked by id, and the sums of the rows that share one.

extern "C" __global__ void embedding_forward(const T* table, const long long* ids, T* out, long long width) {
    const T* from = table + ids[blockIdx.x] * width;
    FOR_PACKS(c, width) {
        Pack<PACK> pack = *reinterpret_cast<const Pack<PACK>*>(from + c);
        *reinterpret_cast<Pack<PACK>*>(out + blockIdx.x * width + c) = pack;
    }
}

// A block takes a row of the table: it finds its id among the sorted ones, and adds up the rows of g at their places
// `order`, in that order, so that the sum has the same bits every time. The row `none` gets 0.
extern "C" __global__ void embedding_backward(const T* g, const long long* sorted, const long long* order, T* dtable,
                                    long long count, long long width, long long none) {
    long long id = blockIdx.x, first = 0, last = count;
    while (first < last) {
        long long middle = (first + last) / 2;
        if (sorted[middle] < id) first = middle + 1; else last = middle;
    }
    if (id == none) first = count;
    FOR_PACKS(c, width) {
        W sum[PACK];
        FOR_LANES(k) sum[k] = 0;
        for (long long i = first; i < count && sorted[i] == id; i++) {
            W u[PACK];
            load(g + order[i] * width + c, u);
            FOR_LANES(k) sum[k] += u[k];
        }
        store(sum, dtable + id * width + c);
    }
}
