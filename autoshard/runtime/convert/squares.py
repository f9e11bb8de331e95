"""Sums of squares of weights in files of NxD, told from counts of numbers alone: a second way beside patches.

How often a weight is stored follows from how many of its numbers all files hold. Which rank holds what, and in which
order ranks are, changes no sum; so a head that was read twice, or not at all, shows in the sum of what was written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from einops import rearrange

from autoshard.engine.nxd.shards import NxdNames, StackedRows
from autoshard.errors import Fault, InputError
from autoshard.runtime.convert.copying import TargetFile, WrittenFile
from autoshard.runtime.convert.stored import Shapes, Stored, square
from autoshard.spec.model import ModelSpec

Ranks = Mapping[tuple[int, int], Mapping[str, Stored]]  # by tp and pp
_SAME = 1e-9  # of sums of squares in double precision, in another order
# derived: rounding to the 8 bits of bfloat16 changes a number by 2**-9 of it, and its square by 2**-8; with some room.
_ROUNDED = 2**-6
_SMALLEST = 2.0**-24  # that float16 holds; what is smaller is rounded to it or to zero


def sums_of_squares(ranks: Ranks, names: NxdNames, shapes: Shapes, workers: int) -> Mapping[str, float]:
    """Return for every tensor of ours the sum of the squares of its numbers; threads take a file each."""
    tp = 1 + max(at for at, _ in ranks)

    def of_a_file(at: int, tensors: Mapping[str, Stored]) -> list[tuple[str, int, float]]:
        sums: list[tuple[str, int, float]] = []
        for name in sorted(tensors.keys() & names.tensors.keys()):
            for ours, numbers in _parts(names.tensors[name], tensors[name].read(), names.model, tp):
                if ours.endswith("embed.weight"):  # the last ranks hold padding of the vocabulary
                    numbers = numbers[: max(0, names.model.vocab - at * numbers.shape[0])]
                sums.append((ours, numbers.numel(), square(numbers)))
        return sums

    sums, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    with ThreadPoolExecutor(workers) as pool:
        for part in pool.map(of_a_file, (at for at, _ in ranks), ranks.values()):
            for ours, count, total in part:
                sums[ours] += total
                counts[ours] += count
    return {name: sums[name] * torch.Size(shape).numel() / counts[name] for name, shape in shapes.items()}


def refuse_other_sums(
    expected: Mapping[str, float],
    shapes: Shapes,
    rounded: bool,
    written: Iterable[tuple[TargetFile, WrittenFile]],
    where: str,
) -> None:
    """Compare the sums of squares of what was written with those of the source."""
    sums: dict[str, dict[object, float]] = {name: {} for name in expected}
    for output, done in written:
        for entry, squares in zip(output.entries, done.squares, strict=True):
            for patch, square_sum in zip(entry.patches, squares, strict=True):
                sums[patch.tensor][patch.box] = square_sum  # copies of a box are alike
    faults: list[Fault] = []
    for name, square_sum in expected.items():
        total, tolerance = sum(sums[name].values()), _ROUNDED if rounded else _SAME
        smallest = _SMALLEST**2 * torch.Size(shapes[name]).numel() if rounded else 0.0
        if abs(total - square_sum) > tolerance * square_sum + smallest:
            message = f"the sum of squares of {name} is {total:.9g}, and {square_sum:.9g} in the files of NxD"
            faults.append(Fault(where=where, message=f"{message}. This is a defect of the conversion: report it"))
    if faults:
        raise InputError(faults)


def _parts(tensor: StackedRows, local: torch.Tensor, model: ModelSpec, tp: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the part of a rank's tensor that belongs to each of our tensors; NxD joins tensors in these ways only."""
    ours = [row.ours for row in tensor.rows]
    if len(ours) == 1:
        yield ours[0], local
    elif tensor.rows[0].axes.slices:  # of GPT-NeoX: queries, keys and values of each head
        by_kind = "(kv_heads qkv head_dim) ... -> qkv kv_heads head_dim ..."
        yield from zip(ours, rearrange(local, by_kind, qkv=3, head_dim=model.head_dim), strict=True)
    elif len(ours) == 2:
        yield from zip(ours, local.chunk(2, tensor.axis), strict=True)
    else:
        queries = model.num_heads * model.head_dim // tp
        keys = (local.shape[0] - queries) // 2
        yield from zip(ours, local.split([queries, keys, keys]), strict=True)
