/* Vectors of floats as wide as the processor's, and what our kernels do with them: loads, sums, exp, bfloat16. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));
#if defined(__clang__)
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#else
typedef int32_t four_ints __attribute__((vector_size(16)));
#define EVEN(a, b) __builtin_shuffle(a, b, (four_ints){0, 2, 4, 6})
#define ODD(a, b) __builtin_shuffle(a, b, (four_ints){1, 3, 5, 7})
#endif

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec all(float value) { return value - (vec){}; }

/* The larger of each; NaN stays NaN. */
INLINE vec at_least(float limit, vec x) {
    ints below = x < all(limit);
    return (vec)((below & (ints)all(limit)) | (~below & (ints)x));
}

INLINE four quarter_of(vec value) {
    float part[LANES];
    store(part, value);
    four sum = *(four *)part;
    for (int i = 4; i < LANES; i += 4) sum += *(four *)(part + i);
    return sum;
}

INLINE float sum_of(vec value) {
    four sum = quarter_of(value);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The sums of four vectors, each in the order of sum_of. */
INLINE four sums_of(vec a, vec b, vec c, vec d) {
    four w = quarter_of(a), x = quarter_of(b), y = quarter_of(c), z = quarter_of(d);
    four wx = EVEN(w, x) + ODD(w, x), yz = EVEN(y, z) + ODD(y, z);
    return EVEN(wx, yz) + ODD(wx, yz);
}

/* exp for x <= 88; exactly 0 below -87, NaN for NaN. Cephes' expf: within 2 units of the last place. */
INLINE vec exp_of(vec given) {
    vec x = at_least(-87.0f, given);
    vec shifted = x * 1.44269504f + 12582912.0f;
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints exponent = ((ints)shifted - 0x4B400000 + 127) << 23;
    ints vanishes = given < all(-87.0f);
    return (vec)(~vanishes & (ints)(p * (vec)exponent));
}

INLINE vec larger(vec a, vec b) {
    ints above = a > b;
    return (vec)((above & (ints)a) | (~above & (ints)b));
}

/* NaN is passed over. */
INLINE float highest_of(const float *scores, int64_t count) {
    vec highest[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)}; /* they wait for one another less */
    int64_t j = 0;
    for (; j + 4 * LANES <= count; j += 4 * LANES)
        for (int i = 0; i < 4; i++) highest[i] = larger(load(scores + j + i * LANES), highest[i]);
    for (; j + LANES <= count; j += LANES) highest[0] = larger(load(scores + j), highest[0]);
    vec most = larger(larger(highest[0], highest[1]), larger(highest[2], highest[3]));
    float top = -INFINITY;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (; j < count; j++) top = scores[j] > top ? scores[j] : top;
    return top;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest bfloat16, of two the even one; NaN stays NaN. */
INLINE void round_to_bf16(int64_t count, const float *from, uint16_t *to) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, 4);
        uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}
