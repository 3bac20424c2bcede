"""`DampedCosines` sums the poles of exponential patterns, and applies the transpose, without forming each cosine."""

import torch
from torch import Tensor


class DampedCosines:
    """Sums of damped cosines over n distances with fixed poles `[N, P]`, and their transpose.

    Amplitudes are `[N, 2P]`, cosines and then sines. Distances are written as a multiple of B and a rest, so that a sum
    is one small matrix product.
    """

    def __init__(self, damping: Tensor, frequency: Tensor, count: int):
        self.damping, self.frequency, self.count = damping, frequency, count
        self.block = max(1, round(count**0.5))
        at = torch.arange(max(self.block, -(-count // self.block)), dtype=torch.float64, device=damping.device)
        pole = torch.complex(-damping, frequency)[..., None]
        self.near = (pole * at[: self.block]).exp()
        self.far = (pole * (at[: -(-count // self.block)] * self.block)).exp()

    def sum(self, amplitudes: Tensor) -> Tensor:
        """Return `[N, n]`."""
        cosine, sine = amplitudes.chunk(2, -1)
        far = torch.complex(cosine, -sine)[..., None] * self.far
        product = far.real.mT @ self.near.real - far.imag.mT @ self.near.imag
        return product.flatten(-2)[..., : self.count]

    def transposed(self, values: Tensor) -> Tensor:
        """Return, for values `[N, n]`, their products with all cosines and sines, `[N, 2P]`."""
        filled = torch.nn.functional.pad(values, (0, self.near.shape[-1] * self.far.shape[-1] - self.count))
        tiles = filled.unflatten(-1, (-1, self.block))  # [N, far, near]
        real, imaginary = tiles @ self.near.real.mT, tiles @ self.near.imag.mT  # [N, far, P]
        far_real, far_imaginary = self.far.real.mT, self.far.imag.mT
        cosines = (real * far_real - imaginary * far_imaginary).sum(-2)
        return torch.cat([cosines, (real * far_imaginary + imaginary * far_real).sum(-2)], -1)

    def atoms(self) -> Tensor:
        """Return every damped cosine and sine, `[N, n, 2P]`."""
        turned = (self.far[..., :, None] * self.near[..., None, :]).flatten(-2)[..., : self.count].mT
        return torch.cat([turned.real, turned.imag], -1)
