"""Which steps of a traced program run as one operation."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autoshard.modules.dims import Dim
from autoshard.modules.program import Read, Traced, TracedProgram, TracedStep


def outside_reads(steps: Sequence[TracedStep]) -> Mapping[tuple[Traced, tuple[tuple[Dim, Dim], ...]], Read]:
    """Return the external inputs of a group of steps; a tensor counts once for each naming of its dims."""
    inner_values = {step.makes for step in steps}
    reads = [read for step in steps for read in step.reads if read.value not in inner_values]
    return {(read.value, tuple(read.renamed.items())): read for read in reads}


def regions(program: TracedProgram) -> Sequence[Sequence[TracedStep]]:
    """Return the steps that run as one operation, each group where its last step stands.

    A local step joins the group that alone reads what it makes, unless that needs all of its numbers whole. Each group
    rounds numbers itself that it reads in another format, and makes constants: neither is written for all.
    """
    readers: dict[Traced, list[tuple[TracedStep, Read]]] = defaultdict(list)
    for step in program.steps:
        for read in step.reads:
            readers[read.value].append((step, read))
    results = {result.read.value for result in program.results if result.read}
    groups: dict[TracedStep, list[TracedStep]] = {}  # by the last step
    homes: dict[TracedStep, list[TracedStep]] = {}  # the last steps of the groups that a step is in
    for step in reversed(program.steps):
        uses = readers[step.makes]
        heads = list(dict.fromkeys(head for reader, _ in uses for head in homes[reader]))
        renamed = any(read.renamed for _, read in uses) or step.makes in results
        is_free = step.sort in ("local", "cheap") and not renamed
        accepting = [head for head in heads if is_free and _accepts(head, groups[head], step)]
        if not accepting or accepting != heads:  # some reader takes the result from elsewhere
            accepting.append(step)
        homes[step] = accepting if len(accepting) == 1 or step.sort == "cheap" else [step]
        for head in homes[step]:
            groups.setdefault(head, []).append(step)
    return [groups[step][::-1] for step in program.steps if step in groups]


def _accepts(head: TracedStep, steps: Sequence[TracedStep], step: TracedStep) -> bool:
    """Say whether a group runs functions of torch, cuts something, and does not multiply matrices twice."""
    cut = {dim for read in head.reads for dim in read.dims} | {*head.makes.dims}
    multiplies = sum(bool(member.products) for member in (*steps, step)) > (head.sort != "sum")
    return head.sort in ("local", "cheap", "sum") and bool(cut - head.whole_leaves()) and not multiplies
