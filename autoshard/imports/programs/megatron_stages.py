"""Keys of Megatron-LM for stages of a pipeline: numbers of chunks, and layouts such as "Ettt|(tt|)*3L"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from autoshard.errors import InputError
from autoshard.imports.table import Facts, KeyEntry, Keys, whole_number, words

_REPEATED_PARTS, _REPEATED_LETTER = re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)")
_MOST_PARTS = 65_536
_LAYOUT = "pipeline_model_parallel_layout"
_FURTHER = f"m of {_LAYOUT} is left out, as cards leave out what predicts further tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidStage:
    """What a layout puts into one stage."""

    num_layers: int
    predicts_further: bool  # has a layer for a further token, which our models do not


def stages_of_layout(text: str) -> tuple[LaidStage, ...]:
    """Return the stages of ``--pipeline-model-parallel-layout``.

    >>> [stage.num_layers for stage in stages_of_layout("Et*3|(tt|)*2,m|L")]
    [3, 2, 2, 0, 0]
    """
    text = text.replace(",", "").strip()
    for pattern in (_REPEATED_PARTS, _REPEATED_LETTER):
        counts = [int(match[2][:9]) for match in pattern.finditer(text)]
        if sum(counts) > _MOST_PARTS:
            raise InputError.of("", f"repeats more than {_MOST_PARTS} parts")
        text = pattern.sub(lambda match: match[1] * int(match[2][:9]), text)
    if not text or set(text) - set("EtmL|"):
        raise InputError.of("", f"{text!r} is not a layout such as 'Ettt|ttL'")
    return tuple(LaidStage(num_layers=stage.count("t"), predicts_further="m" in stage) for stage in text.split("|"))


def layout_of_stages(stages: tuple[int, ...]) -> str:
    """Write stages as a layout.

    >>> layout_of_stages((3, 4, 4, 3)), layout_of_stages((0, 4, 4, 0))
    ('Et*3|t*4|t*4|t*3L', 'E|t*4|t*4|L')
    """
    cut = [f"t*{count}" if count else "" for count in stages]
    return "E" + "|".join(cut) + "L"


def _filled(stages: Sequence[LaidStage]) -> tuple[tuple[int, ...], list[str]]:
    """Return the layers of stages, of which those inside have one at least, and what is said of it.

    A stage of nothing but a layer for a further token takes one of the stage before, which is as long as two.
    """
    counts, said = [stage.num_layers for stage in stages], list[str]()
    for place, stage in enumerate(stages[1:-1], 1):
        if counts[place]:
            continue
        if not stage.predicts_further or counts[place - 1] < 2:
            raise InputError.of("", f"stage {place + 1} has no layer; here only the first and the last may")
        counts[place - 1], counts[place] = counts[place - 1] - 1, 1
        said.append(f"stage {place + 1}, which has no other, takes a layer of stage {place}")
    further = any(stage.predicts_further for stage in stages)
    return tuple(counts), ["; ".join([_FURTHER, *said])] if further else []


def _layout(keys: Keys) -> Facts:
    value = keys[_LAYOUT]
    if value is None or value == "":
        return {}
    if isinstance(value, list):
        rows = [words(row) for row in cast(list[object], value)]
        laid = [LaidStage(num_layers=row.count("decoder"), predicts_further="mtp" in row) for row in rows]
    else:
        laid = stages_of_layout(str(value))
    stages, remarks = _filled(laid)
    return {"layout.stages": stages, "layout.num_stages": len(stages), "remarks": remarks}


def _chunks(keys: Keys) -> Facts:
    if (chunks := keys.get("num_virtual_stages_per_pipeline_rank")) is not None:
        return {"layout.vp": whole_number(chunks)}
    if (chunks := keys.get("virtual_pipeline_model_parallel_size")) is not None:
        return {"layout.vp": whole_number(chunks)}
    layers = keys.get("num_layers_per_virtual_pipeline_stage")
    return {} if layers is None else {"layout.layers_per_stage": whole_number(layers)}


def _written_stages(facts: Facts) -> Keys:
    stages, vp = facts["layout.stages"], facts.get("layout.vp", 1)
    if len(stages) > 1 and len(set(stages)) > 1:
        return {_LAYOUT: layout_of_stages(stages)}
    return {"num_virtual_stages_per_pipeline_rank": vp} if vp > 1 else {}


STAGES = (
    KeyEntry(
        keys=(
            "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
            "virtual_pipeline_model_parallel_size",
        ),
        reads=_chunks,
    ),
    KeyEntry(keys=(_LAYOUT,), reads=_layout, writes=_written_stages),
)  # fmt: skip
