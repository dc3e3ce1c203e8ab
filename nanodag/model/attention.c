/* Attention of training on CPU cores, forward and backward; attention.py calls it.

Tokens lie in groups of pieces, each of which may go on from another one before it. Each token attends to the tokens of
its piece up to itself, and to all those of the pieces that this one goes on from. So a packed document is a group of one
piece, a prompt with its responses one of several, and questions behind the same examples a deeper tree. Only pairs of
tokens that are seen are computed, but for the corners of blocks. Of a piece only the last tokens may ask: then queries,
and what belongs to them, have rows of their own. Through a window a token sees the last `window` of these tokens, itself
among them.

Everything is computed in float32, whatever the tensors hold. Of the probabilities only the logarithm of each row's sum
is kept: to compute them again takes less time than to move them from and to memory. Every sum has one order, whatever
the number of threads: one thread takes a key-value head of a group, and is the only one to write what belongs to it.

Letters: N tokens, Q of which ask, H query heads, K key-value heads, D head width, a multiple of 16. */
#include "vectors.h"

#define PANEL 2
#define WIDE (PANEL * LANES) /* columns of a panel */
#if LANES == 16
#define ROWS 12 /* x PANEL accumulators fit the registers */
#else
#define ROWS 6
#endif
#define BLOCK 48 /* queries at a time: a multiple of ROWS whose scores stay in the cache */

typedef struct {
    void *at;       /* (N or Q, heads, D), heads and their elements without gaps */
    int64_t stride; /* elements from token to token */
} Tokens;

typedef struct {
    int64_t num_groups, num_heads, num_kv_heads, head_dim, is_bf16;
    int64_t longest, window; /* keys that a token can see behind all it goes on from, and that it sees at most */
    const int64_t *groups; /* (num_groups + 1,): the first piece of each; the last is the number of pieces */
    const int64_t *pieces; /* (pieces, 2): first token, number of tokens */
    const int64_t *before;  /* (pieces,): tokens of those that it goes on from; pieces in the order of a walk down the tree */
    const int64_t *queries; /* (pieces, 2): first row of its queries, their number: of the last tokens */
    float *logsumexp;       /* (Q, H) */
    Tokens query, key, value, output, d_output, d_query, d_key, d_value;
} Attention;

/* What one thread works with. keys, values, d_keys, d_values: (longest, D). *_panels: their transposes in panels of WIDE
columns, (longest / WIDE, D, WIDE). queries, d_outputs, outputs: (BLOCK, D). scores, d_scores: (BLOCK, stride). */
typedef struct {
    int64_t stride;
    float *keys, *values, *key_panels, *value_panels, *d_keys, *d_values, *queries, *d_outputs, *outputs, *scores, *d_scores;
} Scratch;

INLINE int64_t up_to(int64_t unit, int64_t count) { return (count + unit - 1) / unit * unit; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Floats that a thread's scratch takes. */
int64_t scratch_size(const Attention *a) {
    int64_t longest = up_to(WIDE, a->longest);
    return 6 * longest * a->head_dim + BLOCK * (3 * a->head_dim + 2 * (longest + LANES));
}

static Scratch laid_out(const Attention *a, float *at) {
    int64_t longest = up_to(WIDE, a->longest), matrix = longest * a->head_dim, block = BLOCK * a->head_dim;
    Scratch s = {.stride = longest + LANES}; /* no power of two: rows would meet in one set of the cache */
    float **matrices[] = {&s.keys, &s.values, &s.key_panels, &s.value_panels, &s.d_keys, &s.d_values};
    float **blocks[] = {&s.queries, &s.d_outputs, &s.outputs};
    for (int i = 0; i < 6; i++, at += matrix) *matrices[i] = at;
    for (int i = 0; i < 3; i++, at += block) *blocks[i] = at;
    s.scores = at;
    s.d_scores = at + BLOCK * s.stride;
    return s;
}

/* `rows` x `panels` vectors of y = (add ? y : 0) + x w. x: element k of row r at r * x_row + k * x_step. */
INLINE void panel(const int rows, const int panels, int64_t depth, const float *x, int64_t x_row, int64_t x_step,
                  const float *w, int64_t w_stride, float *y, int64_t y_stride, int add) {
    vec sums[ROWS][PANEL];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sums[r][p] = add ? load(y + r * y_stride + p * LANES) : (vec){};
    for (int64_t k = 0; k < depth; k++, w += w_stride, x += x_step) {
        vec weights[PANEL];
        for (int p = 0; p < panels; p++) weights[p] = load(w + p * LANES);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) sums[r][p] += x[r * x_row] * weights[p];
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) store(y + r * y_stride + p * LANES, sums[r][p]);
}

