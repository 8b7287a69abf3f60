/* A draw of the mean-field Gaussian, its gradients and a natural-gradient step of it, one pass over
 * the weights each.
 *
 *     w = m + s z,  s = exp(r),  z standard normal
 *     KL(q || p) for priors N(loc, scale^2), up to constants: sum (d^2 + s^2) / (2 scale^2) - r,
 *     d = m - loc, and with g = dL/dw, k = dL/dKL and c = k / scale^2
 *     dL/dm = g + c d,   dL/dr = g (w - m) + c s^2 - k.
 *
 * z and s stay in registers: what a step costs here is the memory it moves. The vector is cut
 * into chunks, and threads share them. Each chunk makes its noise from the key and its own
 * number, and its part of the sum is added in order, so the number of threads changes no bit.
 * Neither does the compiler, which may not contract or reorder.
 */
#include "normal.h"

#define CHUNK 8192 /* numbers that share one start of the generator */
#define ROOM 512   /* numbers of noise that wait to be used */

const int64_t lightning_bnn_chunk = CHUNK;

/* Consecutive slices of the flat vector, each with a prior of its own. */
struct slices {
    int64_t count;
    const int64_t *starts; /* count + 1, the last is the size of the vector */
    const float *locs;
    const float *precisions; /* 1 / scale^2 */
};

static inline int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

/* The last slice that begins at or before a place. */
static int64_t slice_at(const struct slices *slices, int64_t place)
{
    int64_t low = 0, high = slices->count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (slices->starts[middle] <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* exp(x), within one unit in the last place; held inside of the normal numbers, NaN stays NaN. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    /* x = n ln 2 + r: adding 1.5 2^23 rounds to an integer, which then lies in the low bits */
    float shifted = x * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.38144205e-3f;
    p = p * r + 8.36879654e-3f;
    p = p * r + 4.16683960e-2f;
    p = p * r + 1.66665200e-1f;
    p = p * r + 4.99999934e-1f;
    return (p * (r * r) + r + 1.0f) * from_bits((to_bits(shifted) + 127u) << 23);
}

/* The finalizer of SplitMix64 (Steele, Lea and Flood, 2014). */
static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The generator at the beginning of a chunk: 128 bits a lane, 64 from each half of the key. */
static struct lanes start_of_chunk(const uint64_t *key, int64_t chunk)
{
    struct lanes lanes;
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t place = ((uint64_t)chunk * LANES + lane + 1) * 0x9e3779b97f4a7c15u;
        uint64_t low = mix(key[0] + place), high = mix(key[1] + place);
        lanes.a[lane] = (uint32_t)low;
        lanes.b[lane] = (uint32_t)(low >> 32);
        lanes.c[lane] = (uint32_t)high;
        lanes.d[lane] = (uint32_t)(high >> 32);
    }
    return lanes;
}

/* Write a weight; give d^2 + s^2. */
static inline float draw_one(float *weight, float mean, float rho, float noise, float loc)
{
    float sd = exponential(rho);
    float distance = mean - loc;
    *weight = mean + sd * noise;
    return distance * distance + sd * sd;
}

/* At most ROOM weights under one prior, and their part of the KL; their d^2 + s^2 are added to
 * *squares, from which a prior whose scale is learned is made. */
static double draw_piece(float *restrict weights, const float *restrict means,
                         const float *restrict rhos, const float *restrict noise, int64_t count,
                         float loc, float precision, double *squares)
{
    float half = 0.5f * precision;
    float sums[LANES] = {0}, plain[LANES] = {0};
    int64_t whole = count - count % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float square = draw_one(weights + i + lane, means[i + lane], rhos[i + lane],
                                    noise[i + lane], loc);
            sums[lane] += half * square - rhos[i + lane];
            plain[lane] += square;
        }
    for (int64_t i = whole; i < count; i++) {
        float square = draw_one(weights + i, means[i], rhos[i], noise[i], loc);
        sums[i - whole] += half * square - rhos[i];
        plain[i - whole] += square;
    }
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sum += sums[lane];
        *squares += plain[lane];
    }
    return sum;
}

static double draw_chunk(float *weights, const float *means, const float *rhos,
                         const struct slices *slices, const uint64_t *key, int64_t chunk,
                         double *squares)
{
    struct lanes lanes = start_of_chunk(key, chunk);
    float noise[ROOM];
    double sum = 0;
    int64_t place = chunk * CHUNK;
    int64_t end = smaller(place + CHUNK, slices->starts[slices->count]);
    int64_t slice = slice_at(slices, place);
    while (place < end) {
        int64_t first = place, last = smaller(place + ROOM, end);
        for (int64_t i = 0; i < last - first; i += BLOCK)
            fill_block(noise + i, &lanes);
        while (place < last) {
            while (slices->starts[slice + 1] <= place)
                slice++;
            int64_t stop = smaller(slices->starts[slice + 1], last);
            sum += draw_piece(weights + place, means + place, rhos + place, noise + (place - first),
                              stop - place, slices->locs[slice], slices->precisions[slice],
                              squares + chunk + slice);
            place = stop;
        }
    }
    return sum;
}

