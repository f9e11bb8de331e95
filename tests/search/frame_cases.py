"""Frames with random blocks: what stages cost, without a model whose layers cost that; and all ways to fill them."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from autoshard.cost.pipeline import Sends
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.search.chosen import Options
from autoshard.search.families import Asked, Family, Prices, families
from autoshard.search.fillings import Filled, Fillings, Frame, Totals, filled
from autoshard.search.judging import judge_space
from autoshard.search.points import Legal
from autoshard.search.timed import makespan_s, timed
from tests.search.brute_force import FULL, PLAIN, Point, Truth, ask, compositions

GIB = 2.0**30
NORMS, MLP = (Recompute(kind="selective", ops=(name,)) for name in ("norms", "mlp"))
KINDS = ((PLAIN,), (PLAIN, FULL), (PLAIN, NORMS, FULL), (PLAIN, NORMS, MLP), (PLAIN, NORMS, MLP, FULL))


@functools.cache
def family(kernels: str, zero: int) -> Family:
    """Real layouts of a small model, whose sizes and links serve made-up blocks."""
    request = ask("tiny-llama", ranks=8, global_batch=16, pins=f"mbs=1,tp=2,dp=2,zero={zero},kernels={kernels}")
    ruled = judge_space(request, "torch")
    candidate = ruled.space.at(0, 0)
    question = request.question(candidate)
    asked = Asked(cutting=request.cutting(candidate, "torch"), atoms=frozenset({"kv", "edp"}))
    return next(iter(families(Prices(question), ruled.space, asked, {"contiguous": np.arange(1)})))


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Stages to fill, for several candidates at once."""

    frame: Frame
    options: Options
    capacity: float
    rest_share: float  # of the least step phase that the search is told
    text: str  # what was drawn

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text)


def totals(random: np.random.Generator, count: int, kinds: int, weights: Mapping[Any, Any], scale: float) -> Totals:
    """Draw a block: computed again it takes longer and keeps less, mostly."""
    shape = (kinds, count)
    steps = random.choice([0.0, 0.1, 0.25, 0.5], shape)
    steps[0] = 0.0
    forward = np.broadcast_to(random.choice([0.5, 1.0, 1.0, 2.0], count), shape) * scale
    if random.random() < 0.2:
        forward = forward * random.choice([1.0, 1.1], shape)  # no kernels that we know, but nothing forbids them
    saved = random.choice([1.0, 2.0, 4.0], shape) * GIB / 64
    return Totals(
        forward_s=forward,
        input_s=forward * (1 + steps),
        weight_s=np.broadcast_to(forward[0], shape) * random.choice([0.5, 1.0]),
        saved_bytes=np.sort(saved, axis=0)[::-1] * min(1.0, scale * 1e3),
        moment_bytes=random.choice([0.0, 1.0, 3.0], shape) * GIB / 64,
        waiting_bytes=random.choice([0.0, 1.0], shape) * GIB / 128,
        placeholder_bytes=np.zeros(shape),
        weights={pending: np.full(count, float(random.integers(10**5, 10**6))) for pending in weights},
        tied_weights={},
    )


