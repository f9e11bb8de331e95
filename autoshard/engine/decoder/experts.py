"""The leaf modules of a mixture of experts: choose, queue, dispatch, one product per expert, combine.

Slots are rows, one expert's after the other's. With a capacity each expert has as many; without one it has a row for
each token that chose it, so that nothing is dropped and nothing is padded.
"""

from typing import Any

import torch
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor, nn
from torch.nn import functional

from autoshard.engine.decoder.leaves import Factory, Sizes, Taken, drawn
from autoshard.graph.decoder import num_slots
from autoshard.spec.model import ModelSpec

Rows = tuple[int, ...]  # how many rows each expert has


class Choose(nn.Module):
    """The largest router logits of each token and the experts they belong to; ties go to the lower number."""

    def __init__(self, num_choices: int) -> None:
        super().__init__()
        self._num_choices = num_choices

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sort and take the first; ``torch.topk`` would leave ties open."""
        order = torch.sort(logits.detach(), dim=-1, descending=True, stable=True).indices
        expert = order[..., : self._num_choices].clone()  # backward keeps it: not with all the others
        chosen: Any = Taken.apply(logits, expert)
        return chosen, expert


class Share(nn.Module):
    """The weights of a token's experts: a softmax over its choices."""

    def forward(self, chosen: Tensor) -> Tensor:
        """Normalise."""
        return functional.softmax(chosen, dim=-1)


class Queue(nn.Module):
    """The row of each (token, choice), experts in order and tokens in order; -1 where its expert has no room."""

    def __init__(self, model: ModelSpec, expert_capacity: float | None) -> None:
        super().__init__()
        self._model = model
        self._capacity = expert_capacity

    def forward(self, expert: Tensor) -> tuple[Tensor, Rows]:
        """Give the rows, and how many each expert has; without a capacity the host must wait for that."""
        flat = rearrange(expert, "batch seq choices -> (batch seq choices)")
        every = torch.arange(self._model.num_experts, device=expert.device)
        counts = reduce((rearrange(flat, "n -> n 1") == every).long(), "n experts -> experts", "sum")
        order = flat.argsort(stable=True)
        row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=expert.device))
        if self._capacity is None:
            return row.view_as(expert), tuple(counts.tolist())
        slots = num_slots(self._model, expert.shape[0] * expert.shape[1], self._capacity)
        place = row - (counts.cumsum(0) - counts)[flat]
        row = torch.where(place < slots, flat * slots + place, -1)
        return row.view_as(expert), (slots,) * self._model.num_experts


class Dispatch(nn.Module):
    """Tokens copied to their rows; a row that nobody takes stays zero."""

    def forward(self, x: Tensor, row: Tensor, rows: Rows) -> Tensor:
        """Copy."""
        return Dispatched.apply(x, row, sum(rows))  # pyright: ignore[reportReturnType]


class ExpertProduct(nn.Module):
    """The rows of each expert multiplied with that expert's weight, [experts, out, contracted]."""

    def __init__(self, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.weight = drawn(sizes, factory)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Multiply all at once where the experts have equally many rows, else one after the other."""
        if len(set(rows)) == 1:
            slots = rearrange(x, "(experts slots) read -> experts slots read", experts=len(rows))
            product = einsum(slots, self.weight, "experts slots read, experts made read -> experts slots made")
            return rearrange(product, "experts slots made -> (experts slots) made")
        parts = zip(x.split(rows), self.weight.unbind(0), strict=True)
        return torch.cat([functional.linear(part, weight) for part, weight in parts])


class Combine(nn.Module):
    """Expert results brought back to their tokens, weighed and summed over a token's choices."""

    def forward(self, x: Tensor, share: Tensor, row: Tensor) -> Tensor:
        """Fetch, weigh, sum."""
        return Combined.apply(x, share, row)  # pyright: ignore[reportReturnType]


class Dispatched(torch.autograd.Function):
    """Copying to rows, whose backward keeps the row numbers alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, num_rows: int) -> Tensor:
        """Copy each token once per choice."""
        ctx.save_for_backward(row)
        return _sent(repeat(x, "batch seq hidden -> batch seq choices hidden", choices=row.shape[-1]), row, num_rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Sum a token's gradient over its copies."""
        (row,) = ctx.saved_tensors
        return reduce(_fetched(upstream[0], row), "batch seq choices hidden -> batch seq hidden", "sum"), None, None


class Combined(torch.autograd.Function):
    """Fetching, weighing and summing, whose backward keeps the rows rather than what was fetched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, row: Tensor) -> Tensor:
        """Fetch, weigh, sum."""
        ctx.save_for_backward(x, share, row)
        weighted = _fetched(x, row) * rearrange(share, "batch seq choices -> batch seq choices 1")
        return reduce(weighted, "batch seq choices hidden -> batch seq hidden", "sum")

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Send the weighted gradient to the rows; multiply it with what was fetched for the weights."""
        x, share, row = ctx.saved_tensors
        d_token = rearrange(upstream[0], "batch seq hidden -> batch seq 1 hidden")
        d_share = reduce(_fetched(x, row) * d_token, "batch seq choices hidden -> batch seq choices", "sum")
        return _sent(d_token * rearrange(share, "batch seq choices -> batch seq choices 1"), row, len(x)), d_share, None


def _sent(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    kept = row >= 0
    rows = values.new_zeros(num_rows, values.shape[-1])
    rows[row[kept]] = values[kept]
    return rows


def _fetched(rows: Tensor, row: Tensor) -> Tensor:
    dropped = rearrange(row < 0, "batch seq choices -> batch seq choices 1")
    return rows[row.clamp(min=0)].masked_fill(dropped, 0)
