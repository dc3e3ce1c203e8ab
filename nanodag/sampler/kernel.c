/* Prompts and decode steps of a decoder on one CPU core: what model.py's `prefill`, `decode` and `logits`, drawing.py's
`draw` and slots.py's `record` do, each in one call.

A matrix is float32 or bfloat16, and so is the cache; everything else is float32. What is multiplied by a bfloat16
matrix is rounded to bfloat16 first, and the products are summed in float32. Attention rounds what it puts into a cache
of bfloat16 and nothing else.

Such a cache has pairs where that of float32 has (C, D) of each head: of neighbours in a key, those of TOKENS tokens side
by side, (C / TOKENS, D / 2, TOKENS, 2); of values of two tokens, (C / 2, D, 2). So no score is summed across a vector,
and TOKENS tokens lie together in either.

Every sum has one order, whatever the number of rows: an element of a matrix product is a chain of fused multiply-adds
over ascending k, or pairs of k, and rows are blocked so that a weight that was read is used for all rows of a block. So
a row has the same bits alone and among others, and a token the same in a prompt and decoded, by construction.
Deterministic mode needs that.

Letters as in model.py: R rows, H hidden, K key/value heads, G query heads of each, D head, F intermediate, C capacity.
Widths are multiples of LANES; kernel.py sees to that. */
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include "vectors.h"

#if LANES == 16
#define PANEL 4
#else
#define PANEL 2
#endif
#define ROWS 6 /* x PANEL accumulators fit the registers */
#define BLOCK 64 /* of the vocabulary, whose width is a multiple of it */
#define WIDE 1024 /* floats: narrower matrices are read where they are, 4 % faster; wider ones 25 to 45 % slower */
#define CHAINS 8 /* of additions, each of which waits for the one before: so many keep two multipliers busy */
#define LINE 16 /* floats of a line of the cache */
#define AHEAD 8 /* rows of a matrix that are asked for before they are needed */
#define TOKENS 16 /* of a block of a cache of bfloat16 */
typedef uint32_t pairs __attribute__((vector_size(4 * LANES), aligned(4))); /* of bfloat16: the one of lower k below */

typedef struct {
    const void *at; /* (depth, width) or NULL */
    int64_t is_bf16;
} Matrix;

typedef struct {
    Matrix qkv, output, gate_up, down;
    const float *qkv_bias, *qk_gain, *output_bias;
    void *keys, *values;
    int64_t is_rotated, window; /* window: tokens that one sees, 0 for all before it */
} Layer;

typedef struct {
    int64_t num_layers, hidden_size, num_kv_heads, heads_per_kv, head_dim, intermediate_size, vocab_size, vocab_width,
        capacity, hidden_stride, cache_is_bf16;
    double norm_eps;
    Matrix embedding; /* NULL: tied, a token is a column of head */
    Matrix head;
    const float *norm, *rotations;
    const Layer *layers;
    float *hidden, *normed, *qkv, *attended, *gate_up, *activated, *logits, *scratch; /* scratch: max(C, V / BLOCK) */
    uint16_t *rounded; /* (R, depth) of the deepest matrix */
    uint32_t *packed;  /* (depth, PANEL * 16) of the deepest matrix */
} Model;

/* The arrays of slots.py's SlotTable, and what this step drew: (B,), but for output_ids and logprobs (B, C) and stop_ids
(B, stop_width). */
typedef struct {
    int64_t capacity, stop_width;
    const uint8_t *active, *greedy;
    const float *temperature;
    const double *top_p;
    const int64_t *top_k, *limits, *stop_ids;
    const uint64_t *keys;
    int64_t *tokens, *positions, *counts, *output_ids;
    double *logprobs;
    int64_t *drawn_tokens;
    double *drawn_logprobs;
    uint8_t *outcomes;
} Table;

enum { GOES_ON, ENDED, BROKEN };

