"""Everything a layout can be run as: sequence parallelism, ZeRO, order of the sequence, schedule, chunks per rank.

A variant is a space of its own, whose layouts share these choices; it holds a layout only where the choice changes
something that is executed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from autoshard.schedule.builders import BUILDERS
from autoshard.search.space import Pins, Space
from autoshard.spec.model import ModelSpec

Column = Any
CHOSEN = ("sp", "zero", "cp_kind", "cp_order", "schedule", "vp", "stages")  # keys that a variant decides
_ZEROS, _ORDERS = (1, 0, 3), ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """Layouts of a space with one choice of everything else; several numbers of chunks stand as several rows."""

    space: Space
    layouts: Column  # the number of each row's layout in the space that this is made of


def variants(space: Space, model: ModelSpec, pins: Pins) -> Iterator[Variant]:
    """Yield every choice that is not pinned, with the layouts for which it means something of its own."""
    rows = space.rows
    for sp, zero, order, builder in product(*_choices(pins)):
        where = np.ones(space.num_layouts, dtype=bool)
        if "sp" not in pins and sp is False:
            where &= rows["tp"] > 1
        if "zero" not in pins and zero != 1:
            where &= rows["dp"] * rows["cp"] > 1
        if "cp_order" not in pins and order != "contiguous":
            where &= rows["cp"] > 1
        if "schedule" not in pins and builder != "1f1b":
            where &= rows["pp"] > 1
        base = replace(space.base, zero=zero, cp_order=order, schedule=builder)
        found = replace(space, base=base, sp=sp)
        layouts, chunks = _chunked(np.flatnonzero(where), rows["pp"], builder, model.num_layers, pins)
        if len(layouts):
            kept = found.keep(layouts)
            yield Variant(space=replace(kept, rows={**kept.rows, "vp": chunks}), layouts=layouts)


def num_variants(space: Space, model: ModelSpec, pins: Pins) -> Column:
    """Count what each layout can be run as: how many rows of all variants are of it."""
    rows = space.rows
    sps = 1 if "sp" in pins else 1 + (rows["tp"] > 1)
    zeros = 1 if "zero" in pins else 1 + (len(_ZEROS) - 1) * (rows["dp"] * rows["cp"] > 1)
    orders = 1 if "cp_order" in pins else 1 + (len(_ORDERS) - 1) * (rows["cp"] > 1)
    schedules = np.zeros(space.num_layouts, dtype=np.int64)
    for builder in _choices(pins)[-1]:
        where = (rows["pp"] > 1) | (builder == "1f1b") | ("schedule" in pins)
        layouts, _ = _chunked(np.flatnonzero(where), rows["pp"], builder, model.num_layers, pins)
        schedules += np.bincount(layouts, minlength=space.num_layouts)
    return sps * zeros * orders * schedules


def _choices(pins: Pins) -> Sequence[Sequence[Any]]:
    """Return what sp, zero, cp_order and the schedule may be."""
    schedules = [name for name, builder in BUILDERS.items() if _may_have(builder.num_chunks, pins)]
    free: Mapping[str, Sequence[Any]] = {
        "sp": (None, False), "zero": _ZEROS, "cp_order": _ORDERS, "schedule": schedules,
    }  # fmt: skip
    return [[pins[key]] if key in pins else values for key, values in free.items()]


def _may_have(num_chunks: int | None, pins: Pins) -> bool:
    """Say whether a schedule may run as many chunks as are pinned."""
    return "vp" not in pins or (num_chunks == pins["vp"] if num_chunks else pins["vp"] > 1)


def _chunked(layouts: Column, pp: Column, builder: str, num_layers: int, pins: Pins) -> tuple[Column, Column]:
    """Return the layouts once for every number of chunks per rank that a schedule may have there, and these numbers."""
    fixed = pins.get("vp", BUILDERS[builder].num_chunks)
    if fixed is not None:
        fits = layouts[pp[layouts] * fixed <= num_layers] if "vp" not in pins else layouts
        return fits, np.full(len(fits), fixed)
    counts = np.maximum(num_layers // pp[layouts] - 1, 0)  # from two chunks on
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(layouts, counts), np.arange(int(counts.sum())) - first + 2
