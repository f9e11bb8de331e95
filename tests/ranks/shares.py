"""What ranks hold of whole tensors after a step, and how these are put together again."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.states.flat import Flat
from autoshard.graph.op import Array
from autoshard.run.placement import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds of a tensor: a block, or a ``piece`` of the block in storage order (ZeRO)."""

    bounds: Bounds
    array: Array
    piece: tuple[int, int] | None = None


def assemble(shape: Sequence[int], parts: Iterable[Held]) -> Array:
    """Put a whole tensor together from what ranks hold; replicas must be equal to the last bit."""
    whole, known = np.zeros(shape), np.zeros(shape, dtype=bool)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for part in parts:
        places = numbers[tuple(slice(start, stop) for start, stop in part.bounds)].reshape(-1)
        places = places if part.piece is None else places[slice(*part.piece)]
        values = part.array.reshape(-1)
        assert len(values) == len(places), f"{len(values)} numbers for a block of {len(places)}"
        seen = known.reshape(-1)[places]
        assert np.array_equal(whole.reshape(-1)[places][seen], values[seen]), "two ranks hold different replicas"
        whole.reshape(-1)[places], known.reshape(-1)[places] = values, True
    assert known.all(), f"{np.count_nonzero(~known)} of {known.size} elements lie on no rank"
    return whole


def gradients_of(engine: TorchEngine) -> Mapping[str, Held]:
    """This rank's parts of the gradients of the last step, reduced and not clipped.

    The update clips gradients in place, and copies of those in BF16.
    """
    found: dict[str, Held] = {}
    for flat, piece in zip(engine.store.flats, engine.gradients, strict=True):
        clip = engine.clip if flat.weights[0].optimizer.clipped and wide(piece) is piece else 1.0
        found |= {} if flat.tied == "copy" else _parts(flat, piece / clip)
    return found


def weights_of(engine: TorchEngine) -> Mapping[str, Held]:
    """This rank's parts of the weights."""
    found: dict[str, Held] = {}
    for flat in engine.store.flats:
        as_held = replace(flat, groups=replace(flat.groups, shards=flat.groups.holders))  # in pieces of their own
        found |= _parts(as_held, flat.values) if flat.parted else {}
    for name, block in engine.store.whole.weights.items():
        found[name] = Held(bounds=engine.weights[name].bounds, array=_array(block.clone()))
    return found | {other: found[owner] for other, owner in engine.store.ties.items()}


def _parts(flat: Flat, piece: torch.Tensor) -> Mapping[str, Held]:
    """What parts of the weights a piece is, by name, without its padding."""
    return {
        weight.instance: Held(bounds=weight.bounds, array=_array(piece[first : first + high - low]), piece=(low, high))
        for weight, (low, high), first in flat.ranges(len(piece))
    }


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().clone().double().cpu().numpy()