/* `rows` x `panels` vectors of y = (add ? y : 0) + x w, whose rows have `width` elements. */
INLINE void panel(const int rows, const int panels, int64_t depth, const float *x, int64_t x_stride, const float *w,
                  int64_t width, float *y, int64_t y_stride, int add) {
    vec sums[ROWS][PANEL];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sums[r][p] = add ? load(y + r * y_stride + p * LANES) : (vec){};
    for (int64_t k = 0; k < depth; k++) {
        const float *row = w + k * width;
        vec weights[PANEL];
        for (int p = 0; p < panels; p++) {
            __builtin_prefetch(row + AHEAD * width + p * LANES);
            weights[p] = load(row + p * LANES);
        }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) sums[r][p] += x[r * x_stride + k] * weights[p];
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) store(y + r * y_stride + p * LANES, sums[r][p]);
}

/* One row: the matrix is read front to back, eight rows side by side, and y stays in the nearest cache. */
static void one_row(int64_t depth, const float *x, const float *w, int64_t width, float *y, int add) {
    if (!add)
        for (int64_t n = 0; n < width; n += LANES) store(y + n, (vec){});
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) {
        const float *a = w + k * width, *b = a + width, *c = b + width, *d = c + width;
        const float *e = d + width, *f = e + width, *g = f + width, *h = g + width;
        for (int64_t n = 0; n < width; n += LANES) {
            vec sum = load(y + n);
            sum += x[k] * load(a + n);
            sum += x[k + 1] * load(b + n);
            sum += x[k + 2] * load(c + n);
            sum += x[k + 3] * load(d + n);
            sum += x[k + 4] * load(e + n);
            sum += x[k + 5] * load(f + n);
            sum += x[k + 6] * load(g + n);
            sum += x[k + 7] * load(h + n);
            store(y + n, sum);
        }
    }
    for (; k < depth; k++)
        for (int64_t n = 0; n < width; n += LANES) store(y + n, load(y + n) + x[k] * load(w + k * width + n));
}

/* All rows of one panel of w, which stays in the nearest cache meanwhile. */
INLINE void column_of(const int panels, int64_t rows, int64_t depth, const float *x, int64_t x_stride, const float *w,
                      int64_t width, float *y, int64_t y_stride, int add) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        panel(ROWS, panels, depth, x + r * x_stride, x_stride, w, width, y + r * y_stride, y_stride, add);
    x += r * x_stride;
    y += r * y_stride;
    switch (rows - r) {
        case 1: panel(1, panels, depth, x, x_stride, w, width, y, y_stride, add); break;
        case 2: panel(2, panels, depth, x, x_stride, w, width, y, y_stride, add); break;
        case 3: panel(3, panels, depth, x, x_stride, w, width, y, y_stride, add); break;
        case 4: panel(4, panels, depth, x, x_stride, w, width, y, y_stride, add); break;
        case 5: panel(5, panels, depth, x, x_stride, w, width, y, y_stride, add); break;
    }
}

/* `columns` of w, near one another: rows of a wide w would meet in few sets of the cache. The columns behind them are
asked for: they come while these are multiplied. */
INLINE void gather(const int columns, int64_t depth, const float *w, int64_t width, float *packed) {
    for (int64_t k = 0; k < depth; k++, w += width, packed += columns) {
        for (int n = 0; n < columns; n += LINE) __builtin_prefetch(w + columns + n);
        for (int n = 0; n < columns; n += LANES) store(packed + n, load(w + n));
    }
}

static void float_product(const Model *m, int64_t rows, int64_t depth, const float *x, int64_t x_stride, const float *w,
                          int64_t width, float *y, int64_t y_stride, int add) {
    if (rows == 1) {
        one_row(depth, x, w, width, y, add);
        return;
    }
    float *packed = (float *)m->packed;
    int64_t n = 0, is_gathered = rows > ROWS && width >= WIDE; /* what is gathered is read more than once */
    for (; n + PANEL * LANES <= width; n += PANEL * LANES)
        if (is_gathered) {
            gather(PANEL * LANES, depth, w + n, width, packed);
            column_of(PANEL, rows, depth, x, x_stride, packed, PANEL * LANES, y + n, y_stride, add);
        } else
            column_of(PANEL, rows, depth, x, x_stride, w + n, width, y + n, y_stride, add);
    for (; n < width; n += LANES) column_of(1, rows, depth, x, x_stride, w + n, width, y + n, y_stride, add);
}

