"""The state of the real NxD as boxes of our tensors: saved once, taken up bit by bit, and by the other engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.graph.op import Array
from autoshard.run.placement import StatePiece
from autoshard.run.protocol import StepReport
from autoshard.spec.workload import Precision
from tests.neuron.cases import COPIED, DROPPING, PATIENCE_S, Case, as_started
from tests.neuron.nxd_ranks import on_nxd_ranks
from tests.ranks.cases import MIXTRAL, Arrays, Task, gpt

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
PLANS = {
    "tp x dp": Case(text="tp=2,pp=1,dp=2"),
    "tp x dp, rows that do not divide": Case(text="tp=2,pp=1,dp=2", options={"vocab": 31, "hidden": 10}),
    "tp x pp": Case(text="tp=2,pp=2,dp=1"),
    "cp x dp": Case(text="tp=1,pp=1,cp=2,dp=2"),
    "cp x pp": Case(text="tp=1,pp=2,cp=2,dp=1"),
    "copies of keys, trn1": Case(text="tp=4,pp=1,dp=1", options=COPIED),
    "copies of keys, trn2": Case(text="tp=4,pp=1,dp=1", options=COPIED, platform="trn2"),
    "without ZeRO-1": Case(text="tp=2,pp=1,dp=2,zero=0"),
    "learned positions, biases, tied embeddings": Case(text="tp=2,pp=1,dp=2", model=gpt),
    "tied embeddings": Case(text="tp=2,pp=1,dp=2", options={"tied_embeddings": True}),
    "SGD": Case(text="tp=2,pp=1,dp=2", workload={"optimizer": "sgd"}),
    "experts": Case(text="tp=2,pp=1,dp=2", options=MIXTRAL),
    "experts that drop tokens": Case(text="tp=2,pp=1,dp=2", options=MIXTRAL, workload=DROPPING),
}
ONLY_FP32 = {
    "without ZeRO-1": "BF16 weights have FP32 masters, which NxD keeps in ZeRO-1",
    "learned positions, biases, tied embeddings": "the best table for BF16 has an entry that no layer of NxD sends",
}


# -- what ranks run ------------------------------------------------------------------------------------


def engine_of(name: str, task: Task, weights: Callable[[str], Array]) -> Any:
    if name == "nxd":
        from autoshard.engine.nxd.engine import NxdEngine

        return NxdEngine(task.plan, weights)
    from autoshard.engine.torch.engine import TorchEngine

    return TorchEngine(task.plan, weights)


def saved(engine: Any) -> tuple[StatePiece, ...]:
    """The pieces of an engine as they are now."""
    return tuple(replace(piece, memory=piece.memory.float().numpy().copy()) for piece in engine.pieces())


def box(piece: StatePiece) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.memory.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a rank has: its pieces before the last step, and after it these, its weights, loss and norm."""

    before: tuple[StatePiece, ...]
    after: tuple[StatePiece, ...]
    weights: tuple[bytes, ...]
    loss: float
    norm: float


def run_going_on(task: Task, state: Arrays | None, platform: str, engine: str, apart: bool) -> Resumed:
    """Run all steps of a task, or only the last, from a state after the others.

    ``apart`` lets the engine of NxD believe that views share no memory.
    """
    with as_started(task.plan.mesh.size("tp"), platform):
        made = engine_of(engine, task, (lambda name: task.weights[name] + 1) if state else task.weights.__getitem__)
        if apart:
            made.state.apart = True
        if state:
            for piece in made.pieces():
                assert piece.whole == state[piece.name].shape
                if piece.reads:
                    piece.memory.copy_(torch.from_numpy(state[piece.name][box(piece)]))
            made.restored(len(task.steps) - 1)
        else:
            for step in task.steps[:-1]:
                made.step(step, task.learning_rate)
        before = saved(made)
        report = made.step(task.steps[-1], task.learning_rate)
        weights = [_bytes(one.detach()) for _, one in made.parameters] if engine == "nxd" else []
        return Resumed(before=before, after=saved(made), weights=tuple(weights), loss=report.loss, norm=report.norm)


@dataclass(frozen=True, kw_only=True)
class Declined:
    """What a rank has of a step that was not to be taken, and of the next, which was."""

    asked: tuple[StepReport, ...]
    report: StepReport
    same: bool  # what it held when it was asked, and after, as before the step
    learning_rates: frozenset[float]
    after: tuple[bytes, ...]


