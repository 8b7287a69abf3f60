/* Standard normal numbers: xoshiro128++ in 16 lanes, then Box and Muller's transform.
 *
 * Generator: D. Blackman and S. Vigna, Scrambled linear pseudorandom number generators, 2021.
 * Each lane is a generator of its own with 128 bits of state; two of its words give two numbers,
 *     r cos(a) and r sin(a),   r = sqrt(-2 ln u),   u uniform on (0, 1),  a on a full turn.
 * u has 31 bits and keeps the relative precision of a float near 0, so that numbers up to 6.6
 * occur. ln, sin and cos are polynomials with errors of about one unit in the last place.
 *
 * Only additions, multiplications, divisions by powers of two and a square root are used, and the
 * compiler may not contract them: every machine gives the same bits.
 */
#ifndef LIGHTNING_BNN_NORMAL_H
#define LIGHTNING_BNN_NORMAL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK (2 * LANES)

/* One of the four words of all lanes in each array. */
struct lanes {
    uint32_t a[LANES], b[LANES], c[LANES], d[LANES];
};

static inline uint32_t rotate(uint32_t x, int k) { return (x << k) | (x >> (32 - k)); }

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* ln x for positive normal x, as n ln 2 + ln(1 + m): gives the second, n in *exponent. */
static inline float split_log(float x, int32_t *exponent)
{
    /* x = 2^n (1 + m) with 1 + m between sqrt(1/2) and sqrt(2) */
    uint32_t bits = to_bits(x);
    int32_t n = (int32_t)(bits - 0x3f3504f3u) >> 23;
    float m = from_bits(bits - ((uint32_t)n << 23)) - 1.0f;
    float p = 7.0376836e-2f;
    p = p * m - 1.1514610e-1f;
    p = p * m + 1.1676999e-1f;
    p = p * m - 1.2420141e-1f;
    p = p * m + 1.4249323e-1f;
    p = p * m - 1.6668058e-1f;
    p = p * m + 2.0000715e-1f;
    p = p * m - 2.4999999e-1f;
    p = p * m + 3.3333331e-1f;
    float m2 = m * m;
    *exponent = n;
    return m + (p * m * m2 - 0.5f * m2);
}

/* sqrt(-2 ln u) for u = (k + 1/2) / 2^31, k the upper 31 bits of a word. */
static inline float radius(uint32_t word)
{
    int32_t e;
    float rest = split_log((float)(int32_t)(word >> 1) + 0.5f, &e);
    float minus_log = (float)(31 - e) * 0.69314718f - rest;
    /* u = 1 happens by rounding; an error of the last place must not go below 0 */
    return sqrtf(2.0f * (minus_log > 0.0f ? minus_log : 0.0f));
}

static inline uint32_t next(uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d)
{
    uint32_t word = rotate(*a + *d, 7) + *a;
    uint32_t shifted = *b << 9;
    *c ^= *a;
    *d ^= *b;
    *b ^= *c;
    *a ^= *d;
    *c ^= shifted;
    *d = rotate(*d, 11);
    return word;
}

/* The next BLOCK numbers. */
static inline void fill_block(float *out, struct lanes *state)
{
    uint32_t *a = state->a, *b = state->b, *c = state->c, *d = state->d;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t first = next(a + lane, b + lane, c + lane, d + lane);
        uint32_t second = next(a + lane, b + lane, c + lane, d + lane);
        float r = radius(first);
        /* two bits choose a quarter turn; the rest is an angle between -1/8 and 1/8 turn */
        float x = (float)(int32_t)(second << 2) * 3.6572952e-10f;
        float x2 = x * x;
        float s = x + x * x2 * (-1.6666655e-1f + x2 * (8.3321609e-3f - x2 * 1.9515296e-4f));
        float c4 = 4.1666646e-2f + x2 * (-1.3887316e-3f + x2 * 2.4433157e-5f);
        float co = 1.0f - 0.5f * x2 + x2 * x2 * c4;
        uint32_t quarter = second >> 30;
        float cosine = quarter & 1 ? s : co;
        float sine = quarter & 1 ? co : s;
        out[lane] = r * from_bits(to_bits(cosine) ^ ((quarter + 1) & 2) << 30);
        out[lane + LANES] = r * from_bits(to_bits(sine) ^ (quarter & 2) << 30);
    }
}

#endif
