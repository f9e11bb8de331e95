"""Reading and writing rows by index; where a rank holds only a part of the rows, the others are zero.

Embeddings, the labels of losses, and the slots of experts are read and written this way.
"""

from collections.abc import Callable

import torch
from einops import rearrange, repeat

from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels, shape_of
from autoshard.graph.kinds.experts import Combine, CombineGradient, Dispatch, DispatchGradient, Slot, TopK, TopKGradient
from autoshard.graph.kinds.indexing import Lookup, Pick, Place, ScatterAdd, document_positions
from autoshard.graph.op import Call, Dims, Tensor

Made = tuple[torch.Tensor, ...]
_FOR_CHOICES = "batch seq hidden -> batch seq choices hidden"


def _inside(index: torch.Tensor, bounds: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the indices in the rank's part, and their places there; an index outside gets the first."""
    start, stop = bounds
    held = (index >= start) & (index < stop)
    return held, torch.where(held, index - start, 0)


def _along(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))


def _scaled(scale: float, rows: Tensor, context: KernelContext) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that multiplies rows by a scale, which is rounded to their format."""
    factor = float(torch.tensor(scale, dtype=context.formats.of(rows.dtype)))
    return (lambda values: values * factor) if scale != 1 else lambda values: values


def _lookup(kind: Lookup, call: Call, context: KernelContext) -> Kernel:
    bounds, shape = context.bounds.get(call.inputs[0].dims[0]), shape_of(call, call.outputs[0].dims)
    scaled = _scaled(kind.scale, call.outputs[0], context)

    def run(table: torch.Tensor, *where: torch.Tensor) -> Made:
        index = document_positions(*where).to(table.device)  # positions lie with the host
        if bounds is None:
            return (scaled(table[index]),)
        if not len(table):
            return (table.new_zeros(shape),)
        held, place = _inside(index, bounds)
        rows = table[place]
        return (scaled(rows * _along(held, rows)),)

    return run


def _scatter_add(kind: ScatterAdd, call: Call, context: KernelContext) -> Kernel:
    bounds, shape = context.bounds.get(kind.dims[0]), shape_of(call, kind.dims)
    scaled = _scaled(kind.scale, call.inputs[0], context)

    def run(rows: torch.Tensor, *where: torch.Tensor) -> Made:
        rows = scaled(rows)
        table, index = rows.new_zeros(shape), document_positions(*where).to(rows.device)
        if bounds is not None:
            held, index = _inside(index, bounds)
            rows = rows * _along(held, rows)
        if len(table):
            table.index_add_(0, index.reshape(-1), rows.reshape(index.numel(), *shape[1:]))
        return (table,)

    return run


def _pick(kind: Pick, call: Call, context: KernelContext) -> Kernel:
    axis, bounds = call.inputs[0].dims.index(kind.over), context.bounds.get(kind.over)

    def run(values: torch.Tensor, index: torch.Tensor) -> Made:
        if bounds is None:
            return (values.gather(axis, index.unsqueeze(axis)).squeeze(axis),)
        if not values.shape[axis]:
            return (values.new_zeros(index.shape),)
        held, place = _inside(index, bounds)
        return (values.gather(axis, place.unsqueeze(axis)).squeeze(axis) * held,)

    return run


def _place(kind: Place, call: Call, context: KernelContext) -> Kernel:
    axis, bounds, shape = kind.dims.index(kind.over), context.bounds.get(kind.over), shape_of(call, kind.dims)

    def run(values: torch.Tensor, index: torch.Tensor) -> Made:
        result = values.new_zeros(shape)
        if bounds is not None:
            held, index = _inside(index, bounds)
            values = values * held
        if shape[axis]:
            result.scatter_(axis, index.unsqueeze(axis), values.unsqueeze(axis))
        return (result,)

    return run


def _top_k(kind: TopK, call: Call, context: KernelContext) -> Kernel:
    count = call.sizes["choices"]

    def run(logits: torch.Tensor) -> Made:
        values, order = torch.sort(logits, dim=-1, descending=True, stable=True)  # ties go to the lower number
        return values[..., :count].contiguous(), order[..., :count].contiguous()

    return run


def _top_k_gradient(kind: TopKGradient, call: Call, context: KernelContext) -> Kernel:
    shape = shape_of(call, call.outputs[0].dims)
    return lambda upstream, expert: (upstream.new_zeros(shape).scatter_(-1, expert, upstream),)


def is_chosen(expert: torch.Tensor, experts: int) -> torch.Tensor:
    """Say for each choice, a row, and for each expert, a column, whether it is this one."""
    return torch.arange(experts, device=expert.device) == expert.reshape(-1, 1)


def _slot(kind: Slot, call: Call, context: KernelContext) -> Kernel:
    experts, slots, packed = call.sizes["experts"], call.sizes["slots"], context.packed

    def run(expert: torch.Tensor) -> Made:
        chosen = rearrange(expert, "batch seq choices -> (batch seq choices)")
        so_far = is_chosen(expert, experts).cumsum(0)
        place = (so_far - 1).gather(1, chosen[:, None]).squeeze(1)
        if packed:  # behind those of the experts before
            counts = so_far[-1:].sum(0)  # also of no tokens
            return ((place + (counts.cumsum(0) - counts)[chosen]).reshape(expert.shape),)
        return (torch.where(place < slots, place, -1).reshape(expert.shape),)

    return run


def _dispatch(kind: Dispatch, call: Call, context: KernelContext) -> Kernel:
    scattered, choices = _scattered(call.outputs[0].dims, call, context), call.sizes["choices"]
    return lambda tokens, expert, place: (scattered(repeat(tokens, _FOR_CHOICES, choices=choices), expert, place),)


def _dispatch_gradient(kind: DispatchGradient, call: Call, context: KernelContext) -> Kernel:
    fetched = _packed_fetched if context.packed else _fetched
    return lambda slots, expert, place: (fetched(slots, expert, place).sum(2),)


def _combine(kind: Combine, call: Call, context: KernelContext) -> Kernel:
    fetched = _packed_fetched if context.packed else _fetched
    return lambda slots, weight, expert, place: ((fetched(slots, expert, place) * weight.unsqueeze(-1)).sum(2),)


def _combine_gradient(kind: CombineGradient, call: Call, context: KernelContext) -> Kernel:
    fetched = _packed_fetched if context.packed else _fetched
    scattered = _scattered(call.inputs[1].dims, call, context)

    def run(*tensors: torch.Tensor) -> Made:
        upstream, slots, weight, expert, place = tensors
        rows = repeat(upstream, _FOR_CHOICES, choices=weight.shape[-1])
        d_weight = (fetched(slots, expert, place) * rows).sum(-1)
        return scattered(rows * weight.unsqueeze(-1), expert, place), d_weight

    return run


def _scattered(dims: Dims, call: Call, context: KernelContext) -> Callable[..., torch.Tensor]:
    """Return a function that copies rows to their slots; rows without a slot go to an extra one, which is cut off."""
    shape = shape_of(call, dims)

    def padded(rows: torch.Tensor, expert: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        slots = rows.new_zeros((shape[0], shape[1] + 1, shape[2]))
        slots[expert, torch.where(place < 0, shape[1], place)] = rows
        return slots[:, : shape[1]]

    def packed(rows: torch.Tensor, expert: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        slots = rows.new_empty((place.numel(), shape[2]))  # as many as there are rows
        slots[place] = rows
        return slots.unsqueeze(0)

    return packed if context.packed else padded


def _fetched(slots: torch.Tensor, expert: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return the row in each choice's slot, zero where the choice was dropped."""
    if not slots.shape[1]:
        return slots.new_zeros((*place.shape, slots.shape[2]))
    return slots[expert, place.clamp(min=0)] * (place >= 0).unsqueeze(-1)


def _packed_fetched(slots: torch.Tensor, expert: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return slots[0][place]


register_kernels({
    Lookup: _lookup, ScatterAdd: _scatter_add, Pick: _pick, Place: _place,
    TopK: _top_k, TopKGradient: _top_k_gradient, Slot: _slot, Dispatch: _dispatch,
    DispatchGradient: _dispatch_gradient, Combine: _combine, CombineGradient: _combine_gradient,
})  # fmt: skip
