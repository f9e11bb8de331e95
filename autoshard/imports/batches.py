"""Batches that a file leaves open and its program works out: the batch of a step, or that of a rank."""

from autoshard.imports.table import Facts, OtherProgram

_BATCH, _MICRO, _COUNT = "work.global_batch", "layout.mbs", "work.accumulation"


def with_batches(
    facts: Facts, program: OtherProgram, dp: int, *, by_file: bool = True
) -> tuple[Facts, tuple[str, str, str]]:
    """Return the facts with the batches that follow from them; and what follows, from what, and the option for it.

    ``by_file`` says whether the file states the batch of a step: of one that is typed no micro-batch follows.

    >>> from autoshard.imports.programs.deepspeed import DEEPSPEED
    >>> with_batches({"work.global_batch": 64}, DEEPSPEED, 8)
    ({'work.global_batch': 64, 'layout.mbs': 8}, ('micro-batch 8', 'batch 64 / dp 8, as DeepSpeed does', '--fix mbs=N'))
    """
    batch, micro_batch, stated = facts.get(_BATCH), facts.get(_MICRO), facts.get(_COUNT)
    count = int(stated or program.accumulation or 1)
    by_default = f", as {program.title} does" if stated is None else ""
    if batch is None and (stated is not None or (micro_batch is not None and program.accumulation)):
        batch = dp * int(micro_batch or 1) * count
        why = f"dp {dp} x mbs {micro_batch or 1} x accumulation {count}{by_default}"
        return {**facts, _BATCH: batch}, (f"batch {batch}", why, "--global-batch")
    if batch is not None and micro_batch is None and program.splits_batch and by_file:
        micro_batch = max(1, int(batch) // dp // count)
        why = f"batch {batch} / dp {dp}{f' / accumulation {count}' if stated else ''}{by_default}"
        return {**facts, _MICRO: micro_batch}, (f"micro-batch {micro_batch}", why, "--fix mbs=N")
    return facts, ("", "", "")