/* sum + the product of the lower halves and that of the upper ones, added in the processor's order. */
INLINE vec add_pair(vec sum, uint32_t x, pairs w) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)w);
#else
    sum += float_of(x << 16) * (vec)(w << 16);
    return sum + float_of(x & 0xFFFF0000u) * (vec)(w & 0xFFFF0000u);
#endif
}

/* `columns` of w, row pairs interleaved: near one another, however wide w is. */
INLINE void pack(const int columns, int64_t depth, const uint16_t *w, int64_t width, uint32_t *packed) {
    for (int64_t k = 0; k < depth; k += 2, w += 2 * width, packed += columns) {
        __builtin_prefetch(w + AHEAD * width);
        __builtin_prefetch(w + (AHEAD + 1) * width);
        for (int n = 0; n < columns; n++) packed[n] = w[n] | (uint32_t)w[width + n] << 16;
    }
}

/* `rows` x `panels` vectors of y = (add ? y : 0) + x w, where x and w are pairs of bfloat16. Meanwhile one line
of each pair of rows of another panel, `behind`, is asked for: it is packed next. */
INLINE void paired_panel(const int rows, const int panels, int64_t num_pairs, const uint16_t *x, int64_t x_stride,
                         const uint32_t *w, float *y, int64_t y_stride, int add, const uint16_t *behind,
                         int64_t width) {
    vec sums[ROWS][PANEL];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sums[r][p] = add ? load(y + r * y_stride + p * LANES) : (vec){};
    for (int64_t k = 0; k < num_pairs; k++, w += panels * LANES) {
        pairs weights[PANEL];
        __builtin_prefetch(behind + 2 * k * width, 0, 2); /* into the second cache: the first is full */
        for (int p = 0; p < panels; p++) weights[p] = *(const pairs *)(w + p * LANES);
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * x_stride + 2 * k, 4);
            for (int p = 0; p < panels; p++) sums[r][p] = add_pair(sums[r][p], pair, weights[p]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) store(y + r * y_stride + p * LANES, sums[r][p]);
}

/* All rows of one panel of w. x: (rows, depth). */
INLINE void paired_column(const Model *m, const int panels, int64_t rows, int64_t depth, const uint16_t *x,
                          const uint16_t *w, int64_t width, float *y, int64_t y_stride, int add) {
    const uint32_t *packed = m->packed;
    pack(panels * LANES, depth, w, width, m->packed);
    int64_t r = 0;
    const uint16_t *behind = w + panels * LANES; /* the next panel, of which a pair of rows has four lines */
    for (; r + ROWS <= rows; r += ROWS) {
        const int64_t line = r / ROWS, at = line % 2 * width + line / 2 % 2 * 2 * LINE;
        paired_panel(ROWS, panels, depth / 2, x + r * depth, depth, packed, y + r * y_stride, y_stride, add, behind + at,
                     width);
    }
    x += r * depth;
    y += r * y_stride;
    switch (rows - r) {
        case 1: paired_panel(1, panels, depth / 2, x, depth, packed, y, y_stride, add, behind, width); break;
        case 2: paired_panel(2, panels, depth / 2, x, depth, packed, y, y_stride, add, behind, width); break;
        case 3: paired_panel(3, panels, depth / 2, x, depth, packed, y, y_stride, add, behind, width); break;
        case 4: paired_panel(4, panels, depth / 2, x, depth, packed, y, y_stride, add, behind, width); break;
        case 5: paired_panel(5, panels, depth / 2, x, depth, packed, y, y_stride, add, behind, width); break;
    }
}

static void bf16_product(const Model *m, int64_t rows, int64_t depth, const float *x, int64_t x_stride, const uint16_t *w,
                         int64_t width, float *y, int64_t y_stride, int add) {
    for (int64_t r = 0; r < rows; r++) round_to_bf16(depth, x + r * x_stride, m->rounded + r * depth);
    int64_t n = 0;
    for (; n + PANEL * LANES <= width; n += PANEL * LANES)
        paired_column(m, PANEL, rows, depth, m->rounded, w + n, width, y + n, y_stride, add);
    for (; n < width; n += LANES) paired_column(m, 1, rows, depth, m->rounded, w + n, width, y + n, y_stride, add);
}