@st.composite
def cases(
    draw: Any,
    builders: tuple[str, ...] = ("1f1b", "gpipe"),
    *,
    most_ranks: int = 4,
    chunks: int = 1,
    hides: bool = False,
) -> Case:
    """Few layers over few ranks, with blocks at random; of some kernels, a part of the step phase hides behind them."""
    builder, ranks = draw(st.sampled_from(builders)), draw(st.integers(2, most_ranks))
    layers = draw(st.integers(ranks * chunks, 6 if chunks == 1 else 3 * ranks * chunks))
    kinds = draw(st.sampled_from(KINDS if ranks < 4 or chunks > 1 else KINDS[:3]))
    seed, count = draw(st.integers(0, 10**6)), draw(st.integers(1, 3))
    number = draw(st.integers(1, 9)) if builder != "interleaved" else ranks * draw(st.integers(1, 3))
    hiding = [("mcore", 0), ("mcore", 1), ("torch_cuda", 3), ("torch_cuda", 3)]
    others = [("torch_cpu", 0), ("te", 1), ("torch_cuda", 1), ("torch_cpu", 3)]
    kernels, zero = draw(st.sampled_from(hiding if hides else others))
    random = np.random.default_rng(seed)
    real = family(kernels, zero)
    model = replace(real.question.model, num_layers=layers)
    schedule = Schedule(builder=builder, num_ranks=ranks, num_chunks=chunks, num_micro_batches=number)
    frame = real.frame(np.zeros(count, dtype=int), schedule, zero)
    weights = real.layer.weights
    scale = float(random.choice([1e-3, 1e-2]))
    sends = Sends(
        time_s=random.choice([0.0, 1e-5, 1e-4, 1e-3], count),
        hidden=draw(st.booleans()),
        receives_apart=draw(st.booleans()),
    )
    frame = replace(
        frame,
        question=replace(real.question, model=model),
        sends=sends,
        embed=totals(random, count, 1, weights, scale * float(random.choice([0.0, 0.1, 1.0]))),
        layer=totals(random, count, len(kinds), weights, scale),
        head=totals(random, count, 1, weights, scale * float(random.choice([0.1, 1.0, 2.0]))),
    )
    allowed = random.random((len(kinds), count)) < draw(st.sampled_from([0.7, 1.0, 1.0]))
    options = Options(kinds=kinds, allowed=allowed, num_layers=layers, stages=None, recompute=None)
    capacity = GIB * draw(st.sampled_from([1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 9.0, 1e3]))
    text = f"{builder} {ranks} ranks {chunks} chunks {number} micro-batches {layers} layers {count} candidates "
    text += f"{len(kinds)} kinds, seed {seed}, {kernels} zero {zero} {sends} {capacity / GIB} GiB, {allowed.tolist()}"
    return Case(
        frame=frame, options=options, capacity=capacity, rest_share=draw(st.sampled_from([0.0, 1.0])), text=text
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Everything:
    """All ways to fill the stages of a case, a column per candidate."""

    time_s: Any  # infinite where it does not fit
    peak_bytes: Any
    rest_s: Any  # what no way spends less on beside its micro-batches


def every_filling(case: Case) -> Everything:
    """Try all layer ranges with every recompute of every stage."""
    frame, options = case.frame, case.options
    ranks, layers, full = frame.schedule.num_ranks, options.num_layers, FULL in options.kinds
    rows: list[tuple[int, int, int]] = []
    for size in range(1, layers + 1):
        rows += [(kind, size, 0) for kind in range(len(options.kinds))]
        rows += [(options.kinds.index(FULL), count, size - count) for count in range(1, size) if full]
    kind, dropped, plain = (np.array(column) for column in zip(*rows, strict=True))
    fillings = Fillings(
        kind=kind[None, :, None], dropped=dropped[None, :, None], plain=plain[None, :, None],
        plain_kind=options.kinds.index(PLAIN),
    )  # fmt: skip
    found = filled(frame, fillings)
    by_size = {size: np.flatnonzero(dropped + plain == size).tolist() for size in range(1, layers + 1)}
    picks = [
        pick for split in compositions(layers, ranks) for pick in itertools.product(*(by_size[size] for size in split))
    ]
    option = np.array(picks).T  # [rank, way]
    legal = options.allowed[kind] & ((plain == 0)[:, None] | options.allowed[fillings.plain_kind])
    fits = legal[None] & (found.peak_bytes <= case.capacity)
    columns = [_column(case, fillings, found, option, fits, number) for number in range(frame.num_candidates)]
    return Everything(**{name: np.stack([one[name] for one in columns], axis=1) for name in columns[0]})


def _column(case: Case, fillings: Fillings, found: Filled, option: Any, fits: Any, number: int) -> dict[str, Any]:
    """Time all ways of one candidate."""
    same = np.full(option.shape[1], number)
    frame, one = case.frame.only(same), found.only(same)
    ranks = np.arange(len(option))[:, None]
    ok = fits[ranks, option, number].all(axis=0)
    times = timed(frame, fillings, one, option, np.ones(len(same), dtype=bool))
    places, columns = [frame.schedule.place_of(stage)[0] for stage in range(len(option))], np.arange(len(same))
    passes = [
        np.stack([column[rank, option[rank], 0, columns] for rank in places])
        for column in (one.forward_s, one.input_s, one.weight_s)
    ]
    rest = times.time_s - makespan_s(frame, *passes) - frame.question.calibration.step_s
    return {
        "time_s": np.where(ok, times.time_s, np.inf),
        "peak_bytes": np.where(ok, times.peak_bytes, np.inf),
        "rest_s": case.rest_share * rest,
    }


def single_frames(truth: Truth) -> Iterator[tuple[Point, Legal, int, Family]]:
    """Yield every legal point as the search has it, alone: its variant and row, and a family of its layout alone."""
    request, (engine,) = truth.request, truth.request.engines
    ruled = judge_space(request, engine)
    for legal in ruled.legal:
        variant = legal.variant
        for place, layout in enumerate(variant.layouts.tolist()):
            point = truth.point_of(variant.space.at(place, 0))
            space = replace(ruled.space, base=variant.space.base, sp=variant.space.sp)
            asked = Asked(cutting=point.blocks.cutting, atoms=frozenset())
            (one,) = families(Prices(point.question), space, asked, {space.base.cp_order: np.array([layout])})
            yield point, legal, place, one
