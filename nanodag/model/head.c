/* Softmax over the vocabulary on CPU cores: losses, log-probabilities and their gradients, in one walk over rows of
logits where torch takes one for each operation; head.py calls it.

All is computed in float32. A row's sums have one order, whatever the number of threads.

Letters: N rows, V vocabulary. */
#include "vectors.h"

typedef struct {
    int64_t num_rows, vocabulary, is_bf16;
    const void *logits; /* (N, V), without gaps */
    void *d_logits;     /* the same shape, may be the same place; NULL where no gradient is wanted */
    const int64_t *targets;
    double temperature;
    float *losses, *selected, *logsumexp, *entropies; /* (N,) */
    const float *d_logprobs, *d_entropies;   /* (N,); d_entropies NULL where they are all 0 */
    int64_t *places;                         /* (N,) */
} Rows;

/* A row over the temperature. to: V floats and LANES more, which become -INFINITY. */
static void take(const Rows *a, int64_t row, float *to) {
    const int64_t V = a->vocabulary;
    const float inverse = (float)(1 / a->temperature);
    if (a->is_bf16) {
        const uint16_t *x = (const uint16_t *)a->logits + row * V;
        for (int64_t v = 0; v < V; v++) to[v] = float_of((uint32_t)x[v] << 16) * inverse;
    } else {
        const float *x = (const float *)a->logits + row * V;
        for (int64_t v = 0; v < V; v++) to[v] = x[v] * inverse;
    }
    for (int64_t v = V; v < V + LANES; v++) to[v] = -INFINITY;
}

static void give(const Rows *a, int64_t row, const float *x) {
    const int64_t V = a->vocabulary;
    if (a->is_bf16)
        round_to_bf16(V, x, (uint16_t *)a->d_logits + row * V);
    else
        memcpy((float *)a->d_logits + row * V, x, V * sizeof(float));
}

/* exp(score - subtracted) of a row in place; returns the sum. */
static float exponentials(int64_t V, float *scores, float subtracted) {
    vec totals = {};
    for (int64_t v = 0; v < V; v += LANES) {
        vec x = exp_of(load(scores + v) - subtracted);
        store(scores + v, x);
        totals += x;
    }
    return sum_of(totals);
}

static void scale(int64_t V, float *scores, float factor) {
    for (int64_t v = 0; v < V; v += LANES) store(scores + v, load(scores + v) * factor);
}

/* Rows first to end - 1: minus the log-probability of the target, and its gradient where it is wanted. */
void losses(const Rows *a, int64_t first, int64_t end, float *scratch) {
    const int64_t V = a->vocabulary;
    for (int64_t row = first; row < end; row++) {
        take(a, row, scratch);
        float highest = highest_of(scratch, V), wanted = scratch[a->targets[row]] - highest;
        float sum = exponentials(V, scratch, highest);
        a->losses[row] = logf(sum) - wanted;
        if (!a->d_logits) continue;
        scale(V, scratch, 1 / sum);
        scratch[a->targets[row]] -= 1;
        give(a, row, scratch);
    }
}

/* The score of each row's target over the temperature, its logsumexp, and the entropy. */
void score(const Rows *a, int64_t first, int64_t end, float *scratch) {
    const int64_t V = a->vocabulary;
    for (int64_t row = first; row < end; row++) {
        take(a, row, scratch);
        float highest = highest_of(scratch, V);
        vec totals = {}, weighted = {};
        for (int64_t v = 0; v < V; v += LANES) {
            vec x = load(scratch + v) - highest, p = exp_of(x);
            totals += p;
            weighted += p * at_least(-1e30f, x); /* -INFINITY times 0 would be no number */
        }
        float sum = sum_of(totals), log_sum = logf(sum);
        a->selected[row] = scratch[a->targets[row]];
        a->logsumexp[row] = highest + log_sum;
        a->entropies[row] = log_sum - sum_of(weighted) / sum; /* -E[log p] */
    }
}

/* The logsumexp of each row, and the first of its highest places. */
void likeliest(const Rows *a, int64_t first, int64_t end, float *scratch) {
    const int64_t V = a->vocabulary;
    for (int64_t row = first; row < end; row++) {
        take(a, row, scratch);
        float highest = highest_of(scratch, V);
        vec totals = {};
        for (int64_t v = 0; v < V; v += LANES) totals += exp_of(load(scratch + v) - highest);
        a->logsumexp[row] = highest + logf(sum_of(totals));
        int64_t place = 0;
        while (place < V - 1 && scratch[place] != highest) place++;
        a->places[row] = place;
    }
}

/* Gradients of the logits from those of log-probabilities and entropies. */
void score_back(const Rows *a, int64_t first, int64_t end, float *scratch) {
    const int64_t V = a->vocabulary;
    for (int64_t row = first; row < end; row++) {
        take(a, row, scratch);
        float d_logprob = a->d_logprobs[row], logsumexp = a->logsumexp[row];
        if (a->d_entropies) {
            float d_entropy = a->d_entropies[row], entropy = a->entropies[row];
            for (int64_t v = 0; v < V; v += LANES) { /* dH/ds_j = -p_j (log p_j + H) */
                vec logprob = at_least(-1e30f, load(scratch + v) - logsumexp);
                store(scratch + v, exp_of(logprob) * ((logprob + entropy) * -d_entropy - d_logprob));
            }
        } else {
            exponentials(V, scratch, logsumexp);
            scale(V, scratch, -d_logprob);
        }
        scratch[a->targets[row]] += d_logprob;
        if (a->temperature != 1) scale(V, scratch, (float)(1 / a->temperature));
        give(a, row, scratch);
    }
}