/* y (rows, width) = (add ? y : 0) + x (rows, depth) w (depth, width). */
static void product(const Model *m, int64_t rows, int64_t depth, const float *x, int64_t x_stride, Matrix w, int64_t width,
                    float *y, int64_t y_stride, int add) {
    if (w.is_bf16)
        bf16_product(m, rows, depth, x, x_stride, w.at, width, y, y_stride, add);
    else
        float_product(m, rows, depth, x, x_stride, w.at, width, y, y_stride, add);
}

INLINE float element(Matrix matrix, int64_t index) {
    return matrix.is_bf16 ? float_of((uint32_t)((const uint16_t *)matrix.at)[index] << 16)
                          : ((const float *)matrix.at)[index];
}

/* normed = x / sqrt(|x|^2 + H eps), times a factor and, where there is one, a gain. */
static void normalise(const Model *m, int64_t row, float factor, const float *gain) {
    const float *x = m->hidden + row * m->hidden_stride;
    float *normed = m->normed + row * m->hidden_size;
    vec squares = {};
    for (int64_t i = 0; i < m->hidden_size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = factor / sqrtf(sum_of(squares) + (float)(m->hidden_size * m->norm_eps));
    for (int64_t i = 0; i < m->hidden_size; i += LANES)
        store(normed + i, gain ? load(x + i) * scale * load(gain + i) : load(x + i) * scale);
}

/* As round_to_bf16, into the upper halves. */
INLINE pairs rounded_bits(vec x) {
    pairs bits = (pairs)x, is_nan = (pairs)(x != x);
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & ~is_nan & 0xFFFF0000u) | (is_nan & 0x7FC00000);
}

/* A key and a value into a cache of bfloat16. The first of two values leaves a zero for the second: what was there
before may not be a number. */
static void append_pairs(const Model *m, const Layer *layer, const float *key, const float *value, int64_t slot,
                         int64_t position) {
    const int64_t D = m->head_dim, at = slot * m->capacity * D / 2;
    uint32_t *keys = (uint32_t *)layer->keys + at + position / TOKENS * TOKENS * D / 2 + position % TOKENS;
    uint32_t *values = (uint32_t *)layer->values + at + position / 2 * D;
    uint32_t of_key[LANES];
    for (int64_t d = 0; d < D; d += LANES) {
        *(pairs *)of_key = rounded_bits(load(key + d));
        for (int i = 0; i < LANES; i += 2) keys[(d + i) / 2 * TOKENS] = of_key[i] >> 16 | of_key[i + 1];
        pairs bits = rounded_bits(load(value + d)), *two = (pairs *)(values + d);
        *two = position % 2 ? (*two & 0xFFFF) | bits : bits >> 16;
    }
}

/* Norm and rotate the queries and the key of one key/value head, and append key and value to the cache. */
static void place(const Model *m, const Layer *layer, float *heads, int64_t slot, int64_t position) {
    const int64_t D = m->head_dim, G = m->heads_per_kv;
    const float *turn = m->rotations + position * D;
    for (int64_t j = 0; j <= G; j++) {
        float *head = heads + j * D, scale = 1;
        if (layer->qk_gain) {
            vec squares = {};
            for (int64_t d = 0; d < D; d += LANES) squares += load(head + d) * load(head + d);
            scale = 1 / sqrtf(sum_of(squares) / D + (float)m->norm_eps);
            for (int64_t d = 0; d < D; d += LANES)
                store(head + d, load(head + d) * scale * load(layer->qk_gain + j * D + d));
        }
        if (!layer->is_rotated) continue;
        for (int64_t d = 0; d < D; d += 2) {
            float real = head[d], imaginary = head[d + 1];
            head[d] = real * turn[d] - imaginary * turn[d + 1];
            head[d + 1] = real * turn[d + 1] + imaginary * turn[d];
        }
    }
    const float *key = heads + G * D, *value = key + D;
    if (m->cache_is_bf16) {
        append_pairs(m, layer, key, value, slot, position);
        return;
    }
    int64_t at = (slot * m->capacity + position) * D;
    for (int64_t d = 0; d < D; d += LANES) {
        store((float *)layer->keys + at + d, load(key + d));
        store((float *)layer->values + at + d, load(value + d));
    }
}

