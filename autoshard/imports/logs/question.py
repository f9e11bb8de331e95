"""The question of a log: the configuration of its run, from a file, from what the log prints of it, or from both."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.errors import InputError, require
from autoshard.imports.imported import PROGRAMS, ImportedRun, run_of_values
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.megatron import FORK
from autoshard.imports.question import ImportedQuestion, ImportOptions, imported_question
from autoshard.imports.table import OtherProgram, matching
from autoshard.spec.cluster_catalogue import cluster_names, load_node_type
from autoshard.units import GIB

_LAYOUT = (
    *(f"layout.{key}" for key in ("tp", "pp", "cp", "ep", "vp", "mbs", "zero", "sp", "replicas", "shards")),
    "work.seq_len", "work.global_batch", "work.precision", "cluster.ranks",
)  # fmt: skip
_OF_DEEPSPEED: Mapping[Any, int] = {0: 0, 1: 1, 2: 1, 3: 3}  # stages as autoshard counts them
_RECOMPUTE = "layout.recompute"
_NO_EXPERTS = ("num_experts", [1])  # as Megatron-DeepSpeed counts them
_LONGEST_HINT = 200
_NEAR_GIB = 3.0


def log_question(
    log: TrainingLog, config: ImportedRun | None, options: ImportOptions, nodes: int | None = None
) -> ImportedQuestion:
    """Return the question of a log; an InputError says what is missing, or where log and configuration differ."""
    printed = printed_run(log)
    if config is not None:
        fits = config.program.name in log.configurations
        message = f"is of {log.program}, {config.file} of {config.program.title}. Type the configuration that ran"
        require((fits, log.file, message))
    if config is None and printed is None:
        message = f"is of {log.program}, and prints no configuration. Type --config FILE, that with which it ran"
        raise InputError.of(log.file, message)
    run = _with_kernels(_joined(log, config, printed), log)
    if options.cluster is None and (name := _cluster_of(log)):
        options = replace(options, cluster=name)
    question = imported_question(run, options, nodes)
    says_ranks = not question.opens_nodes
    require((says_ranks, "--nodes", "missing: neither the log nor its configuration says on how many nodes it ran"))
    return question


def printed_run(log: TrainingLog) -> ImportedRun | None:
    """Return the configuration that a log prints, if it does."""
    values = {key: value for key, value in log.config.items() if (key, value) != _NO_EXPERTS}
    program = next((program for program in PROGRAMS if _is_of(program, log)), None)
    if program is None:
        return None
    run = run_of_values(program, log.file, "", values)
    facts, said = dict(run.facts), set(run.said)
    if _RECOMPUTE not in said:  # a log prints what is applied, and no default
        facts.pop(_RECOMPUTE, None)
    if is_fork(log):
        facts["layout.zero"] = _OF_DEEPSPEED.get(values.get("zero_stage", 0), 0)
        said.add("layout.zero")
    facts |= _facts_of(log)
    return replace(run, facts=facts, said=frozenset(said | _facts_of(log).keys()))


def _facts_of(log: TrainingLog) -> Mapping[str, Any]:
    """Return what a log says in the names of facts of configurations."""
    return {name: value for name, value in log.facts.items() if "." in name}


def is_fork(log: TrainingLog) -> bool:
    """Say whether Megatron-DeepSpeed wrote a log."""
    return log.program == FORK or log.config.get("deepspeed") is True


def _with_kernels(run: ImportedRun, log: TrainingLog) -> ImportedRun:
    """Return a run of Megatron-LM with its older kernels, where the log shows that it had no others."""
    printed = "tensor_model_parallel_size" in log.config
    older = is_fork(log) or (printed and log.config.get("transformer_impl") != "transformer_engine")
    is_megatron = run.program.name == "megatron" and not run.facts.get("layout.flash")
    return replace(run, facts={**run.facts, "layout.kernels": "megatron"}) if older and is_megatron else run


def _is_of(program: OtherProgram, log: TrainingLog) -> bool:
    marks = (mark for mark in program.marks if any(matching(path, mark) for path in log.config))
    return program.name in log.configurations and any(marks)


def _joined(log: TrainingLog, config: ImportedRun | None, printed: ImportedRun | None) -> ImportedRun:
    """Return the configuration of both; where both state a part of the layout, they must agree."""
    run = config or printed
    assert run is not None, "one of them is there"
    if config is not None and printed is not None:
        same = config.program.name == printed.program.name
        stated = printed.said & (config.facts.keys() if same else config.said)
        differing = [
            f"{name.partition('.')[2]} is {printed.facts[name]} in the log, {config.facts[name]} in {config.file}"
            for name in _LAYOUT
            if name in stated and _differ(printed.facts[name], config.facts[name])
        ]
        if differing:
            raise InputError.of(log.file, f"{'; '.join(differing)}. Type the configuration that ran, or none")
        more = {name: printed.facts[name] for name in printed.said if name not in config.said}
        run = replace(config, facts={**config.facts, **more}, said=config.said | more.keys())
    elif config is not None:
        more = {name: value for name, value in _facts_of(log).items() if name not in config.said}
        run = replace(config, facts={**config.facts, **more}, said=config.said | more.keys())
    return replace(run, comment=f"{run.comment} {log.file}"[:_LONGEST_HINT].strip())


def _differ(a: Any, b: Any) -> bool:
    return a is not None and b is not None and a != b


def _cluster_of(log: TrainingLog) -> str | None:
    """Return the cluster with the chip that a log names: the one whose memory is nearest."""
    chip, gib = log.facts.get("chip"), log.facts.get("chip_gib")
    if chip is None or gib is None:
        return None
    words = re.findall(r"[a-z]+\d+", chip.lower())
    types = [load_node_type(name) for name in cluster_names()]
    same = [
        (abs(node_type.chip.memory_bytes / GIB - gib), number, node_type.name)
        for number, node_type in enumerate(types)
        if node_type.chip.name.partition("-")[0] in words
    ]
    return min(same)[2] if same and min(same)[0] < _NEAR_GIB else None
