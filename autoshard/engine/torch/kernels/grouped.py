"""Products of the rows of each expert with a matrix of that expert: in their own format, or with factors in FP8.

The recipe is torchao's ``rowwise_with_gw_hp``: products that make rows (F, I) have factors in E4M3, with a scale for
each row, and for each column of each matrix; gradients of weights (W) keep their format. As in torchao scales are
powers of two (v0.14, prototype/moe_training), so that a number is rounded alike whatever is beside it, unless it is
among the smallest: layouts that cut rows agree.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from autoshard.engine.torch.formats import NOWHERE
from autoshard.engine.torch.kernels.matrices import ALIGNED, LEAST, VALUES, multiply
from autoshard.run.protocol import HOST


@dataclass(frozen=True, slots=True)
class GroupedMultiplier:
    """How an operation multiplies the rows of each expert on a device.

    Rows lie one after the other, and ``ends`` says where those of each expert end; or each expert has as many, in a
    batch. In FP8 a device without such a kernel multiplies rounded factors in their own format, which is the same
    arithmetic.
    """

    device: torch.device
    in_fp8: bool = False

    def product(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of each expert times its matrix."""
        if not (self.in_fp8 and _is_aligned(rows, matrices)):
            return self._wide(rows, matrices, ends)
        if multiplies_groups_fp8(self.device):
            return _scaled_product(rows, matrices, ends)
        return self._wide(_rounded(rows), _rounded(matrices.transpose(1, 2)).transpose(1, 2), ends)

    def gradients(self, columns: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the columns of each expert times its rows."""
        if len(ends) == 1:
            return multiply(columns, rows, self.device).unsqueeze(0)
        return grouped_product(columns, rows, ends)

    def _wide(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        if ends is None:
            return multiply(rows, matrices, self.device)
        if len(matrices) == 1:
            return multiply(rows, matrices[0], self.device)
        return grouped_product(rows, matrices, ends)


def grouped_product(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply group by group: rows with a matrix, or columns with rows; torch has a kernel for aligned BF16."""
    if not first.numel():  # nobody chose an expert of this rank
        return first.new_zeros((first.shape[0], second.shape[2]) if second.dim() == 3 else (
            len(ends), first.shape[0], second.shape[1]
        ))  # fmt: skip
    aligned = all(
        size * first.element_size() % 16 == 0 for size in (first.shape[0 if second.dim() == 2 else 1], second.shape[-1])
    )
    if first.dtype == torch.bfloat16 and aligned:
        return functional.grouped_mm(first, second, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    number = torch.repeat_interleave(counts, output_size=second.shape[0] if second.dim() == 2 else first.shape[0])
    if second.dim() == 3:
        return torch.bmm(first.unsqueeze(1), second[number]).squeeze(1)
    of_each_row = first.t().unsqueeze(2) * second.unsqueeze(1)
    return of_each_row.new_zeros((len(counts), *of_each_row.shape[1:])).index_add_(0, number, of_each_row)


@cache
def groups_products(device: torch.device) -> bool:
    """Whether a device has grouped products whose sizes are known to the device alone."""
    rows = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        functional.grouped_mm(rows, rows.view(1, 16, 16), offs=torch.full((1,), 16, dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):  # as torch says that it has none
        return False
    return True


def rounds_experts(device: torch.device) -> bool:
    """Whether experts' factors are in FP8 on a device: hosts try what others do, and these round for a kernel only."""
    return multiplies_groups_fp8(device) or device.type == HOST


@cache
def multiplies_groups_fp8(device: torch.device) -> bool:
    """Whether a device has grouped products in FP8: small ones are tried, an expert without rows among them.

    Of torch 2.13 GPUs of compute capability 9.0 have them, and MI300 (aten/src/ATen/native/cuda/GroupedBlas.cpp).
    """
    if device == NOWHERE:
        return True
    ones = torch.ones(2, 2 * ALIGNED, ALIGNED, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([ALIGNED, ALIGNED, 2 * ALIGNED], dtype=torch.int32, device=device)
    matrices = ones[:1, :ALIGNED] * torch.tensor([1.0, 2.0, 4.0], device=device).bfloat16().view(3, 1, 1)
    try:
        packed, padded = _scaled_product(ones[0], matrices, ends), _scaled_product(ones, matrices[:2], None)
    except (RuntimeError, NotImplementedError):  # as torch says that it has none
        return False
    parts = [(packed[:ALIGNED], 1), (packed[ALIGNED:], 4), (padded[0], 1), (padded[1], 2)]
    return all(bool((part == factor * ALIGNED).all()) for part, factor in parts)


def _is_aligned(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether kernels take the factors: they give BF16, and want whole pieces of 16 numbers along both dims."""
    sizes = matrices.shape[1:]
    return rows.dtype == torch.bfloat16 and rows.numel() > 0 and all(size and size % ALIGNED == 0 for size in sizes)


def _scaled_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Multiply in FP8; as in torchao's recipe devices may add up less exactly."""
    (values, rows_scale), (columns, columns_scale) = _in_fp8(rows), _in_fp8(matrices.transpose(1, 2))
    scales = rows_scale.squeeze(-1), columns_scale.squeeze(-1)
    return torch.ops.aten._scaled_grouped_mm(
        values, columns.transpose(1, 2), *scales, ends, None, None, rows.dtype, True
    )


def _in_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in FP8, one after the other, and what the numbers of each are to be multiplied with."""
    most = torch.finfo(VALUES).max
    largest = matrix.abs().amax(-1, keepdim=True).float().clamp(min=LEAST)
    scale = torch.exp2(torch.ceil(torch.log2(largest / most)))
    return (matrix.float() / scale).clamp(-most, most).to(VALUES).contiguous(), scale


def _rounded(matrix: torch.Tensor) -> torch.Tensor:
    """Return the numbers that rows have in FP8, in their own format, which holds all of these."""
    values, scale = _in_fp8(matrix)
    return (values.float() * scale).to(matrix.dtype)