/* Scores become exponentials, zeros for the first, `outside` of them, and up to the next vector; returns 1 / their
sum. */
INLINE float weigh(int64_t outside, int64_t length, float *scores) {
    for (int64_t l = 0; l < outside; l++) scores[l] = -INFINITY;
    float highest = highest_of(scores, length);
    for (int64_t l = length; l % LANES; l++) scores[l] = -INFINITY;
    vec totals = {};
    for (int64_t l = 0; l < length; l += LANES) {
        vec weights = exp_of(load(scores + l) - highest);
        store(scores + l, weights);
        totals += weights;
    }
    return 1 / sum_of(totals);
}

/* Attention of one query head, of `parts` vectors, over `length` tokens of one slot of the cache, of which it does not
see the first, `outside` of them. The slot that comes next is asked for meanwhile: it lies `next` floats behind, and all
slots together are more than the near cache holds. */
INLINE void attend_to_floats(const int parts, const float *query, const float *keys, const float *values,
                             int64_t outside, int64_t length, int64_t next, float *scores, float *out) {
    const int64_t D = parts * LANES;
    float scale = 1 / sqrtf((float)D);
    int64_t l = 0;
    for (; l + 4 <= length; l += 4) {
        vec sums[4];
        for (int64_t i = 0; i < 4 * D; i += LINE) __builtin_prefetch(keys + next + l * D + i);
        for (int i = 0; i < 4; i++) {
            sums[i] = load(query) * load(keys + (l + i) * D);
            for (int p = 1; p < parts; p++) sums[i] += load(query + p * LANES) * load(keys + (l + i) * D + p * LANES);
        }
        *(four *)(scores + l) = sums_of(sums[0], sums[1], sums[2], sums[3]) * scale;
    }
    for (; l < length; l++) {
        vec sums = load(query) * load(keys + l * D);
        for (int p = 1; p < parts; p++) sums += load(query + p * LANES) * load(keys + l * D + p * LANES);
        scores[l] = sum_of(sums) * scale;
    }
    float inverse = weigh(outside, length, scores);
    const int wide = parts % 4 ? parts % 2 ? 1 : 2 : 4, apart = CHAINS / wide; /* vectors at a time, sums of each */
    for (int p = 0; p < parts; p += wide) {
        vec sums[CHAINS] = {};
        for (l = 0; l + apart <= length; l += apart) {
            for (int64_t i = 0; i < apart * wide * LANES; i += LINE)
                __builtin_prefetch(values + next + (l + i / (wide * LANES)) * D + p * LANES + i % (wide * LANES));
            for (int i = 0; i < CHAINS; i++)
                sums[i] += scores[l + i / wide] * load(values + (l + i / wide) * D + (p + i % wide) * LANES);
        }
        for (; l < length; l++)
            for (int i = 0; i < wide; i++) sums[i] += scores[l] * load(values + l * D + (p + i) * LANES);
        for (int i = 0; i < wide; i++) {
            for (int j = i + wide; j < CHAINS; j += wide) sums[i] += sums[j];
            store(out + (p + i) * LANES, sums[i] * inverse);
        }
    }
}

INLINE vec lower(pairs two) { return (vec)(two << 16); }
INLINE vec upper(pairs two) { return (vec)(two & 0xFFFF0000u); }