INLINE void all_rows(const int panels, int64_t rows, int64_t depth, const float *x, int64_t x_row, int64_t x_step,
                     const float *w, int64_t w_stride, float *y, int64_t y_stride, int add) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        panel(ROWS, panels, depth, x + r * x_row, x_row, x_step, w, w_stride, y + r * y_stride, y_stride, add);
    for (; r + ROWS / 3 <= rows; r += ROWS / 3)
        panel(ROWS / 3, panels, depth, x + r * x_row, x_row, x_step, w, w_stride, y + r * y_stride, y_stride, add);
    for (; r < rows; r++) panel(1, panels, depth, x + r * x_row, x_row, x_step, w, w_stride, y + r * y_stride, y_stride, add);
}

/* y (rows, width) = (add ? y : 0) + x (rows, depth) w (depth, width). width: a multiple of LANES. */
static void product(int64_t rows, int64_t depth, const float *x, int64_t x_row, int64_t x_step, const float *w,
                    int64_t w_stride, int64_t width, float *y, int64_t y_stride, int add) {
    int64_t n = 0;
    for (; n + WIDE <= width; n += WIDE)
        all_rows(PANEL, rows, depth, x, x_row, x_step, w + n, w_stride, y + n, y_stride, add);
    for (; n < width; n += LANES) all_rows(1, rows, depth, x, x_row, x_step, w + n, w_stride, y + n, y_stride, add);
}

/* `count` tokens of one head, times a factor, to (count, D) floats. */
static void take(const Attention *a, Tokens from, int64_t first, int64_t count, int64_t head, float factor, float *to) {
    const int64_t D = a->head_dim;
    for (int64_t t = 0; t < count; t++, to += D) {
        int64_t at = (first + t) * from.stride + head * D;
        if (a->is_bf16) {
            const uint16_t *x = (const uint16_t *)from.at + at;
            for (int64_t d = 0; d < D; d++) to[d] = float_of((uint32_t)x[d] << 16) * factor;
        } else {
            const float *x = (const float *)from.at + at;
            for (int64_t d = 0; d < D; d += LANES) store(to + d, load(x + d) * factor);
        }
    }
}

/* The other way round. x is overwritten. */
static void give(const Attention *a, Tokens to, int64_t first, int64_t count, int64_t head, float *x) {
    const int64_t D = a->head_dim;
    for (int64_t t = 0; t < count; t++, x += D) {
        int64_t at = (first + t) * to.stride + head * D;
        if (a->is_bf16)
            round_to_bf16(D, x, (uint16_t *)to.at + at);
        else
            memcpy((float *)to.at + at, x, D * sizeof(float));
    }
}

/* (count, D), which become columns `first` and following of a matrix in panels. */
static void transpose(int64_t count, int64_t D, const float *x, int64_t first, float *panels) {
    for (int64_t j = first; j < first + count; j++, x += D) {
        float *to = panels + j / WIDE * D * WIDE + j % WIDE;
        for (int64_t d = 0; d < D; d++) to[d * WIDE] = x[d];
    }
}

/* The scores of `count` queries, of which row r sees `seen + r` keys, and maybe of some keys more. */
static void score(int64_t count, int64_t seen, int64_t D, const float *queries, const float *panels, float *scores,
                  int64_t stride) {
    for (int64_t r = 0; r < count; r += ROWS) {
        int64_t rows = least(ROWS, count - r), columns = seen + r + rows - 1;
        for (int64_t j = 0; j < columns; j += WIDE)
            product(rows, D, queries + r * D, D, 1, panels + j * D, WIDE, WIDE, scores + r * stride + j, stride, 0);
    }
}

/* y (count, D) = x w, where row r of x has `seen + r` elements that are not 0. */
static void weigh(int64_t count, int64_t seen, int64_t D, const float *x, int64_t stride, const float *w, float *y) {
    for (int64_t r = 0; r < count; r += ROWS) {
        int64_t rows = least(ROWS, count - r);
        product(rows, seen + r + rows - 1, x + r * stride, stride, 1, w, D, D, y + r * D, D, 0);
    }
}

