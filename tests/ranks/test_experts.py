"""Experts that drop nothing on several ranks: as many rows are sent, multiplied and kept as are routed."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

import autoshard.engine.torch.kernels.sinks as sinks
from autoshard.engine.programs import programs_of
from autoshard.engine.routing import Routing, moves_rows
from autoshard.engine.torch.generated import GeneratedRun
from autoshard.run.protocol import EngineMode
from autoshard.run.reports import Measured
from autoshard.runtime.machine import missing_compiler
from tests.ranks.cases import (
    AS_PLANNED,
    EXACT,
    MIXTRAL,
    StepShare,
    Task,
    compare,
    engine_of,
    gpt_oss,
    llama,
    plan_of,
    run_steps,
    same,
    share_of,
)
from tests.ranks.spawn import on_ranks
from tests.slower import covering, rest_is_slow

pytestmark = pytest.mark.ranks

# As a search cuts larger models with sequence parallelism: every rank of tp routes its own tokens.
OWN_TOKENS = {
    "layer.router": "[batch/dp, seq/tp, experts]",
    "layer.dispatch": "[experts, slots/dp.tp, hidden]",
    "layer.combine": "[batch/dp, seq/tp, hidden]",
}
LAYOUTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "own tokens on each rank of tp, recompute": ("tp=2,pp=1,dp=2,ep=2,recompute=full", OWN_TOKENS),
    "ep alone": ("tp=1,pp=1,dp=2,ep=2", {}),
    "one expert on each rank": ("tp=1,pp=1,dp=4,ep=4", {}),
    "recompute of activations": ("tp=1,pp=1,dp=2,ep=2,recompute=selective[activation]", {}),
    "the same tokens on all ranks of tp": ("tp=2,pp=1,dp=2,ep=2", {}),
    "ranks placed backwards": ("tp=2,pp=1,dp=2,ep=2,place=3-0", {}),
    "several ranks with the same experts": ("tp=1,pp=1,dp=4,ep=2,zero=3", {}),
    "sequences cut": ("tp=1,pp=1,cp=2,dp=2,ep=2", {}),
    "a backward in halves": ("tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", {}),
    "own tokens, sequences cut": ("tp=2,pp=1,cp=2,dp=2,ep=2", OWN_TOKENS),
    "experts over dp and tp": ("tp=2,pp=1,dp=2,ep=2,fold=tp", {}),
    "experts over tp alone": ("tp=2,pp=1,dp=2,fold=tp", {}),
    "experts over dp and cp": ("tp=1,pp=1,cp=2,dp=2,ep=2,fold=cp", {}),
    "experts over cp and tp": ("tp=2,pp=1,cp=2,dp=1,fold=cp.tp", {}),
    "experts over tp, stages": ("tp=2,pp=2,dp=2,ep=2,fold=tp,schedule=zb_h1,recompute=full", {}),
    "experts over tp, tokens of all": ("tp=2,pp=1,dp=2,ep=2,fold=tp,sp=false", {}),
    "experts over tp, copies, ZeRO-3": ("tp=2,pp=1,dp=4,ep=2,fold=tp,zero=3", {}),
    "experts over dp, cut over tp": ("tp=2,pp=1,dp=2,ep=2,fold=none", {}),
}
SIZES = {"hidden": 32, "ffn": 48, "vocab": 32, "num_experts": 8, "experts_per_token": 2, "num_layers": 1}


def to_one_rank(task: Task) -> Task:
    """A router that knows no difference: ties go to the lower number, so that all tokens choose the first experts."""
    return replace(task, weights={name: one * ("router" not in name) for name, one in task.weights.items()})


def as_drawn(task: Task) -> Task:
    """A router that spreads tokens unevenly."""
    return task


ROUTES = (as_drawn, to_one_rank)


def named(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def in_both_modes(task: Task) -> list[StepShare]:
    """A step generated, which equals the literal one to the last bit."""
    literal, generated = run_steps(task), run_steps(task, EXACT, "generated")
    same(literal[0], generated[0])
    return generated


# Every sixth layout with a route; of the others each is left to `make thorough` with both routes.
FEW = [*LAYOUTS][::6]
CASES = [*covering(FEW, ROUTES), *rest_is_slow(product((case for case in LAYOUTS if case not in FEW), ROUTES), 0, 0)]


@pytest.mark.parametrize(("case", "route"), CASES, ids=named)
def test_whatever_routers_choose_ranks_find_the_gradients_of_one_process(case, route):
    text, pins = LAYOUTS[case]
    plan = plan_of(text, llama(**MIXTRAL), pins)
    assert any(moves_rows(entry) for entry in programs_of(plan).stages[0]["layer.0"].program.collectives())
    task = route(Task.of(plan))
    compare(task.reference(), [share for (share,) in on_ranks(plan.mesh.num_ranks, in_both_modes, task)])


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_compiler("cpu")), reason="no compiler here")
def test_compiled_functions_run_on_a_rank_whose_experts_nobody_chose():
    task = to_one_rank(Task.of(plan_of("tp=1,pp=1,dp=2,ep=2", llama(num_layers=1, **MIXTRAL))))
    answers = on_ranks(2, run_steps, task, EXACT, "compiled", timeout_s=600)
    compare(task.reference(), [share for (share,) in answers])


def run_counted(task: Task, mode: EngineMode) -> tuple[StepShare, Measured, list[NDArray[np.int64]], bool]:
    """A step as planned, with the rows of all cells as they were counted."""
    tables, table = list[NDArray[np.int64]](), Routing.table
    engine = engine_of(task, AS_PLANNED, mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routing, "table", lambda *given: tables.append(table(*given)) or tables[-1])
        share = share_of(engine, task)
    generated = all(isinstance(run, GeneratedRun) for run in engine._pipeline.blocks.values())
    return share, engine.measured(), tables, generated


@pytest.mark.parametrize(("mode", "route"), covering(["generated", "literal"], ROUTES), ids=named)
def test_bytes_sent_and_kept_are_those_of_the_rows_that_were_routed(mode, route):
    """Counted once, also where all is computed again; what is kept is spread over ranks as rows are."""
    for text in ("tp=1,pp=1,dp=2,ep=2", "tp=1,pp=1,dp=2,ep=2,recompute=full"):
        plan = plan_of(text, llama(**SIZES), global_batch=2, expert_imbalance=0.0)
        answers = on_ranks(2, run_counted, route(Task.of(plan)), mode)
        assert plan.prediction
        row, passes = 2 * SIZES["hidden"], 3 if "full" in text else 2  # BF16; forward, perhaps again, and backward
        for rank, (_, found, (counts,), generated) in enumerate(answers):
            assert generated == (mode == "generated") and counts.sum() == 2 * 8 * SIZES["experts_per_token"]
            mine, theirs = slice(4 * rank, 4 * rank + 4), slice(4 - 4 * rank, 8 - 4 * rank)
            crossing = int(counts[theirs, rank].sum() + counts[mine, 1 - rank].sum())  # there, and back of others
            told = 8 * SIZES["num_experts"]  # to one other rank, a number for each
            assert found.sent_bytes["ep"] == passes * crossing * row + told
        saved = sum(found.memory_bytes["saved"] for _, found, *_ in answers)
        parts = plan.prediction.stage_memory[0].parts
        assert saved == 2 * (parts["activations"] + parts["logits"])


@pytest.mark.slow
def test_experts_that_nobody_chose_have_biases_that_stay() -> None:
    """In functions as in the interpreter; the rows of a rank are as many as were routed to it, which may be none."""
    task = to_one_rank(Task.of(plan_of("tp=1,pp=1,dp=2,ep=2", gpt_oss())))
    expected = task.reference()
    assert not expected.gradients["layer.0.gate_shift.bias"][2:].any()
    compare(expected, [share for (share,) in on_ranks(2, in_both_modes, task)])


FORGOTTEN = {
    "the share that sinks take from keys": (sinks, "join_sinks", lambda part, sink: tuple(part)),
    "the gradient of sinks": (sinks, "gradient_of_sinks", lambda upstream, result, lse, sink: sink * 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FORGOTTEN)
def test_sinks_that_a_ring_forgets_are_caught(fault: str) -> None:
    task = Task.of(plan_of("tp=1,pp=1,cp=2,dp=1", gpt_oss()))
    answers = on_ranks(2, run_steps, task, replaced=[FORGOTTEN[fault]])
    with pytest.raises(AssertionError):
        compare(task.reference(), [share for (share,) in answers])