/* The same over a cache of bfloat16. `next`: in pairs. Of the last two values one may be past the length: its weight is
zero. */
INLINE void attend_to_pairs(const int parts, const float *query, const uint32_t *keys, const uint32_t *values,
                            int64_t outside, int64_t length, int64_t next, float *scores, float *out) {
    const int64_t D = parts * LANES;
    float scale = 1 / sqrtf((float)D);
    for (int64_t l = 0; l < length; l += LANES) {
        const uint32_t *of = keys + l / TOKENS * TOKENS * D / 2 + l % TOKENS;
        vec sums[CHAINS] = {};
        for (int64_t d = 0; d < D / 2; d += CHAINS / 2)
            for (int i = 0; i < CHAINS; i += 2) {
                const uint32_t *at = of + (d + i / 2) * TOKENS;
                __builtin_prefetch(at + next);
                pairs two = *(const pairs *)at;
                sums[i] += query[2 * d + i] * lower(two);
                sums[i + 1] += query[2 * d + i + 1] * upper(two);
            }
        for (int i = CHAINS / 2; i; i /= 2)
            for (int j = 0; j < i; j++) sums[j] += sums[j + i];
        store(scores + l, sums[0] * scale);
    }
    float inverse = weigh(outside, length, scores);
    const int wide = parts % 4 == 0 ? 4 : parts % 3 == 0 ? 3 : parts % 2 == 0 ? 2 : 1; /* vectors at a time */
    const int apart = (CHAINS / 2 + wide - 1) / wide;                                  /* sums of each, twice */
    for (int p = 0; p < parts; p += wide) {
        vec sums[2 * CHAINS] = {};
        int64_t l = 0;
        for (; l + 2 * apart <= length; l += 2 * apart)
            for (int i = 0; i < apart * wide; i++) {
                const float *weights = scores + l + i / wide * 2;
                const uint32_t *at = values + (l / 2 + i / wide) * D + (p + i % wide) * LANES;
                __builtin_prefetch(at + next);
                pairs two = *(const pairs *)at;
                sums[2 * i] += weights[0] * lower(two);
                sums[2 * i + 1] += weights[1] * upper(two);
            }
        for (; l < length; l += 2)
            for (int i = 0; i < wide; i++) {
                pairs two = *(const pairs *)(values + l / 2 * D + (p + i) * LANES);
                sums[2 * i] += scores[l] * lower(two);
                sums[2 * i + 1] += scores[l + 1] * upper(two);
            }
        for (int i = 0; i < wide; i++) {
            vec sum = sums[2 * i] + sums[2 * i + 1];
            for (int j = i + wide; j < apart * wide; j += wide) sum += sums[2 * j] + sums[2 * j + 1];
            store(out + (p + i) * LANES, sum * inverse);
        }
    }
}

/* keys, values: of one slot and head. */
INLINE void attend_over(const Model *m, const int parts, const float *query, const void *keys, const void *values,
                        int64_t outside, int64_t length, float *out) {
    const int64_t each = m->capacity * parts * LANES;
    if (m->cache_is_bf16)
        attend_to_pairs(parts, query, keys, values, outside, length, each / 2, m->scratch, out);
    else
        attend_to_floats(parts, query, keys, values, outside, length, each, m->scratch, out);
}

static void attend(const Model *m, const Layer *layer, const float *query, int64_t slot, int64_t length, float *out) {
    const int64_t D = m->head_dim;
    int64_t outside = layer->window && layer->window < length ? length - layer->window : 0;
    const int64_t skipped = outside / TOKENS * TOKENS; /* whole blocks of the cache */
    const int64_t at = (slot * m->capacity + skipped) * D * (m->cache_is_bf16 ? 2 : 4);
    const char *keys = (const char *)layer->keys + at, *values = (const char *)layer->values + at;
    outside -= skipped, length -= skipped;
    switch (D / LANES) { /* a number that is known is unrolled: twice as fast */
        case 1: attend_over(m, 1, query, keys, values, outside, length, out); break;
        case 2: attend_over(m, 2, query, keys, values, outside, length, out); break;
        case 3: attend_over(m, 3, query, keys, values, outside, length, out); break;
        case 4: attend_over(m, 4, query, keys, values, outside, length, out); break;
        case 6: attend_over(m, 6, query, keys, values, outside, length, out); break;
        case 8: attend_over(m, 8, query, keys, values, outside, length, out); break;
        case 12: attend_over(m, 12, query, keys, values, outside, length, out); break;
        case 16: attend_over(m, 16, query, keys, values, outside, length, out); break;
        default: attend_over(m, (int)(D / LANES), query, keys, values, outside, length, out);
    }
}

