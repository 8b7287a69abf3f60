/* A tensor of standard normal numbers from a generator whose state goes on; see normal.h. */
#include "normal.h"

/* Fill out[0 .. count) and move the state, 4 words of each lane, on. */
void lightning_bnn_fill_normal(float *out, size_t count, uint32_t *state)
{
    struct lanes lanes;
    memcpy(&lanes, state, sizeof lanes);
    size_t whole = count - count % BLOCK;
    for (size_t start = 0; start < whole; start += BLOCK)
        fill_block(out + start, &lanes);
    if (whole < count) {
        float rest[BLOCK];
        fill_block(rest, &lanes);
        memcpy(out + whole, rest, (count - whole) * sizeof(float));
    }
    memcpy(state, &lanes, sizeof lanes);
}