def run_declined(task: Task, tries: bool) -> Declined:
    """Run a step, one that is declined (if it ``tries``), and another."""
    with as_started(task.plan.mesh.size("tp")):
        engine = engine_of("nxd", task, task.weights.__getitem__)
        first, wrong, last = task.steps
        engine.step(first, task.learning_rate)
        asked: list[StepReport] = []
        seen = [_held(engine)]

        def refuses(report: StepReport) -> bool:
            asked.append(report)
            seen.append(_held(engine))
            return False

        report = StepReport(loss=0.0, norm=0.0)
        if tries:
            report = engine.step(wrong, 1.0, refuses)
            seen.append(_held(engine))
        rates = frozenset(float(group["lr"]) for group in engine.state.stepping.param_groups)
        assert engine.step(last, task.learning_rate).updated
        same = all(one == seen[0] for one in seen)
        return Declined(asked=tuple(asked), report=report, same=same, learning_rates=rates, after=_held(engine))


def run_first_step(task: Task) -> tuple[bool, bool]:
    """Say whether tables, moments and gradients of a step were there before the first, and whether they are cleared."""
    with as_started(task.plan.mesh.size("tp")):
        engine = engine_of("nxd", task, task.weights.__getitem__)
        before = _lasting(engine)
        engine.step(task.steps[0], task.learning_rate)
        cleared = all(not _gradient(one.parameter).any() for one in engine.state.optimized)
        return [id(one) for one in before] == [id(one) for one in _lasting(engine)], cleared


def _lasting(engine: Any) -> list[torch.Tensor]:
    moments = [tensor for state in engine.state.stepping.state.values() for tensor in state.values()]
    tables = list(engine.built.rotary._made.values())
    assert moments and tables
    return [*tables, *moments, *(_gradient(one.parameter) for one in engine.state.optimized)]


def _gradient(parameter: Any) -> torch.Tensor:
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def _held(engine: Any) -> tuple[bytes, ...]:
    steps = [_bytes(one["step"]) for one in engine.state.stepping.state.values() if "step" in one]
    pieces = [one.memory.tobytes() for one in saved(engine)]
    return (*pieces, *steps, *(_bytes(one.detach()) for _, one in engine.parameters))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.float().numpy().tobytes()


# -- going on ------------------------------------------------------------------------------------------


def task_of(case: Case, precision: str = "fp32", num_steps: int = 3) -> Task:
    return Task.of(replace(case, workload={**case.workload, "precision": Precision.named(precision)}).plan(), num_steps)


def ran(
    case: Case, task: Task, state: Arrays | None = None, engine: str = "nxd", *, apart: bool = False
) -> list[Resumed]:
    given = (task, state, case.platform, engine, apart)
    return on_nxd_ranks(task.plan.mesh.num_ranks, run_going_on, *given, timeout_s=PATIENCE_S)


def together(parts: Sequence[Sequence[StatePiece]]) -> Arrays:
    """Put the tensors of a state together from what ranks save: every element exactly once."""
    found: dict[str, Array] = {}
    counts: dict[str, Array] = {}
    for one in (one for rank in parts for one in rank if one.saves):
        found.setdefault(one.name, np.zeros(one.whole, dtype=np.float32))[box(one)] = one.memory
        counts.setdefault(one.name, np.zeros(one.whole, dtype=int))[box(one)] += 1
    wrong = [name for name, count in counts.items() if not (count == 1).all()]
    assert not wrong, f"not saved exactly once: {wrong}"
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(PLANS))
def test_a_run_goes_on_from_its_pieces_bit_by_bit(name: str, precision: str) -> None:
    if precision == "bf16" and name in ONLY_FP32:
        pytest.skip(ONLY_FP32[name])
    case = PLANS[name]
    task = task_of(case, precision)
    went_on = ran(case, task)
    state = together([rank.before for rank in went_on])
    for one, other in zip(went_on, ran(case, task, state, apart=name == "tp x dp"), strict=True):
        assert (one.loss, one.norm, one.weights) == (other.loss, other.norm, other.weights)
        for mine, its in ((one.before, other.before), (one.after, other.after)):
            assert [piece.name for piece in mine] == [piece.name for piece in its]
            assert all(np.array_equal(a.memory, b.memory) for a, b in zip(mine, its, strict=True))
    after = together([rank.after for rank in went_on])
    assert all((array != after[name]).any() for name, array in state.items() if "bias" not in name)