static void embed(const Model *m, int64_t rows, const int64_t *tokens) {
    const int64_t H = m->hidden_size;
    if (m->embedding.at)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < H; i++) m->hidden[r * m->hidden_stride + i] = element(m->embedding, tokens[r] * H + i);
    else /* a row of the head after the other: a column's elements lie in one set of the cache */
        for (int64_t i = 0; i < H; i++)
            for (int64_t r = 0; r < rows; r++)
                m->hidden[r * m->hidden_stride + i] = element(m->head, i * m->vocab_width + tokens[r]);
}

static void add_bias(float *y, const float *bias, int64_t width) {
    for (int64_t i = 0; bias && i < width; i += LANES) store(y + i, load(y + i) + load(bias + i));
}

/* Run one token a row and leave the last layer's output of the wanted rows in hidden, one after the other. tokens,
positions, slots: (R,), slots NULL where row r is that of slot r. wanted: numbers of rows, ascending; NULL for all. A row
sees what rows before it have put into the same slot. */
void forward(const Model *m, int64_t rows, const int64_t *tokens, const int64_t *positions, const int64_t *slots,
             int64_t num_wanted, const int64_t *wanted) {
    const int64_t H = m->hidden_size, K = m->num_kv_heads, G = m->heads_per_kv, D = m->head_dim, F = m->intermediate_size;
    const int64_t qkv_width = K * (G + 2) * D;
    embed(m, rows, tokens);
    for (const Layer *layer = m->layers; layer < m->layers + m->num_layers; layer++) {
        for (int64_t r = 0; r < rows; r++) normalise(m, r, 1, 0);
        product(m, rows, H, m->normed, H, layer->qkv, qkv_width, m->qkv, qkv_width, 0);
        const int selects = wanted && layer == m->layers + m->num_layers - 1;
        int64_t kept = 0;
        for (int64_t r = 0; r < rows; r++) {
            const int is_kept = !selects || (kept < num_wanted && r == wanted[kept]);
            add_bias(m->qkv + r * qkv_width, layer->qkv_bias, qkv_width);
            for (int64_t k = 0; k < K; k++) {
                float *heads = m->qkv + r * qkv_width + k * (G + 2) * D;
                int64_t of_cache = (slots ? slots[r] : r) * K + k;
                place(m, layer, heads, of_cache, positions[r]);
                for (int64_t g = 0; is_kept && g < G; g++)
                    attend(m, layer, heads + g * D, of_cache, positions[r] + 1, m->attended + ((kept * K + k) * G + g) * D);
            }
            if (!is_kept) continue;
            if (kept < r) memcpy(m->hidden + kept * m->hidden_stride, m->hidden + r * m->hidden_stride, H * sizeof(float));
            kept++;
        }
        rows = kept;
        product(m, rows, K * G * D, m->attended, K * G * D, layer->output, H, m->hidden, m->hidden_stride, 1);
        for (int64_t r = 0; r < rows; r++) {
            add_bias(m->hidden + r * m->hidden_stride, layer->output_bias, H);
            normalise(m, r, 1, 0);
        }
        product(m, rows, H, m->normed, H, layer->gate_up, 2 * F, m->gate_up, 2 * F, 0);
        for (int64_t r = 0; r < rows; r++) {
            const float *gate = m->gate_up + r * 2 * F;
            for (int64_t f = 0; f < F; f += LANES) {
                vec x = load(gate + f); /* below -80 it is as good as 0 */
                store(m->activated + r * F + f, x / (1.0f + exp_of(-at_least(-80.0f, x))) * load(gate + F + f));
            }
        }
        product(m, rows, F, m->activated, F, layer->down, H, m->hidden, m->hidden_stride, 1);
    }
}

/* One token of each of the first rows, whose cache grows by it where the row is active. */
void decode(const Model *m, const Table *t, int64_t rows) {
    forward(m, rows, t->tokens, t->positions, 0, 0, 0);
    for (int64_t r = 0; r < rows; r++) t->positions[r] += t->active[r];
}

