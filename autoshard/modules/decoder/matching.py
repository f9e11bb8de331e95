"""Where the calls of two forward passes differ: those of a decoder, and of its small twin."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoshard.modules.decoder.calls import AFTER, BEFORE, CallTape, TorchCall, Wire

_RTOL = 1e-9  # of numbers that code derives from sizes
Pairs = Collection[tuple[float, float]]


def differing_calls(large: CallTape, small: CallTape, standing: Sequence[int], pairs: Pairs) -> Iterator[str]:
    """Yield the first difference of each part from the part of the twin that stands for it."""
    parts = {BEFORE: BEFORE, AFTER: AFTER, **dict(enumerate(standing))}
    comparison = _Comparison(pairs)
    for number, twin in parts.items():
        yield from comparison.parts(large.parts[number], small.parts[twin], _PART_NAMES.get(number, f"layer {number}"))


_PART_NAMES: Mapping[int, str] = {BEFORE: "before the layers", AFTER: "behind the layers"}


class _Comparison:
    """Compares calls; sizes of the twin may stand for those of the decoder."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.derived = [pair for pair in pairs if any(not float(number).is_integer() for number in pair)]

    def parts(self, large: Sequence[TorchCall], small: Sequence[TorchCall], name: str) -> Iterator[str]:
        for ours, its in zip(large, small, strict=False):
            if ours.function != its.function:
                yield f"{name}: the code calls {ours.function} ({_in(ours)}), and by its config {its.function}"
                return
            if difference := next(self._differences(ours.arguments, its.arguments), ""):
                yield f"{name}: {ours.function} ({_in(ours)}) {difference}"
                return
        if len(large) != len(small):
            more = (large if len(large) > len(small) else small)[min(len(large), len(small))]
            who = "the code alone" if len(large) > len(small) else "its config alone"
            yield f"{name}: {who} calls {more.function} ({_in(more)}) at the end"

    def _differences(self, ours: Any, its: Any) -> Iterator[str]:
        if isinstance(ours, tuple) and isinstance(its, tuple) and len(ours) == len(its):
            for our_part, its_part in zip(ours, its, strict=True):
                yield from self._differences(our_part, its_part)
        elif isinstance(ours, dict) and isinstance(its, dict) and ours.keys() == its.keys():
            for key in ours:
                yield from (f"{key}: {what}" for what in self._differences(ours[key], its[key]))
        elif not self._are_same(ours, its):
            yield f"has {_shown(ours)} in the code, and {_shown(its)} by its config"

    def _are_same(self, ours: Any, its: Any) -> bool:
        if isinstance(ours, Wire):
            return isinstance(its, Wire) and ours == its and ours.origin != "unknown"
        if isinstance(ours, torch.device):
            return isinstance(its, torch.device)
        if isinstance(ours, float) and isinstance(its, float):
            derived = any(_near(ours, a) and _near(its, b) for a, b in self.derived)
            return ours == its or (math.isnan(ours) and math.isnan(its)) or derived
        if type(ours) is type(its) is int:
            return ours == its or (ours, its) in self.pairs
        return type(ours) is type(its) and bool(ours == its)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_RTOL)


def _in(call: TorchCall) -> str:
    return call.path or "module"


def _shown(value: Any) -> str:
    if not isinstance(value, Wire):
        return f"{value}" if not isinstance(value, tuple | dict) else f"{len(value)} arguments"
    if value.origin == "weight":
        return str(value.place[1])
    return {"call": "the result of another call", "unknown": "a tensor that nothing makes"}.get(
        value.origin, value.origin
    )