/* Write a draw, and give the KL up to constants. `sums` has room for one number a chunk. Sums of
 * d^2 + s^2 are added to `squares`, which has room for one number a chunk and a slice: those of
 * chunk c and slice s to number c + s, which no other two have that meet. */
double lightning_bnn_draw(float *weights, const float *means, const float *rhos,
                          const struct slices *slices, const uint64_t *key, double *sums,
                          double *squares, int threads)
{
    int64_t chunks = (slices->starts[slices->count] + CHUNK - 1) / CHUNK;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        sums[chunk] = draw_chunk(weights, means, rhos, slices, key, chunk, squares);
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        total += sums[chunk];
    return total;
}

/* The gradients of weights under one prior; `by_weights` is NULL where no gradient came. */
static void gradients_piece(float *restrict by_means, float *restrict by_rhos,
                            const float *restrict by_weights, const float *restrict means,
                            const float *restrict rhos, const float *restrict weights,
                            int64_t count, float loc, float precision, float by_kl)
{
    float factor = by_kl * precision;
    for (int64_t i = 0; i < count; i++) {
        float g = by_weights ? by_weights[i] : 0.0f;
        float sd = exponential(rhos[i]);
        by_means[i] = g + factor * (means[i] - loc);
        by_rhos[i] = g * (weights[i] - means[i]) + (factor * (sd * sd) - by_kl);
    }
}

/* Write the gradients of means and rhos from those of the slices of a draw and of its KL. */
void lightning_bnn_gradients(float *by_means, float *by_rhos, const float *const *by_slices,
                             float by_kl, const float *means, const float *rhos,
                             const float *weights, const struct slices *slices, int threads)
{
    int64_t size = slices->starts[slices->count];
    int64_t chunks = (size + CHUNK - 1) / CHUNK;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t place = chunk * CHUNK, end = smaller(place + CHUNK, size);
        for (int64_t slice = slice_at(slices, place); place < end; slice++) {
            int64_t start = slices->starts[slice], stop = smaller(slices->starts[slice + 1], end);
            if (stop <= place)
                continue;
            const float *by_slice = by_slices[slice];
            gradients_piece(by_means + place, by_rhos + place,
                            by_slice ? by_slice + (place - start) : NULL, means + place,
                            rhos + place, weights + place, stop - place, slices->locs[slice],
                            slices->precisions[slice], by_kl);
            place = stop;
        }
    }
}

/* ln(1 + q) / 2 for q from -1/2 to 3/2, as atanh(q / (2 + q)): cheaper than ln, and good near 0. */
static inline float half_log1p(float q)
{
    float t = q / (2.0f + q), t2 = t * t;
    float p = 1.65115118e-1f;
    p = p * t2 + 1.33716807e-1f;
    p = p * t2 + 2.00584829e-1f;
    p = p * t2 + 3.33321869e-1f;
    return t * (1.0f + t2 * p);
}

static inline float held(float x, float most)
{
    x = x < -most ? -most : x; /* NaN stays NaN */
    return x > most ? most : x;
}

/* Some weights of the step below, with pointers that do not overlap. */
static void step_piece(float *restrict means, float *restrict rhos, float *restrict momenta,
                       const float *restrict by_means, const float *restrict by_rhos,
                       int64_t count, float keep, float pull, float rate, float most)
{
    for (int64_t i = 0; i < count; i++) {
        float momentum = momenta[i] + (1.0f - keep) * (by_means[i] - momenta[i]);
        float u = held(pull * by_rhos[i], 1.0f);
        float q = u * (1.0f + 0.5f * u);
        float variance = exponential(2.0f * rhos[i]) / (1.0f + q); /* exp(2 r) of the new r */
        momenta[i] = momentum;
        rhos[i] -= half_log1p(q);
        means[i] -= held(rate * variance * momentum, most);
    }
}

/* A step of IVON, as in optimizers/natural.py, with its momenta in place:
 *
 *     v <- keep v + (1 - keep) dL/dm,   u = pull dL/dr held within -1 and 1
 *     r <- r - ln(1 + u + u^2 / 2) / 2,   m <- m - (rate exp(2 r) v held within -most and most).
 */
void lightning_bnn_natural_step(float *means, float *rhos, float *momenta, const float *by_means,
                                const float *by_rhos, int64_t size, float keep, float pull,
                                float rate, float most, int threads)
{
    int64_t chunks = (size + CHUNK - 1) / CHUNK;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t start = chunk * CHUNK;
        step_piece(means + start, rhos + start, momenta + start, by_means + start,
                   by_rhos + start, smaller(CHUNK, size - start), keep, pull, rate, most);
    }
}
