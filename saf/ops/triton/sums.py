"""Sums of products over positions in the device language."""

import triton
import triton.language as tl


@triton.jit
def add_product(acc, b_a, b_b, PRECISION: tl.constexpr):
    """Return acc + a b, rounded so that float32 sums keep their accuracy over many steps."""
    if b_b.dtype == tl.float32:
        # A sum a step, then one addition: T additions to one long sum would round T times. The limit keeps the
        # compiler from joining the two.
        return acc + tl.dot(b_a.to(b_b.dtype), b_b, input_precision=PRECISION, max_num_imprecise_acc=1)
    return tl.dot(b_a.to(b_b.dtype), b_b, acc, input_precision=PRECISION)