/* y (keys, D) += the transpose of x times w (count, D), with x as in `weigh`. */
static void weigh_back(int64_t count, int64_t seen, int64_t D, const float *x, int64_t stride, const float *w, float *y) {
    for (int64_t j = 0; j < seen + count - 1; j += ROWS) {
        int64_t rows = least(ROWS, seen + count - 1 - j), r = most(0, j + 1 - seen); /* the first that sees key j */
        product(rows, count - r, x + r * stride + j, 1, stride, w + r * D, D, D, y + j * D, D, 1);
    }
}

/* Scores become exp(score - subtracted), 0 where the query does not see; returns their sum. */
static float exponentials(float *scores, int64_t seen, int64_t end, float subtracted) {
    vec totals = {};
    for (int64_t j = seen; j < up_to(LANES, seen); j++) scores[j] = -INFINITY;
    for (int64_t j = 0; j < seen; j += LANES) {
        vec x = exp_of(load(scores + j) - subtracted);
        store(scores + j, x);
        totals += x;
    }
    for (int64_t j = up_to(LANES, seen); j < end; j += LANES) store(scores + j, (vec){});
    return sum_of(totals);
}

/* Row r of the scores sees `window` keys at most: those before them are as nothing. */
static void hide(int64_t count, int64_t seen, int64_t window, float *scores, int64_t stride) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = 0; j < seen + r - window; j++) scores[r * stride + j] = -INFINITY;
}

/* Scores become exponentials, which are probabilities but for a factor for each row; the logarithm of each row's sum is
kept. */
static void softmax(int64_t count, int64_t seen, float *scores, int64_t stride, float *factors, float *logsumexp,
                    int64_t num_heads) {
    int64_t end = up_to(WIDE, seen + count - 1);
    for (int64_t r = 0; r < count; r++, seen++, scores += stride) {
        float highest = highest_of(scores, seen), sum = exponentials(scores, seen, end, highest);
        factors[r] = 1 / sum;
        logsumexp[r * num_heads] = highest + logf(sum);
    }
}

/* Scores become probabilities, by what was kept. */
static void softmax_again(int64_t count, int64_t seen, float *scores, int64_t stride, const float *logsumexp,
                          int64_t num_heads) {
    int64_t end = up_to(WIDE, seen + count - 1);
    for (int64_t r = 0; r < count; r++) exponentials(scores + r * stride, seen + r, end, logsumexp[r * num_heads]);
}

/* d_scores = scores * (d_scores - the row's sum of products of an output and its gradient), 0 where a query does not
see. */
static void softmax_back(int64_t count, int64_t seen, int64_t D, const float *outputs, const float *d_outputs,
                         const float *scores, float *d_scores, int64_t stride) {
    int64_t end = up_to(WIDE, seen + count - 1);
    for (int64_t r = 0; r < count; r++, seen++) {
        vec sums = {};
        for (int64_t d = 0; d < D; d += LANES) sums += load(outputs + r * D + d) * load(d_outputs + r * D + d);
        float sum = sum_of(sums);
        const float *p = scores + r * stride;
        float *x = d_scores + r * stride;
        for (int64_t j = 0; j < seen; j += LANES) store(x + j, load(p + j) * (load(x + j) - sum));
        memset(x + seen, 0, (end - seen) * sizeof(float));
    }
}

/* Keys that no query of a block sees, whose first sees the last of `seen` keys: whole panels, which are passed over. */
INLINE int64_t out_of_sight(const Attention *a, int64_t seen) { return most(0, seen - a->window) / WIDE * WIDE; }

/* `length` queries from row `first` on, of which the first sees `before` keys and its own. */
static void attend(const Attention *a, const Scratch *s, int64_t first, int64_t length, int64_t before, int64_t head) {
    const int64_t D = a->head_dim;
    float factors[BLOCK];
    for (int64_t i = 0; i < length; i += BLOCK) {
        int64_t count = least(BLOCK, length - i), seen = before + i + 1, skipped = out_of_sight(a, seen), at = skipped * D;
        seen -= skipped;
        take(a, a->query, first + i, count, head, 1 / sqrtf((float)D), s->queries);
        score(count, seen, D, s->queries, s->key_panels + at, s->scores, s->stride);
        hide(count, seen, a->window, s->scores, s->stride);
        float *logsumexp = a->logsumexp + (first + i) * a->num_heads + head;
        softmax(count, seen, s->scores, s->stride, factors, logsumexp, a->num_heads);
        weigh(count, seen, D, s->scores, s->stride, s->values + at, s->outputs);
        for (int64_t r = 0; r < count; r++)
            for (int64_t d = 0; d < D; d++) s->outputs[r * D + d] *= factors[r];
        give(a, a->output, first + i, count, head, s->outputs);
    }
}

