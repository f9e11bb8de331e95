"""The nxd engine under real torch_xla: how many graphs a step has, what the host reads, and what ranks send.

torch_xla itself runs where ``AUTOSHARD_XLA_PYTHON`` names an environment with it; its record is compared always.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from autoshard.cost.predict import compiling
from tests.slower import rest_is_slow
from tests.xla.cases import LOWERED, RUN
from tests.xla.listed import Listed
from tests.xla.record import (
    BEGIN,
    NUM_STEPS,
    PAGE,
    PLACES,
    PYTHON,
    RECORD,
    faults_in_order,
    faults_of,
    ranks_of,
    recorded_run,
    recorded_sent,
    with_table,
)
from tests.xla.sent import Sent, in_graph

RECORDED: Any = json.loads(RECORD.read_text(encoding="utf-8"))
SEEDED = "tp + sp x dp, ZeRO-1"
NEAR = {"fp32": 1e-6, "bf16": 2e-2}


def test_every_case_is_recorded_and_the_docs_show_it() -> None:
    assert list(RECORDED["run"]) == list(RUN) and list(RECORDED["lowered"]) == list(LOWERED)
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and with_table(page, RECORDED) == page


@pytest.mark.parametrize("name", RUN)
def test_as_many_graphs_were_compiled_as_plan_predicts_and_only_in_the_first_step(name: str) -> None:
    found, predicted = RECORDED["run"][name], compiling(RUN[name].task(1).plan)
    assert predicted and predicted.num_graphs == found["predicted"]
    check_run(found)


def check_run(found: Any) -> None:
    assert found["compiled"] == [found["predicted"], *[0] * (NUM_STEPS - 1)]
    assert found["graphs"] == dict.fromkeys(PLACES.values(), 1)
    # Loss and norm, both after the graph that makes them has run, and nothing else.
    assert found["read"] == [2] * NUM_STEPS and found["read elsewhere"] == 0
    assert not found["fallbacks"], "operations that XLA has not are computed by the host"


@pytest.mark.parametrize("name", rest_is_slow(LOWERED, 3))
def test_the_table_lists_what_graphs_were_seen_to_send(name: str) -> None:
    case = LOWERED[name]
    plan = case.task(1).plan
    for found in RECORDED["lowered"][name]:
        for rank in found["ranks"]:
            listed = Listed(plan, rank)
            wanted = Counter([*listed.passes(), *listed.sends(), *listed.step()])
            assert recorded_sent(found) == wanted + case.beyond()


def written(sent: Sequence[Sent]) -> str:
    """Write collectives as the text of a graph has them."""
    return "".join(map(_line, sent))


def _line(one: Sent) -> str:
    kind, shape = one.kind.removesuffix("_max").replace("_", "-"), f"pred[{one.size_bytes}]{{0}}"
    how = "%MaxComputation.1" if one.kind.endswith("_max") else "%AddComputation.1"
    token = kind == "all-reduce"
    makes, reads = (f"({shape}, f32[])", f"{shape} %a.1, f32[] %b.1") if token else (shape, f"{shape} %a.1")
    groups = ",".join("{" + ",".join(map(str, row)) + "}" for row in one.groups)
    return f"  %{kind}.1 = {makes} {kind}({reads}), replica_groups={{{groups}}}, to_apply={how}\n"


SEEDS: dict[str, Callable[[str], str]] = {
    "a group of other ranks": lambda text: text.replace("{{0,1},{2,3}}", "{{0,2},{1,3}}", 1),
    "two ranks of a group swapped": lambda text: text.replace("{{0,1},{2,3}}", "{{1,0},{2,3}}", 1),
    "a collective left out": lambda text: text.replace(" all-gather(", " add(", 1),
    "a sum instead of a maximum": lambda text: re.sub("( all-reduce.*to_apply=%)Max", r"\1Add", text, count=1),
    "a gather instead of a scatter": lambda text: text.replace("reduce-scatter", "all-gather"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_fault_is_found(seed: str) -> None:
    case = LOWERED[SEEDED]
    plan = case.task(1).plan
    sent = list(recorded_sent(RECORDED["lowered"][SEEDED][0]).elements())
    assert in_graph(written(sent)) == sent
    assert not list(faults_of(case, plan, 0, written(sent)))
    assert list(faults_of(case, plan, 0, SEEDS[seed](written(sent))))


@pytest.fixture
def python() -> str:
    """The Python of the environment with torch-xla and NxD."""
    found = os.environ.get(PYTHON)
    if not found:
        pytest.skip(
            f"needs torch-xla and NxD in an environment of their own: docs/developers/trainium.md; set {PYTHON}"
        )
    return found


@pytest.mark.xla
@pytest.mark.parametrize("name", RUN)
def test_a_rank_compiles_all_graphs_in_its_first_step_and_reads_two_numbers_in_each(name: str, python: str) -> None:
    task = RUN[name].task(NUM_STEPS)
    (rank,) = ranks_of(python, task, "run")
    check_run(recorded_run(rank, task.plan))
    expected, first = task.reference(), rank.notes["steps"][0]
    near = NEAR[RUN[name].precision]
    np.testing.assert_allclose([first["loss"], first["norm"]], [expected.loss, expected.norm], rtol=near)


@pytest.mark.xla
@pytest.mark.parametrize("name", LOWERED)
def test_graphs_of_all_ranks_send_what_the_table_lists_in_its_order(name: str, python: str) -> None:
    case = LOWERED[name]
    plan = (task := case.task(1)).plan
    for number, rank in enumerate(ranks_of(python, task, "lower")):
        assert not list(faults_of(case, plan, number, rank.graph))
        if not case.more:
            assert not list(faults_in_order(plan, number, rank.notes["calls"], rank.graph))
        if name == SEEDED:
            missed = [
                seed for seed, change in SEEDS.items() if not list(faults_of(case, plan, number, change(rank.graph)))
            ]
            assert not missed