@pytest.mark.parametrize("name", list(PLANS))
def test_both_engines_hold_the_same_state_and_take_up_that_of_the_other(name: str) -> None:
    case = PLANS[name]
    task = task_of(case)
    by_nxd, by_torch = ran(case, task), ran(case, task, engine="torch")
    states = [together([rank.before for rank in found]) for found in (by_nxd, by_torch)]
    one, other = ({name: array.shape for name, array in state.items()} for state in states)
    assert one == other
    for taken, state, expected in (("torch", states[0], by_nxd), ("nxd", states[1], by_torch)):
        found = ran(case, task, state, engine=taken)
        for rank in found:
            np.testing.assert_allclose([rank.loss, rank.norm], [expected[0].loss, expected[0].norm], rtol=2e-6)
        one, other = (together([rank.after for rank in ranks]) for ranks in (found, expected))
        largest = dict[str, float]()  # of the same part: gradients that should be zero leave noise in their moments
        for kind, array in ((name.partition("/")[0], array) for name, array in other.items()):
            largest[kind] = max(largest.get(kind, 0.0), float(np.abs(array).max()))
        for name in other:
            assert np.abs(one[name] - other[name]).max() < 0.02 * largest[name.partition("/")[0]], name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tp x dp", "tp x pp"])
def test_what_lasts_is_made_before_the_first_step(name: str, precision: str) -> None:
    # Else the graph of the first step makes it, and that of the second, which finds it, is compiled as well.
    task = task_of(PLANS[name], precision, 1)
    assert on_nxd_ranks(task.plan.mesh.num_ranks, run_first_step, task, timeout_s=PATIENCE_S) == [(True, True)] * 4


# -- steps that are not taken --------------------------------------------------------------------------

STOPPED = {
    "ZeRO-1": Case(text="tp=2,pp=1,dp=2"),
    "ZeRO-1, BF16": Case(text="tp=2,pp=1,dp=2", workload={"precision": Precision.named("bf16")}),
    "without ZeRO-1": Case(text="tp=1,pp=1,dp=2,zero=0"),
    "pipeline": Case(text="tp=1,pp=2,dp=2"),
    "SGD": Case(text="tp=1,pp=1,cp=2,dp=1", workload={"optimizer": "sgd"}),
}


def declined(task: Task, *, tries: bool = True) -> list[Declined]:
    return on_nxd_ranks(task.plan.mesh.num_ranks, run_declined, task, tries, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("name", list(STOPPED))
def test_a_step_that_is_not_allowed_leaves_no_trace(name: str) -> None:
    task = Task.of(STOPPED[name].plan(), 3)
    found, without = declined(task), declined(task, tries=False)
    assert {rank.asked for rank in found} == {found[0].asked}
    assert len(found[0].asked) == 1 and found[0].asked[0].finite and found[0].asked[0].updated
    for rank, other in zip(found, without, strict=True):
        assert rank.same and rank.report == replace(rank.asked[0], updated=False)
        assert rank.learning_rates == {1.0} and other.learning_rates == {task.learning_rate}
        assert rank.after == other.after


@pytest.mark.parametrize(("name", "ranks"), [("ZeRO-1", [2, 3]), ("ZeRO-1, BF16", [2, 3]), ("pipeline", [1, 3])])
def test_ranks_with_bad_samples_are_suspects_before_the_update(name: str, ranks: list[int]) -> None:
    task = Task.of(STOPPED[name].plan(), 3)
    task.steps[1][-1]["token_weight"][-1, -1] = np.nan  # of the last sequence, which is the last replica's
    found = declined(task)
    assert len({rank.report.suspects for rank in found}) == 1
    for rank in found:
        assert rank.same and not rank.report.finite
        assert [one.partition(":")[0] for one in rank.report.suspects] == [f"rank {at}" for at in ranks]
    if name == "ZeRO-1":
        assert f"loss of micro-batch {len(task.steps[1]) - 1}, gradient of" in found[0].report.suspects[0]
