"""Everything a layout can be run as: how cp runs attention, sequence parallelism, ZeRO, schedule, chunks per rank.

A variant is a space of its own, whose layouts share these choices; it holds a layout only where the choice changes
something that is executed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms
from autoshard.cost.stages import PerCandidate
from autoshard.schedule.builders import builders
from autoshard.schedule.waves import Ints
from autoshard.search.space import Pins, Space
from autoshard.spec.model import ModelSpec

CP_FORM = ("cp_kind", "cp_order")
VARIANT_KEYS = (*CP_FORM, "sp", "zero", "schedule", "vp", "stages")  # keys that a variant decides
_KINDS, _ORDERS, _ZEROS = ("ring", "all_to_all"), ("contiguous", "zigzag"), (1, 0, 3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunVariant(PerCandidate):
    """Layouts of a space with one choice of everything else; several numbers of chunks stand as several rows."""

    space: Space
    layouts: Ints  # the number of each row's layout in the space that this is made of
    allowed: NDArray[np.bool_]  # [kind of recompute, row]: what the Rules allow

    @classmethod
    def of(cls, space: Space, layouts: Ints) -> "RunVariant":
        """Return a variant that no Rule has judged yet."""
        return cls(space=space, layouts=layouts, allowed=np.ones((len(space.recomputes), len(layouts)), dtype=bool))

    @property
    def terms(self) -> Terms:
        """Under what its blocks are cut; with tp 1 it makes no difference whether tp cuts the sequence."""
        base = self.space.base
        return Terms(
            engine=self.space.engine,
            sequence_parallel=self.space.sp is not False,
            cp_kind=base.cp_kind,
            between=base.boundary,
        )


def cp_forms(space: Space, pins: Pins) -> Iterator[RunVariant]:
    """Yield every way in which cp may run attention, with the layouts for which it means something of its own.

    With heads cut over cp every rank sees whole sequences, so that their order is nothing of its own; and tp cuts none.
    """
    rows = space.rows
    for kind, order in product(*_free(pins, cp_kind=_KINDS, cp_order=_ORDERS)):
        where = np.ones(space.num_layouts, dtype=bool)
        if "cp_kind" not in pins and kind != "ring":
            where &= (rows["cp"] > 1) & (rows["tp"] == 1)
        if "cp_order" not in pins and order != "contiguous":
            where &= (rows["cp"] > 1) & (kind == "ring")
        layouts = np.flatnonzero(where)
        if len(layouts):
            found = replace(space, base=replace(space.base, cp_kind=kind, cp_order=order))
            yield RunVariant.of(found.only(layouts), layouts)


def variants(forms: Sequence[RunVariant], model: ModelSpec, pins: Pins) -> Iterator[RunVariant]:
    """Yield every choice that is not pinned, with the layouts for which it means something of its own."""
    sps, zeros, schedules = _choices(pins)
    for sp, zero, form, builder in product(sps, zeros, forms, schedules):
        rows = form.space.rows
        where = np.ones(form.space.num_layouts, dtype=bool)
        if "sp" not in pins and sp is False:
            where &= rows["tp"] > 1
        if "zero" not in pins and zero != 1:
            where &= rows["dp"] * rows["cp"] > 1
        if "schedule" not in pins and builder != "1f1b":
            where &= rows["pp"] > 1
        base = replace(form.space.base, zero=zero, schedule=builder)
        found = replace(form.space, base=base, sp=sp)
        some, chunks = _chunked(np.flatnonzero(where), rows["pp"], builder, model.num_layers, pins)
        if len(some):
            kept = found.only(some)
            yield RunVariant.of(replace(kept, rows={**kept.rows, "vp": chunks}), form.layouts[some])


def num_variants(space: Space, model: ModelSpec, pins: Pins) -> Ints:
    """Count what each layout of a form can be run as: how many rows of all its variants are of it."""
    rows = space.rows
    sps = 1 if "sp" in pins else 1 + (rows["tp"] > 1)
    zeros = 1 if "zero" in pins else 1 + (len(_ZEROS) - 1) * (rows["dp"] * rows["cp"] > 1)
    schedules = np.zeros(space.num_layouts, dtype=np.int64)
    for builder in _choices(pins)[-1]:
        where = (rows["pp"] > 1) | (builder == "1f1b") | ("schedule" in pins)
        layouts, _ = _chunked(np.flatnonzero(where), rows["pp"], builder, model.num_layers, pins)
        schedules += np.bincount(layouts, minlength=space.num_layouts)
    return sps * zeros * schedules


def _choices(pins: Pins) -> Sequence[Sequence[Any]]:
    """Return what sp, zero and the schedule may be."""
    schedules = [name for name, builder in builders().items() if _may_have(builder.num_chunks, pins)]
    return _free(pins, sp=(None, False), zero=_ZEROS, schedule=schedules)


def _free(pins: Pins, **choices: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Return what keys may be: what is pinned, or any of their choices."""
    return [[pins[key]] if key in pins else values for key, values in choices.items()]


def _may_have(num_chunks: int | None, pins: Pins) -> bool:
    """Say whether a schedule may run as many chunks as are pinned."""
    return "vp" not in pins or (num_chunks == pins["vp"] if num_chunks else pins["vp"] > 1)


def _chunked(layouts: Ints, pp: Ints, builder: str, num_layers: int, pins: Pins) -> tuple[Ints, Ints]:
    """Return the layouts once for every number of chunks per rank that a schedule may have there, and these numbers."""
    fixed = pins.get("vp", builders()[builder].num_chunks)
    if fixed is not None:
        fits = layouts[pp[layouts] * fixed <= num_layers] if "vp" not in pins else layouts
        return fits, np.full(len(fits), fixed)
    counts = np.maximum(num_layers // pp[layouts] - 1, 0)  # from two chunks on
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(layouts, counts), np.arange(int(counts.sum())) - first + 2
