"""Which constants a fit tells apart, from few to many, and what each can be on a real machine."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.cost.calibration import EFFICIENCIES, Software
from autoshard.spec.kernels import load_kernels

Split = tuple[tuple[str, ...], ...]  # the constants that share a value, group by group

# From one constant for all that is slower than its data sheet to as many as a platform may have. Constants that rows of
# a few layouts cannot tell apart fit them better and predict others worse, so that the left-out error decides how many
# there are. The first splits what a chip does from what is sent; then arithmetic from memory.
_MATRIX, _CHIP, _LINKS = EFFICIENCIES[:2], EFFICIENCIES[:4], EFFICIENCIES[4:]
RELEASE, FRAMEWORK = "slower_per_release", "framework "  # of the software: the second with its name
_COMPILED: Mapping[str, Split] = {
    "one for all": (EFFICIENCIES,),
    "chip, link": (_CHIP, _LINKS),
    "arithmetic, memory, link": (EFFICIENCIES[:3], ("memory_efficiency",), _LINKS),
    "matrix, vector, memory, link": (_MATRIX, ("vector_efficiency",), ("memory_efficiency",), _LINKS),
}
# Hosts that start kernels one by one take time of their own, and more of it to start what waits for other ranks. Vector
# units hardly bind where memory is as slow. Attention reaches less of a peak than products do. Of links between nodes
# groups that share them may get less.
_PASSES = ("vector_efficiency", "memory_efficiency")
_ATTENTION = (("matrix_efficiency", *_PASSES), ("attention_efficiency",))
_EACH_LINK = tuple((name,) for name in _LINKS)
LAUNCH, _COLLECTIVE, PORTS = ("launch_s",), ("collective_s",), ("shared_ports",)
_EAGER: Mapping[str, Split] = {
    "one for all": (EFFICIENCIES,),
    "one for all, launch": (EFFICIENCIES, LAUNCH),
    "one for all, launch, collective": (EFFICIENCIES, LAUNCH, _COLLECTIVE),
    "chip, attention, link, launch": (*_ATTENTION, _LINKS, LAUNCH),
    "matrix, memory, link, launch": (_MATRIX, _PASSES, _LINKS, LAUNCH),
    "chip, attention, near link, far link, launch": (*_ATTENTION, *_EACH_LINK, LAUNCH),
    "matrix, memory, near link, far link, launch, ports": (_MATRIX, _PASSES, *_EACH_LINK, LAUNCH, PORTS),
}
# Where processors compute, messages between processes are copies in memory, and starting one takes as long as many
# kernels. Libraries reach unlike shares of a declared peak in products and in attention.
_STREAMS = (*_PASSES, *_LINKS)
_ON_HOST: Mapping[str, Split] = {
    **{name: _EAGER[name] for name in ("one for all", "one for all, launch", "one for all, launch, collective")},
    "matrix, memory, launch, collective": (_MATRIX, _STREAMS, LAUNCH, _COLLECTIVE),
    "matrix, attention, memory, launch, collective": (*((name,) for name in _MATRIX), _STREAMS, LAUNCH, _COLLECTIVE),
}
# What a machine can be: outside of these a constant stands for something else that the model lacks. Products of the
# size of models reach half of their peak and more (MooreThreads/SimuMax configs/system: 0.49 of a B200's, 0.75 of an
# A100's), streams of memory 0.67 to 0.95 of theirs and kernels of a framework less; links lose some of every packet.
_PHYSICAL: Mapping[str, tuple[float, float]] = {
    "matrix_efficiency": (0.3, 0.95), "attention_efficiency": (0.2, 0.95), "vector_efficiency": (0.4, 0.95),
    "memory_efficiency": (0.4, 0.95), "near_link_efficiency": (0.3, 0.95), "far_link_efficiency": (0.3, 0.95),
    "shared_ports": (0.25, 1.0),
}  # fmt: skip
# aws-neuron/aws-neuron-sdk general/benchmarks/trn1: layouts that were measured again from 2.18 on show no trend, those
# before do.
SETTLED = "2.18"
# In their units: a tenth for each release; 50 us for a kernel, several times what PyTorch takes to start one
# (meta-pytorch/autoparallel: 7 us), so that more of it is a row's own trouble.
_MOST: Mapping[str, float] = {RELEASE: 1.0, "launch_s": 5.0}


def splits_for(runs: Sequence[MeasuredRun]) -> Mapping[str, Split]:
    """Return what is tried: for compiled programs with and without what their releases, frameworks and graphs cost.

    A framework of which one model was run cannot be told from that model. Hosts start the kernels of a table, and
    tables say what frameworks do.
    """
    if runs[0].cluster.engine != "nxd":
        return _ON_HOST if load_kernels(runs[0].cluster.kernels).host_computes else _EAGER
    models: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        models[run.framework or ""].add(run.model.name)
    newest = max(runs, key=lambda run: run.release).framework
    others = sorted(name for name, own in models.items() if len(own) > 1 and name not in ("", newest))
    release: Split = ((RELEASE,),) if any(map(is_old, runs)) else ()
    frameworks: Split = tuple((FRAMEWORK + name,) for name in others)
    found: dict[str, Split] = {**_COMPILED}
    last: Mapping[str, Split] = found
    for words, more in ((", release", release), (", framework", frameworks), (", task", (("task_s",),))):
        last = {name + words: (*split, *more) for name, split in last.items()} if more else last
        found |= last
    return found


def is_old(run: MeasuredRun) -> bool:
    """Say whether a run is of a release before steps took what the constants say."""
    return Software(frameworks={}, settled=SETTLED, slower_per_release=0.5).slowness(None, run.release) > 1


def physical(group: tuple[str, ...]) -> tuple[float, float]:
    """Return the least and the most that an unknown may be: as slow as all of its constants can be."""
    if group[0].startswith(FRAMEWORK):
        return 0.5, 2.0
    if group[0] not in _PHYSICAL:
        return 0.0, _MOST.get(group[0], math.inf)
    low = max(_PHYSICAL[name][0] for name in group) if len(group) <= 2 else min(_PHYSICAL[name][0] for name in group)
    return 1 / min(_PHYSICAL[name][1] for name in group), 1 / low