static void attend_back(const Attention *a, const Scratch *s, int64_t first, int64_t length, int64_t before, int64_t head) {
    const int64_t D = a->head_dim;
    const float scale = 1 / sqrtf((float)D);
    for (int64_t i = 0; i < length; i += BLOCK) {
        int64_t count = least(BLOCK, length - i), seen = before + i + 1, skipped = out_of_sight(a, seen), at = skipped * D;
        seen -= skipped;
        take(a, a->query, first + i, count, head, scale, s->queries);
        take(a, a->output, first + i, count, head, 1, s->outputs);
        take(a, a->d_output, first + i, count, head, 1, s->d_outputs);
        score(count, seen, D, s->queries, s->key_panels + at, s->scores, s->stride);
        hide(count, seen, a->window, s->scores, s->stride);
        const float *logsumexp = a->logsumexp + (first + i) * a->num_heads + head;
        softmax_again(count, seen, s->scores, s->stride, logsumexp, a->num_heads);
        weigh_back(count, seen, D, s->scores, s->stride, s->d_outputs, s->d_values + at);
        score(count, seen, D, s->d_outputs, s->value_panels + at, s->d_scores, s->stride);
        softmax_back(count, seen, D, s->outputs, s->d_outputs, s->scores, s->d_scores, s->stride);
        weigh_back(count, seen, D, s->d_scores, s->stride, s->queries, s->d_keys + at);
        weigh(count, seen, D, s->d_scores, s->stride, s->keys + at, s->outputs);
        for (int64_t d = 0; d < count * D; d++) s->outputs[d] *= scale;
        give(a, a->d_query, first + i, count, head, s->outputs);
    }
}

/* One key-value head of one group. Keys lie behind those of the pieces that theirs goes on from, which stay where they
are. Backward, a piece goes on from the first one or from none. */
static void group(const Attention *a, const Scratch *s, int64_t number, int64_t kv_head, int backward) {
    const int64_t D = a->head_dim, heads = a->num_heads / a->num_kv_heads;
    const int64_t *first = a->pieces + 2 * a->groups[number], *end = a->pieces + 2 * a->groups[number + 1];
    const int64_t *asks = a->queries + 2 * a->groups[number], *seen = a->before + a->groups[number];
    for (const int64_t *piece = first; piece < end; piece += 2, asks += 2, seen++) {
        int64_t before = *seen, at = before * D;
        take(a, a->key, piece[0], piece[1], kv_head, 1, s->keys + at);
        take(a, a->value, piece[0], piece[1], kv_head, 1, s->values + at);
        transpose(piece[1], D, s->keys + at, before, s->key_panels);
        if (backward) {
            transpose(piece[1], D, s->values + at, before, s->value_panels);
            memset(s->d_keys + at, 0, piece[1] * D * sizeof(float));
            memset(s->d_values + at, 0, piece[1] * D * sizeof(float));
        }
        for (int64_t head = kv_head * heads; head < (kv_head + 1) * heads; head++)
            (backward ? attend_back : attend)(a, s, asks[0], asks[1], before + piece[1] - asks[1], head);
        if (backward && piece != first) {
            give(a, a->d_key, piece[0], piece[1], kv_head, s->d_keys + at);
            give(a, a->d_value, piece[0], piece[1], kv_head, s->d_values + at);
        }
    }
    if (backward) {
        give(a, a->d_key, first[0], first[1], kv_head, s->d_keys);
        give(a, a->d_value, first[0], first[1], kv_head, s->d_values);
    }
}

/* Work until nothing is left: threads that share `next`, 0 at first, share the work. scratch: of this thread. */
void attention(const Attention *a, int64_t backward, int64_t *next, float *scratch) {
    Scratch s = laid_out(a, scratch);
    for (;;) {
        int64_t number = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (number >= a->num_groups * a->num_kv_heads) return;
        group(a, &s, number / a->num_kv_heads, number % a->num_kv_heads, (int)backward);
    }
}
