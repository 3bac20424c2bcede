"""The order in which programs take the output tiles of a Toeplitz product."""

import triton
import triton.language as tl


@triton.jit
def place_of(tile, num_m, num_n, num_f, slabs):
    """Return the row block counted from the longest sum, the head and the column block of a tile.

    A slab is a column block of one head: all its row blocks read the same input. `slabs` of them are computed before
    the next ones begin, so that what they read stays in the second-level cache; among them row blocks with the longest
    sum come first, so that the last wave is made of short ones.
    """
    first = tile // (num_m * slabs) * slabs
    together = tl.minimum(num_n * num_f - first, slabs)
    inside = tile - first * num_m
    slab = first + inside % together
    return inside // together, slab // num_n, slab % num_n
