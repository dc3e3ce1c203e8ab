/* What stands between the matrix products of a decoder's layer on CPU cores, forward and backward: norms, rotary
positions and the gate, in one walk each; layer.py calls it.

All is computed in float32 and rounded once. The gradient of a weight is summed in PARTS runs of rows, whatever the number
of threads, so that its sum has one order.

Letters: N rows (tokens), W width, H heads, D head width, a multiple of 2 * LANES; W is a multiple of LANES. */
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include "vectors.h"

#define PARTS 16

typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

/* The arguments of every walk. The gate is computed elementwise, of x, which opens it. */
typedef struct {
    int64_t num_rows, num_heads, width, is_bf16; /* N; H, 1 without heads; W, or D; a multiple of LANES */
    double eps;
    const void *x, *weight; /* (N, W) or (N, H, D), and (W,) or (D,), or NULL */
    const void *cos, *sin;  /* (N, D / 2) */
    const void *up, *d_y, *added; /* as x: `added` is the gradient that x gets elsewhere */
    void *y, *d_x, *d_up;         /* as x */
    float *scales;                /* (N,) */
    float *d_weights;             /* (PARTS, W) or (PARTS, D) */
} Walk;

/* Elements `at` and following. */
INLINE vec take(const int is_bf16, const void *from, int64_t at) {
    if (!is_bf16) return load((const float *)from + at);
    return (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)from + at), words) << 16);
}

INLINE void give(const int is_bf16, void *to, int64_t at, vec x) {
    if (!is_bf16) {
        store((float *)to + at, x);
        return;
    }
#if defined(__AVX512BF16__)
    halves rounded = (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x, is_nan = (words)(x != x);
    words nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    halves rounded = __builtin_convertvector((is_nan & 0x7FC0) | (~is_nan & nearest), halves);
#endif
    *(halves *)((uint16_t *)to + at) = rounded;
}

INLINE void add_to(float *sums, vec x) { store(sums, load(sums) + x); }

/* Rows of a run: the first of it and, with `part` + 1, the end. */
INLINE int64_t begin_of(int64_t num_rows, int64_t part) { return num_rows * part / PARTS; }

INLINE void norm_rows(const int is_bf16, const Walk *a, int64_t first, int64_t end) {
    const int64_t W = a->width;
    for (int64_t row = first, at = first * W; row < end; row++, at += W) {
        vec squares = {};
        for (int64_t i = 0; i < W; i += LANES) squares += take(is_bf16, a->x, at + i) * take(is_bf16, a->x, at + i);
        float scale = a->scales[row] = 1 / sqrtf(sum_of(squares) / W + (float)a->eps);
        for (int64_t i = 0; i < W; i += LANES)
            give(is_bf16, a->y, at + i, take(is_bf16, a->x, at + i) * scale * take(is_bf16, a->weight, i));
    }
}

INLINE void norm_rows_back(const int is_bf16, const Walk *a, int64_t first, int64_t end, float *d_weight) {
    const int64_t W = a->width;
    memset(d_weight, 0, W * sizeof(float));
    for (int64_t row = first, at = first * W; row < end; row++, at += W) {
        float scale = a->scales[row];
        vec products = {};
        for (int64_t i = 0; i < W; i += LANES) {
            vec normed = take(is_bf16, a->x, at + i) * scale, d_y = take(is_bf16, a->d_y, at + i);
            products += d_y * take(is_bf16, a->weight, i) * normed;
            add_to(d_weight + i, d_y * normed);
        }
        float mean = sum_of(products) / W;
        for (int64_t i = 0; i < W; i += LANES) {
            vec normed = take(is_bf16, a->x, at + i) * scale;
            vec d_x = (take(is_bf16, a->d_y, at + i) * take(is_bf16, a->weight, i) - normed * mean) * scale;
            give(is_bf16, a->d_x, at + i, d_x + take(is_bf16, a->added, at + i));
        }
    }
}

/* 1 over the root mean square of a head, 1 where heads are not normed. */
INLINE float scale_of(const int is_bf16, const Walk *a, int64_t at) {
    const int64_t D = a->width;
    if (!a->weight) return 1;
    vec squares = {};
    for (int64_t d = 0; d < D; d += LANES) squares += take(is_bf16, a->x, at + d) * take(is_bf16, a->x, at + d);
    return 1 / sqrtf(sum_of(squares) / D + (float)a->eps);
}

INLINE vec gain_at(const int is_bf16, const Walk *a, int64_t d) {
    return a->weight ? take(is_bf16, a->weight, d) : all(1);
}

INLINE void rotate_rows(const int is_bf16, const Walk *a, int64_t first, int64_t end) {
    const int64_t D = a->width, half = D / 2, H = a->num_heads;
    for (int64_t head = first * H, at = head * D; head < end * H; head++, at += D) {
        float scale = scale_of(is_bf16, a, at);
        for (int64_t d = 0, turn = head / H * half; d < half; d += LANES) {
            vec cos = take(is_bf16, a->cos, turn + d), sin = take(is_bf16, a->sin, turn + d);
            vec low = take(is_bf16, a->x, at + d) * scale * gain_at(is_bf16, a, d);
            vec high = take(is_bf16, a->x, at + half + d) * scale * gain_at(is_bf16, a, half + d);
            give(is_bf16, a->y, at + d, low * cos - high * sin);
            give(is_bf16, a->y, at + half + d, high * cos + low * sin);
        }
    }
}

INLINE void rotate_rows_back(const int is_bf16, const Walk *a, int64_t first, int64_t end, float *d_gain) {
    const int64_t D = a->width, half = D / 2, H = a->num_heads;
    if (a->weight) memset(d_gain, 0, D * sizeof(float));
    for (int64_t head = first * H, at = head * D; head < end * H; head++, at += D) {
        float scale = scale_of(is_bf16, a, at), mean = 0;
        for (int pass = a->weight ? 0 : 1; pass < 2; pass++) { /* the mean of all must be known first */
            vec products = {};
            for (int64_t d = 0, turn = head / H * half; d < half; d += LANES) {
                vec cos = take(is_bf16, a->cos, turn + d), sin = take(is_bf16, a->sin, turn + d);
                vec d_low = take(is_bf16, a->d_y, at + d), d_high = take(is_bf16, a->d_y, at + half + d);
                vec back_low = d_low * cos + d_high * sin, back_high = d_high * cos - d_low * sin;
                vec low = take(is_bf16, a->x, at + d) * scale, high = take(is_bf16, a->x, at + half + d) * scale;
                vec of_low = back_low * gain_at(is_bf16, a, d), of_high = back_high * gain_at(is_bf16, a, half + d);
                if (pass == 0) {
                    products += of_low * low + of_high * high;
                    add_to(d_gain + d, back_low * low);
                    add_to(d_gain + half + d, back_high * high);
                } else {
                    give(is_bf16, a->d_x, at + d, (of_low - low * mean) * scale);
                    give(is_bf16, a->d_x, at + half + d, (of_high - high * mean) * scale);
                }
            }
            if (pass == 0) mean = sum_of(products) / D;
        }
    }
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_of(-at_least(-80.0f, x))); /* below it is as good as 0 */ }

