"""``autoshard run --compile-only``: compile the graphs of a plan ahead of its run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from autoshard.commands.output import print_answer
from autoshard.cost.predict import MOST_INSTRUCTIONS, most_instructions
from autoshard.errors import InputError, RunFailed, file_faults, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.runtime.compiling import Compiled, compiled_of, streamed
from autoshard.runtime.folder import free_sibling
from autoshard.runtime.launch import node_words, put_environment
from autoshard.runtime.machine import COMPILER, refuse_without_compiler
from autoshard.runtime.meeting import GivenRank
from autoshard.units import counted, format_count

_LEAST_STEPS, _USUAL_STEPS = 5, 10  # cited: "limited to a few steps (eg.10-15)", of which the first few differ
_CACHE_PLACE = "NEURON_COMPILE_CACHE_URL"
_NEAR = 0.5  # share of the compiler's limit, counting the matrix unit's instructions only
_SMALLER = "More pp or tp, or a smaller micro-batch, makes graphs smaller"


def compile_ahead(plan: Plan, run: Run, launched: GivenRank | None, name: str, *, json: bool) -> int:
    """Extract the graphs of this node in a short run, compile them, and print which succeeded.

    Plans without graphs, machines without the compiler, and jobs with one process per rank are refused.
    """
    training, nodes, num_steps = run.training, plan.cluster.num_nodes, min(run.training.steps, _USUAL_STEPS)
    message = "the torch engine runs this plan without compiling ahead. Leave the option out"
    require((plan.engine == "nxd", "--compile-only", message))
    steps = f"must be at least {_LEAST_STEPS}, so that every graph occurs, not {num_steps}"
    require((num_steps >= _LEAST_STEPS, "--steps", steps))
    refuse_without_compiler(plan, name, launched.num_ranks if launched else 1)
    place = run.folder / f"node-{launched.rank}" if launched and nodes > 1 else run.folder  # nodes may share a folder
    _make(place)
    log, cache = place / "compile.log", (run.folder / "cache").absolute()
    warnings = _warnings(plan)
    if not json:
        for warning in warnings:
            print(f"warning: {warning}")
        print(f"compiling the graphs of {plan.model.name}, {plan.candidate}, as {COMPILER} finds them in a short run")
    put_environment({_CACHE_PLACE: str(cache)})
    # The short run differs from the real one only in its number of steps and its folder.
    constants = ["--seed", str(training.seed), "--learning-rate", str(training.learning_rate)]
    short = ["--steps", str(num_steps), "--out", str(run.folder / "short"), *constants, "--checkpoint.to", "none"]
    work = str((place / "work").absolute())  # the default is shared by all compilations on the machine
    words = [
        *(COMPILER, "--parallel_compile_workdir", work),
        *(sys.executable, "-m", "torch.distributed.run", *node_words(launched, nodes, plan.mesh.num_ranks // nodes)),
        *("-m", "autoshard.cli", "run", name, *short, *EXTENSIONS.options()),
    ]
    code = streamed(words, log, (lambda _: None) if json else (lambda text: print(text, end="", flush=True)))
    output = log.read_text(encoding="utf-8", errors="replace")
    compiled = compiled_of(output)
    if compiled is None or (code and not compiled.num_failed):
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        first = f"{COMPILER} {how} before all graphs were compiled"
        raise RunFailed("\n".join([first, *output.strip().splitlines()[-20:], f"its output: {log}"]))
    return _conclude(compiled, compiled.cache or str(cache), log, warnings, json=json)


def _conclude(compiled: Compiled, cache: str, log: Path, warnings: Sequence[str], *, json: bool) -> int:
    """Print how many graphs were compiled and which failed; return the exit code."""
    num_failed = compiled.num_failed
    if json:
        failures = [{"graph": failed.graph, "cause": failed.cause, "log": failed.log} for failed in compiled.failures]
        counts = {"graphs": compiled.num_graphs, "failed": num_failed, "failures": failures}
        print_answer({"cache": cache, "log": str(log), "warnings": warnings, **counts})
        return 1 if num_failed else 0
    print()
    for failure in compiled.failures:
        print(f"failed: {failure.graph or 'a graph without a name'}: {failure.cause or 'no reason was given'}")
        smaller = [f"  {_SMALLER}"] if "instructions" in failure.cause else []
        print(*smaller, f"  log: {failure.log or log}", sep="\n")
    if num_failed:
        print(f"{num_failed} of {max(compiled.num_graphs, num_failed)} graphs failed. Full output: {log}")
        return 1
    what = f"{counted(compiled.num_graphs, 'graph')} compiled" if compiled.num_graphs else ""
    print(f"{what or 'nothing to compile: the cache has every graph'}, cache: {cache}")
    print(f"next: start the run with {_CACHE_PLACE}={cache} in the environment of every rank")
    return 0


def _make(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        what = "already holds files" if place.is_dir() else "is a file"
        raise InputError.of(f"--out {place}", f"{what}, which are never overwritten. Type --out {free_sibling(place)}")
    with file_faults(f"--out {place}", "made"):
        place.mkdir(parents=True, exist_ok=True)


def _warnings(plan: Plan) -> list[str]:
    """Warn before compiling where a plan comes near the compiler's limits."""
    stage, count = most_instructions(plan)
    if count < _NEAR * MOST_INSTRUCTIONS:
        return []
    what = f"the largest graph, of stage {stage}, takes at least {format_count(count)} instructions"
    limit = f"the compiler's limit is {format_count(MOST_INSTRUCTIONS)} of all kinds"
    return [f"{what} for its products alone, and {limit}. {_SMALLER}"]