/* Scores of the first rows over the temperature, in logits. */
void logits(const Model *m, const Table *t, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) normalise(m, r, 1 / t->temperature[r], m->norm);
    product(m, rows, m->hidden_size, m->normed, m->hidden_size, m->head, m->vocab_width, m->logits, m->vocab_width, 0);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = m->vocab_size; v < m->vocab_width; v++) m->logits[r * m->vocab_width + v] = -INFINITY;
}

/* SplitMix64's finalizer, as in drawing.py. */
static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

/* The sum of exponentials over the largest score, that of each BLOCK in `sums`. */
static double exponentials(const float *scores, int64_t width, float highest, float *sums) {
    double total = 0;
    for (int64_t v = 0; v < width; v += BLOCK) {
        vec sum = {};
        for (int i = 0; i < BLOCK; i += LANES) sum += exp_of(load(scores + v + i) - highest);
        total += sums[v / BLOCK] = sum_of(sum);
    }
    return total;
}

/* Where the first such score is, or the last place: a row without numbers has none. */
static int64_t first_of(const float *scores, int64_t width, float wanted) {
    int64_t v = 0;
    for (; v < width - BLOCK; v += BLOCK) {
        int is_here = 0;
        for (int i = 0; i < BLOCK; i++) is_here |= scores[v + i] == wanted;
        if (is_here) break;
    }
    while (v < width - 1 && scores[v] != wanted) v++;
    return v;
}

/* A token and its log-probability. is_greedy: the likeliest, else where a uniform number falls, which follows from the
row's key and count. What has probability 0 is never drawn: a sum that passes the target has grown. */
static int64_t draw_one(const Model *m, const Table *t, int64_t row, double *logprob) {
    const int64_t width = m->vocab_width;
    const float *scores = m->logits + row * width, highest = highest_of(scores, width);
    float *sums = m->scratch, block[BLOCK];
    double total = exponentials(scores, width, highest, sums), before = 0, probability;
    int64_t token = 0;
    if (t->greedy[row]) {
        token = first_of(scores, width, highest);
        probability = 1 / total;
    } else {
        double uniform = (mix(t->keys[row] + (uint64_t)(t->counts[row] + 1) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
        double target = fmin(uniform, 1 - 0x1p-52) * total;
        int64_t first = 0, place = 0, last = 0;
        for (; first < width - BLOCK && !(before + sums[first / BLOCK] > target); first += BLOCK)
            before += sums[first / BLOCK];
        for (int i = 0; i < BLOCK; i += LANES) store(block + i, exp_of(load(scores + first + i) - highest));
        /* The block's sum was rounded to float: what its elements add up to may be a little less. */
        for (int i = 0; i < BLOCK; i++)
            if (block[i] > 0) last = i;
        while (place < last && !(before + block[place] > target)) before += block[place++];
        token = first + place;
        probability = block[place] / total;
    }
    *logprob = log(probability > 1 ? 1 : probability); /* NaN stays NaN */
    return token;
}

/* Append what was drawn to a row; whether it ends with it. */
static uint8_t record(const Table *t, int64_t row) {
    int64_t token = t->drawn_tokens[row], count = t->counts[row]++;
    t->output_ids[row * t->capacity + count] = t->tokens[row] = token;
    t->logprobs[row * t->capacity + count] = t->drawn_logprobs[row];
    for (int64_t s = 0; s < t->stop_width; s++)
        if (t->stop_ids[row * t->stop_width + s] == token) return ENDED;
    return count + 1 >= t->limits[row] ? ENDED : GOES_ON;
}

/* Draw for the active rows from logits, and record; a row with top-p or top-k was drawn already.
A row whose log-probability is NaN is broken and left as it is. Returns how many do not go on. */
int64_t draw(const Model *m, const Table *t, int64_t rows) {
    int64_t num_done = 0;
    for (int64_t r = 0; r < rows; r++) {
        t->outcomes[r] = GOES_ON;
        if (!t->active[r]) continue;
        if (!(t->top_p[r] < 1 || t->top_k[r] > 0)) t->drawn_tokens[r] = draw_one(m, t, r, t->drawn_logprobs + r);
        t->outcomes[r] = isnan(t->drawn_logprobs[r]) ? BROKEN : record(t, r);
        num_done += t->outcomes[r] != GOES_ON;
    }
    return num_done;
}
