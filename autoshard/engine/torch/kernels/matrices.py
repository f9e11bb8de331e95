"""Products of matrices in the formats that a device has: wide sums, slow halves, and factors in FP8.

A factor in FP8 is scaled, as a whole, so that its largest number is the largest of the format (dynamic scaling by
tensor, the recipe of torchao and of Micikevicius et al., arXiv:2209.05433). Gradients have the format with more
exponents. Each rank scales what it has: no message is sent, and layouts differ by the rounding of FP8.
"""

from dataclasses import dataclass
from functools import cache

import torch

from autoshard.engine.torch.formats import NOWHERE, slow_halves
from autoshard.errors import InputError
from autoshard.run.protocol import HOST

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
Smaller = tuple[torch.dtype, torch.dtype]  # formats of the first and of the second factor
ALIGNED = 16  # numbers of a row of either factor; source: torch 2.13, ScaledBlas.cpp, of GPUs; here of all devices
LEAST = 1e-12  # of the largest number: a factor of zeros has a scale, too; source: torchao 0.14, float8_utils.py


@dataclass(frozen=True, slots=True)
class Multiplier:
    """How an operation multiplies matrices on a device: in their own format, or in the ``smaller`` ones of factors."""

    device: torch.device
    smaller: Smaller | None = None

    def __post_init__(self) -> None:
        if self.smaller and self.device != NOWHERE and not multiplies_fp8(self.device):
            remedy = "Use --precision bf16, or GPUs of compute capability 8.9 and later"
            raise InputError.of("precision", f"{self.device.type} has no products of matrices in fp8. {remedy}")

    def product(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the product of two matrices, or of batches of them."""
        if self.smaller and _is_aligned(first, second):
            return self._scaled(first, second, first.dtype)
        return multiply(first, second, self.device)

    def add(self, total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Add a product to a sum, which may be of a wider format."""
        if self.smaller and _is_aligned(first, second):
            total.add_(self._scaled(first, second, total.dtype))
        else:
            add_product(total, first, second, self.device)

    def _scaled(self, first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.smaller, "factors are in FP8"
        return _scaled_product(first, second, self.smaller, dtype, on_host=self.device.type == HOST)

    def adds(self, factors: torch.dtype, total: torch.dtype) -> bool:
        """Whether it adds products of a format to sums of another one in a call."""
        return factors == total or adds_wide(self.device, factors, total)


def multiply(first: torch.Tensor, second: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Multiply matrices, or batches of them: in FP32, rounded once, where the device is slow in their format."""
    if first.dtype in slow_halves(device):
        return torch.matmul(first.float(), second.float()).to(first.dtype)
    return torch.matmul(first, second)


def add_product(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor, device: torch.device) -> None:
    """Add a product of matrices, or a batch of them, to a sum, which may be of a wider format."""
    if first.dtype == total.dtype and first.dtype in slow_halves(device):
        add = torch.addmm if first.dim() == 2 else torch.baddbmm
        total.copy_(add(total.float(), first.float(), second.float()))
        return
    if first.dtype == total.dtype:
        (total.addmm_ if first.dim() == 2 else total.baddbmm_)(first, second)
        return
    for matrices in zip(total, first, second, strict=True) if first.dim() == 3 else [(total, first, second)]:
        _add_wide(*matrices)


def _add_wide(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(total, first, second, total.dtype, out=total)


@cache
def adds_wide(device: torch.device, factors: torch.dtype, total: torch.dtype) -> bool:
    """Whether a device has products that add to sums of a wider format: a small one is tried."""
    if device == NOWHERE or total.itemsize <= factors.itemsize:
        return False
    first, second = (torch.ones(16, 16, dtype=factors, device=device) for _ in range(2))
    sum_of_ones = torch.ones(16, 16, dtype=total, device=device)
    try:
        _add_wide(sum_of_ones, first, second)
    except (RuntimeError, NotImplementedError):  # as torch says that it has none
        return False
    return bool((sum_of_ones == 17).all())


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device has products of matrices in FP8: a small one is tried."""
    ones = torch.ones(ALIGNED, ALIGNED, dtype=torch.bfloat16, device=device)
    try:
        formats = (GRADIENTS, VALUES)
        product = _scaled_product(ones, ones, formats, torch.float32, on_host=device.type == HOST)
    except (RuntimeError, NotImplementedError):  # as torch says that it has none
        return False
    return bool(((product - ALIGNED).abs() < 2.0**-16).all())  # scales are rounded


def _is_aligned(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dim() == 2 and first.numel() > 0 and first.shape[1] % ALIGNED == 0 == second.shape[1] % ALIGNED


def _scaled_product(
    first: torch.Tensor, second: torch.Tensor, smaller: Smaller, dtype: torch.dtype, *, on_host: bool
) -> torch.Tensor:
    """Multiply matrices in FP8; kernels take rows of the first one and columns of the second one as they lie in memory.

    Devices may add up less exactly where both factors are values, as in torchao: gradients ask for more. A host
    multiplies the rounded factors in FP64, where sums are the same in any order: its own kernel took 1,000 times as
    long (torch 2.13, 1024 x 256 x 512).
    """
    (rows, rows_scale), (columns, columns_scale) = (
        _in_fp8(matrix, form) for matrix, form in zip((first, second.t()), smaller, strict=True)
    )
    if on_host:
        return (torch.mm(rows.double(), columns.t().double()) * rows_scale * columns_scale).to(dtype)
    return torch.ops.aten._scaled_mm(
        rows, columns.t(), rows_scale, columns_scale, None, None, dtype, GRADIENTS not in smaller
    )


def _in_fp8(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, row by row, and what its numbers are to be multiplied with."""
    most = torch.finfo(dtype).max
    scale = matrix.abs().amax().float().clamp(min=LEAST) / most
    return (matrix.float() / scale).clamp(-most, most).to(dtype).contiguous(), scale
