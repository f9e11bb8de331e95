"""What real torch_xla did with plans, kept in ``record.json``, which ``python -m tests.xla.record`` writes.

Its table in ``docs/developers/trainium.md`` is written with it.
"""

import datetime
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost.predict import compiling
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from tests.ranks.cases import Task
from tests.xla.cases import LOWERED, RUN, Case
from tests.xla.listed import Listed
from tests.xla.sent import Sent, in_calls, in_graph

PYTHON = "AUTOSHARD_XLA_PYTHON"  # of an environment with torch-xla and NxD: docs/developers/trainium.md
ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("record.json")
PAGE = ROOT / "docs" / "developers" / "trainium.md"
BEGIN, END = "<!-- xla: written by tests/xla/record.py -->", "<!-- end of xla -->"
NUM_STEPS = 4
PATIENCE_S = 600.0
PLACES = {"_one_by_one": "micro-batch", "ask": "reduction, loss and norm", "step": "update"}  # functions of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a rank left: its notes, and of a lowered one the text of its graph."""

    notes: Mapping[str, Any]
    graph: str


def ranks_of(python: str, task: Task, what: str) -> list[Rank]:
    """Run or lower all ranks of a plan in the other environment, each in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(dump(task.plan), encoding="utf-8")
        steps = {
            f"step/{step}/{batch}/{name}": array
            for step, batches in enumerate(task.steps)
            for batch, arrays in enumerate(batches)
            for name, array in arrays.items()
        }
        weights = {f"weight/{name}": array for name, array in task.weights.items()}
        np.savez(folder / "given.npz", allow_pickle=False, **steps, **weights)
        paths = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [python, str(Path(__file__).with_name("on_xla.py")), name, what]
        numbers = range(task.plan.mesh.num_ranks)
        started = [subprocess.Popen([*command, str(rank)], env=environment) for rank in numbers]
        try:
            codes = [one.wait(PATIENCE_S) for one in started]
        finally:
            for one in started:
                one.kill()
        assert not any(codes), f"ranks of {task.plan.candidate} ended with {codes}: see above"
        texts = [folder / f"{rank}.hlo" for rank in numbers]
        return [
            Rank(
                notes=json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")),
                graph=text.read_text(encoding="utf-8") if text.exists() else "",
            )
            for rank, text in zip(numbers, texts, strict=True)
        ]


def faults_of(case: Case, plan: Plan, rank: int, graph: str) -> Iterator[str]:
    """Yield in what a graph differs from the table: kinds, groups and bytes."""
    listed = Listed(plan, rank)
    wanted = Counter([*listed.passes(), *listed.sends(), *listed.step()]) + case.beyond()
    found = Counter(in_graph(graph))
    yield from (f"rank {rank}: {count} x {one} is not in the table" for one, count in (found - wanted).items())
    yield from (f"rank {rank}: {count} x {one} is not in the graph" for one, count in (wanted - found).items())


def faults_in_order(plan: Plan, rank: int, calls: Sequence[str], graph: str) -> Iterator[str]:
    """Yield where calls differ from the table in order, or from the graph at all.

    What goes between stages NxD interlaces by parity of the stage: of it only the number is compared.
    """
    listed, called = Listed(plan, rank), [one for sent in in_calls(calls) for one in sent]
    if Counter(called) != Counter(in_graph(graph)):
        yield f"rank {rank}: its graph has other collectives than were called"
    sends = set(listed.sends())
    found, wanted = [one for one in called if one not in sends], [*listed.passes(), *listed.step()]
    pairs = zip(found, wanted, strict=False)
    yield from (f"rank {rank}: {one} in the place of {other}" for one, other in pairs if one != other)


def recorded_run(rank: Rank, plan: Plan) -> dict[str, Any]:
    """Return what the record keeps of a rank that ran."""
    predicted, steps = compiling(plan), rank.notes["steps"]
    assert predicted
    graphs = {PLACES.get(name, name): one["compiled"] for name, one in steps[0]["graphs"].items()}
    return {
        "predicted": predicted.num_graphs,
        "graphs": graphs,
        "compiled": [one["compiled"] for one in steps],
        "read": [one["read"]["_report"] for one in steps],
        "read elsewhere": sum(one["read"]["elsewhere"] for one in steps),
        "fallbacks": rank.notes["fallbacks"],
    }


def recorded_ranks(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Return what the record keeps of lowered ranks; those that send the same stand together."""
    found: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        sent = {str(one): count for one, count in sorted(Counter(in_graph(rank.graph)).items())}
        same = next((one for one in found if one["sent"] == sent), None)
        if same is None:
            found.append(same := {"ranks": [], "sent": sent})
        same["ranks"].append(number)
    return found


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Write the tables of the docs."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield f"`{record['command']}`, {record['date']}: {versions}; on a CPU."
    yield ""
    yield "| a rank runs | candidate | graphs predicted | compiled in steps 1 to 4 | which | read by the host, a step |"
    yield "| --- | --- | ---: | --- | --- | --- |"
    for name, found in record["run"].items():
        compiled, graphs = ", ".join(map(str, found["compiled"])), "; ".join(found["graphs"])
        read = f"{found['read'][-1]} numbers, after the reduction"
        yield f"| {name} | `{RUN[name].text}` | {found['predicted']} | {compiled} | {graphs} | {read} |"
    yield ""
    yield "| ranks are lowered | candidate | ranks | collectives of a rank in its graph | beyond the table |"
    yield "| --- | --- | ---: | --- | --- |"
    for name, found in record["lowered"].items():
        case, count = LOWERED[name], sum(len(one["ranks"]) for one in found)
        numbers = ", ".join(str(sum(one["sent"].values())) for one in found)
        beyond = f"{len(case.more)}: {case.why}" if case.more else "none"
        yield f"| {name} | `{case.text}` | {count} | {numbers} | {beyond} |"


def with_table(page: str, record: Mapping[str, Any]) -> str:
    """Put the tables between their marks."""
    before, _, rest = page.partition(BEGIN)
    return "\n".join((f"{before}{BEGIN}", "", *lines(record), "", f"{END}{rest.partition(END)[2]}"))


def recorded_sent(found: Mapping[str, Any]) -> Counter[Sent]:
    """Return what ranks send, as the record has it."""
    return Counter({Sent.parse(text): count for text, count in found["sent"].items()})


def main() -> None:
    """Run and lower all cases; write the record and its tables if nothing differs."""
    python = os.environ[PYTHON]
    record: dict[str, Any] = {"command": f"{PYTHON}=... python -m tests.xla.record", "versions": {}, "run": {}}
    for name, case in RUN.items():
        task = case.task(NUM_STEPS)
        (rank,) = ranks_of(python, task, "run")
        record["versions"] = rank.notes["versions"]
        record["run"][name] = recorded_run(rank, task.plan)
    record["lowered"] = {}
    for name, case in LOWERED.items():
        plan = (task := case.task(1)).plan
        ranks = ranks_of(python, task, "lower")
        faults = [fault for number, rank in enumerate(ranks) for fault in faults_of(case, plan, number, rank.graph)]
        assert not faults, f"{name}: {faults}"
        record["lowered"][name] = recorded_ranks(ranks)
    record["date"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
