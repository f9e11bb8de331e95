"""``autoshard run --compile-only``: compile a plan's graphs before the run that needs them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.commands.output import print_json
from autoshard.errors import InputError, RunFailed, require
from autoshard.units import format_count

if TYPE_CHECKING:
    from autoshard.engine.base import Run
    from autoshard.plan.plan import Plan
    from autoshard.runtime.compiling import Compiled, Failure
    from autoshard.runtime.launch import GivenRank

LEAST_STEPS, USUAL_STEPS = 5, 10  # cited: "limited to a few steps (eg.10-15)", of which the first few differ
_CACHE_PLACE = "NEURON_COMPILE_CACHE_URL"
_NEAR = 0.5  # of the compiler's limit, by the matrix unit's instructions alone: others come on top
_SMALLER = "Graphs get smaller with more pp or tp, or a smaller micro-batch"


def compiling_place(plan: "Plan", asked: "Run", given: "GivenRank | None", name: str) -> Path:
    """Return where this node writes: nodes that share a folder have one each in it.

    Refuse plans of which nothing is compiled, machines without the compiler, and one process for every rank.
    """
    from autoshard.runtime.neuron import refuse_without_compiler

    message = "the torch engine runs this plan as it is, and compiles nothing ahead. Leave it out"
    require((plan.engine == "nxd", "--compile-only", message))
    steps = f"must be at least {LEAST_STEPS} to meet every graph, not {asked.training.steps}"
    require((asked.training.steps >= LEAST_STEPS, "--steps", steps))
    refuse_without_compiler(plan, given, name)
    return _place(plan, asked, given)


def compile_ahead(plan: "Plan", asked: "Run", given: "GivenRank | None", name: str, *, json: bool) -> int:
    """Let a short run extract the graphs of this node, compile them, and say what became of them."""
    from autoshard.runtime.compiling import TOOL, compiled_of, streamed
    from autoshard.runtime.launch import node_words, put_environment

    place = _place(plan, asked, given)
    log, cache = place / "compile.log", (asked.folder / "cache").absolute()
    _make(place)
    warnings = list(_warnings(plan))
    if not json:
        for warning in warnings:
            print(f"warning: {warning}")
        print(f"compiling the graphs of {plan.model.name}, {plan.candidate}, as {TOOL} finds them in a short run")
    put_environment({_CACHE_PLACE: str(cache)})
    nodes = plan.cluster.num_nodes
    start = [sys.executable, "-m", "torch.distributed.run", *node_words(given, nodes, plan.mesh.num_ranks // nodes)]
    tool = [TOOL, "--parallel_compile_workdir", str((place / "work").absolute())]  # else one of all who compile here
    code = streamed([*tool, *start, *_short_run(asked, name)], log, _silent if json else _shown)
    found = compiled_of(log.read_text(encoding="utf-8", errors="replace"))
    if found is None or (code and not found.num_failed):
        raise RunFailed(_crash(code, log, TOOL))
    _conclude(found, found.cache or str(cache), log, warnings, json=json)
    return 1 if found.num_failed else 0


def _place(plan: "Plan", asked: "Run", given: "GivenRank | None") -> Path:
    return asked.folder / f"node-{given.rank}" if given and plan.cluster.num_nodes > 1 else asked.folder


def _short_run(asked: "Run", name: str) -> list[str]:
    """Return the run that is extracted from: all but its steps and its folder as the run that it is for."""
    constants = ["--seed", str(asked.training.seed), "--learning-rate", str(asked.training.learning_rate)]
    steps = ["--steps", str(asked.training.steps), "--out", str(asked.folder / "short")]
    return ["-m", "autoshard.cli", "run", name, *steps, *constants, "--checkpoint.to", "none"]


def _make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.of(f"--out {place}", f"cannot be made: {error.strerror or error}") from None


def _warnings(plan: "Plan") -> Iterator[str]:
    """Say what is known of the compiler's limits before it runs."""
    from autoshard.cost.compiling import MOST_INSTRUCTIONS
    from autoshard.cost.predict import most_instructions

    stage, count = most_instructions(plan)
    if count >= _NEAR * MOST_INSTRUCTIONS:
        what = (
            f"the largest graph, of stage {stage}, takes at least {format_count(count)} instructions for its products"
        )
        limit = f"the compiler's limit is {format_count(MOST_INSTRUCTIONS)} of all kinds"
        yield f"{what} alone, and {limit}. {_SMALLER}"


def _crash(code: int, log: Path, tool: str) -> str:
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return "\n".join([f"{tool} {how} before it had compiled all graphs", *last, f"its output: {log}"])


def _conclude(found: "Compiled", cache: str, log: Path, warnings: list[str], *, json: bool) -> None:
    if json:
        failures = [{"graph": one.graph, "cause": one.cause, "logs": list(one.logs)} for one in found.failures]
        counts = {"graphs": found.num_graphs, "failed": found.num_failed, "failures": failures}
        print_json({"cache": cache, "log": str(log), "warnings": warnings, **counts})
        return
    print()
    for failure in found.failures:
        for line in _told(failure, log):
            print(line)
    if found.num_failed:
        print(
            f"{found.num_failed} of {max(found.num_graphs, found.num_failed)} graphs failed. All that was said: {log}"
        )
        return
    what = (
        f"{found.num_graphs} graphs compiled" if found.num_graphs else "nothing to compile: the cache has every graph"
    )
    print(f"{what}, cache: {cache}")
    print(f"next: start the run with {_CACHE_PLACE}={cache} in the environment of every rank")


def _told(failure: "Failure", log: Path) -> Iterator[str]:
    yield f"failed: {failure.graph or 'a graph without a name'}: {failure.cause or 'no reason was given'}"
    if "instructions" in failure.cause:
        yield f"  {_SMALLER}"
    for name in failure.logs or (str(log),):
        yield f"  log: {name}"


def _shown(text: str) -> None:
    print(text, end="", flush=True)


def _silent(_: str) -> None:
    """Leave it to the log."""
