"""Bytes of a rank's share of a block: what it keeps, what lies beside that while a kernel runs, what stays for good."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.cost.collective import Number
from autoshard.cost.live import Fresh, Moment
from autoshard.graph.block import Block
from autoshard.graph.op import Dims, Tensor
from autoshard.layout.layout import Cuts, local_sizes
from autoshard.layout.sharding import Sharding
from autoshard.spec.workload import DTYPE_BYTES

Shares = Callable[[Cuts], "Local"]  # cuts -> a rank's sizes of all dims


class Local(dict[str, Number]):
    """A rank's sizes of all dims; the number of elements of tensors with the same dims is worked out once."""

    def __init__(self, sizes: Mapping[str, Number]) -> None:
        super().__init__(sizes)
        self._elements: dict[Dims, Number] = {}

    def num_bytes(self, tensor: Tensor) -> Number:
        """Return the bytes of a rank's share of a tensor."""
        if tensor.dims not in self._elements:
            self._elements[tensor.dims] = tensor.num_elements(self)
        return self._elements[tensor.dims] * DTYPE_BYTES[tensor.dtype]


def shares(sizes: Mapping[str, Number], atoms: Mapping[str, Number]) -> Shares:
    """Return how to look up a rank's sizes of all dims by their cuts; each distinct cut is worked out once."""
    known: dict[tuple[object, ...], Local] = {}

    def shared(cuts: Cuts) -> Local:
        key = tuple(cuts.items())
        if key not in known:
            known[key] = Local(local_sizes(sizes, cuts, atoms))
        return known[key]

    return shared


def kept_bytes(block: Block, sharding: Sharding, shared: Shares, atoms: Mapping[str, Number]) -> Mapping[str, Number]:
    """Return what a rank keeps of a block from forward to backward, for one micro-batch, by storage.

    A tensor that is kept in two layouts is kept once where atoms of size 1 are all that they differ in.
    """
    tensors = {entry.storage: entry.tensor for entry in block.saved}
    inputs = {name: block.tensors[name] for name in sharding.input_cuts}
    cuts = {**sharding.kept_cuts, **sharding.input_cuts}
    return {name: _bytes_in(tensor, cuts[name], shared, atoms) for name, tensor in {**tensors, **inputs}.items()}


def waiting_bytes(block: Block, sharding: Sharding, shared: Shares, atoms: Mapping[str, Number]) -> Number:
    """Return what a rank keeps of a block between the halves of its backward, for one micro-batch: what W reads."""
    cuts = sharding.waiting_cuts.items()
    return sum(_bytes_in(block.tensors[name], layouts, shared, atoms) for name, layouts in cuts)


def _bytes_in(tensor: Tensor, layouts: Sequence[Cuts], shared: Shares, atoms: Mapping[str, Number]) -> Number:
    total: Number = 0
    for number, cuts in enumerate(layouts):
        size = shared(cuts).num_bytes(tensor)
        another = [_differ(cuts, other, atoms) for other in layouts[:number]]
        total = total + (size * np.logical_and.reduce(another) if another else size)
    return total


def _differ(one: Cuts, other: Cuts, atoms: Mapping[str, Number]) -> Number:
    """Say whether an atom that cuts anything cuts a dim in one of the layouts only."""
    moved = {atom for dim in {*one, *other} for atom in {*one.get(dim, ())} ^ {*other.get(dim, ())}}
    return np.logical_or.reduce([atoms[atom] > 1 for atom in sorted(moved)])


def working_bytes(
    moments: Sequence[Moment], kept: Mapping[str, Number], local: Mapping[str, Local], shared: Shares
) -> Number:
    """Return how much more than what is kept lies in memory at the fullest moment; ``kept`` by storage."""
    working: Number = 0
    for moment in moments:
        taken = sum(_fresh_bytes(entry, local, shared) for entry in moment.takes)
        working = np.maximum(working, taken - sum(kept[storage] for storage in sorted(moment.frees)))
    return working


def shape_bytes(block: Block, sharding: Sharding, weights: Sequence[str], shared: Shares) -> Number:
    """Return a buffer of the shape of one tensor that holds these weights; experts have a tensor each, all alike."""
    total: Number = 0
    for weight in weights:
        tensor, local = block.tensors[weight], shared(sharding.parameter_cuts[weight])
        total = total + tensor.num_elements({**local, "experts": 1}) * DTYPE_BYTES[tensor.dtype]
    return total


def _fresh_bytes(entry: Fresh, local: Mapping[str, Local], shared: Shares) -> Number:
    """Return the memory that a tensor needs while a kernel runs; none if it is kept and the kernel reads no more."""
    op, tensor, held = entry
    size = local[op].num_bytes(tensor)
    for cuts in held:
        size = np.where(size > shared(cuts).num_bytes(tensor), size, 0)
    return size