INLINE void gate_all(const int is_bf16, const Walk *a, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i += LANES) {
        vec gate = take(is_bf16, a->x, i);
        give(is_bf16, a->y, i, gate * sigmoid(gate) * take(is_bf16, a->up, i));
    }
}

INLINE void gate_all_back(const int is_bf16, const Walk *a, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i += LANES) {
        vec gate = take(is_bf16, a->x, i), up = take(is_bf16, a->up, i), d_y = take(is_bf16, a->d_y, i);
        vec opened = sigmoid(gate), kept = gate * opened;
        give(is_bf16, a->d_up, i, d_y * kept);
        give(is_bf16, a->d_x, i, d_y * up * (opened + kept * (1.0f - opened)));
    }
}

/* Runs `first` to `end` - 1 of the PARTS runs of rows; the same of each function below. */
void norm(const Walk *a, int64_t first, int64_t end) {
    int64_t from = begin_of(a->num_rows, first), to = begin_of(a->num_rows, end);
    a->is_bf16 ? norm_rows(1, a, from, to) : norm_rows(0, a, from, to);
}

void norm_back(const Walk *a, int64_t first, int64_t end) {
    for (int64_t part = first; part < end; part++) {
        int64_t from = begin_of(a->num_rows, part), to = begin_of(a->num_rows, part + 1);
        float *d_weight = a->d_weights + part * a->width;
        a->is_bf16 ? norm_rows_back(1, a, from, to, d_weight) : norm_rows_back(0, a, from, to, d_weight);
    }
}

void rotate(const Walk *a, int64_t first, int64_t end) {
    int64_t from = begin_of(a->num_rows, first), to = begin_of(a->num_rows, end);
    a->is_bf16 ? rotate_rows(1, a, from, to) : rotate_rows(0, a, from, to);
}

void rotate_back(const Walk *a, int64_t first, int64_t end) {
    for (int64_t part = first; part < end; part++) {
        int64_t from = begin_of(a->num_rows, part), to = begin_of(a->num_rows, part + 1);
        float *d_gain = a->d_weights + part * a->width;
        a->is_bf16 ? rotate_rows_back(1, a, from, to, d_gain) : rotate_rows_back(0, a, from, to, d_gain);
    }
}

INLINE int64_t elements(const Walk *a) { return a->num_rows * a->num_heads * a->width; }

void gate(const Walk *a, int64_t first, int64_t end) {
    int64_t from = begin_of(elements(a) / LANES, first) * LANES, to = begin_of(elements(a) / LANES, end) * LANES;
    a->is_bf16 ? gate_all(1, a, from, to) : gate_all(0, a, from, to);
}

void gate_back(const Walk *a, int64_t first, int64_t end) {
    int64_t from = begin_of(elements(a) / LANES, first) * LANES, to = begin_of(elements(a) / LANES, end) * LANES;
    a->is_bf16 ? gate_all_back(1, a, from, to) : gate_all_back(0, a, from, to);
}
