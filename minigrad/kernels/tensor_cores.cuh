// Products of half precision on tensor cores, summed in float32: what a warp does together, and which lane holds what.
//
// A product is x (16 rows, 16 of the inner index) times y (16 of the inner index, 8 columns). Of the fragments of these
// matrices lane 4g + t of a warp holds, two elements in a register, the first in the low half:
//     x    in register 0 (g, 2t) and (g, 2t + 1), in 1 those of row g + 8, in 2 and 3 those of columns 8 further on
//     y    in register 0 (2t, g) and (2t + 1, g), in 1 those of rows 8 further on
//     sum  (g, 2t) and (g, 2t + 1), then those of row g + 8, as four floats
// So the sums of two products beside each other are, rounded, the left factor of the next product.

typedef unsigned int Pair;
template <class E> struct Format { static const bool brain = false; static const unsigned int exponent = 0x7c00; };
template <> struct Format<Bfloat16> { static const bool brain = true; static const unsigned int exponent = 0x7f80; };
__device__ inline bool is_nonfinite(T x) { return (x.bits & Format<T>::exponent) == Format<T>::exponent; }
__device__ inline Pair nonfinite_bits(Pair x) {  // not 0 where one of the two is not finite: its exponent carries
    const Pair exponents = Format<T>::exponent * 0x10001u;
    return ((x & exponents) + (0x80008000u - exponents)) & 0x80008000u;
}

#ifdef SHIM
inline void mma(float (&sum)[4], const Pair (&x)[4], Pair y0, Pair y1) {
    shim::mma(sum, x, y0, y1, [](unsigned short bits) { return widen(T{bits}); });
}
template <bool TRANSPOSED> void load_matrices(const T* line, Pair (&to)[4]) {
    shim::load_matrices(TRANSPOSED, line, to);
}
#else
#define PRODUCT(shape, type, x_registers, y_registers, ...) \
    asm("mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 " \
        "{%0, %1, %2, %3}, {" x_registers "}, {" y_registers "}, {%0, %1, %2, %3};" \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : __VA_ARGS__)
__device__ inline void mma(float (&sum)[4], const Pair (&x)[4], Pair y0, Pair y1) {
#if __CUDA_ARCH__ >= 800
#define PRODUCT16(type) \
    PRODUCT("m16n8k16", type, "%4, %5, %6, %7", "%8, %9", \
            "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1))
    if (Format<T>::brain) PRODUCT16("bf16");
    else PRODUCT16("f16");
#else  // no bfloat16 there
    PRODUCT("m16n8k8", "f16", "%4, %5", "%6", "r"(x[0]), "r"(x[1]), "r"(y0));
    PRODUCT("m16n8k8", "f16", "%4, %5", "%6", "r"(x[2]), "r"(x[3]), "r"(y1));
#endif
}
// Four matrices of 8 lines and 8 elements as registers of a fragment, or their transposes. Eight lanes name the lines of
// a matrix; lane 4g + t gets the elements 2t and 2t + 1 of line g of each.
template <bool TRANSPOSED> __device__ inline void load_matrices(const T* line, Pair (&to)[4]) {
#define LOAD(how) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0, %1, %2, %3}, [%4];" \
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place) : "memory")
    unsigned int place = (unsigned int)__cvta_generic_to_shared(line);
    if (TRANSPOSED) LOAD(".trans");
    else LOAD("");
}
#endif

// Two numbers as neighbours, rounded.
__device__ inline Pair pair(float low, float high) {
#if !defined(SHIM) && __CUDA_ARCH__ >= 800
    Pair to;
    if (Format<T>::brain) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
    return to;
#else
    T a, b;
    narrow(low, a);
    narrow(high, b);
    return a.bits | Pair(b.bits) << 16;
#endif
}
