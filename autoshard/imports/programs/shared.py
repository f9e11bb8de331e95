"""Entries that several programs share: sizes of the mesh and the batch as Megatron-LM names them, recompute, models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.errors import require
from autoshard.imports.table import Facts, KeyEntry, Keys, alias, number, read_only, same, whole_number, words
from autoshard.plan.recompute import Recompute

MESH = (
    same("tensor_model_parallel_size", "layout.tp"),
    same("pipeline_model_parallel_size", "layout.pp"),
    same("context_parallel_size", "layout.cp"),
    same("expert_model_parallel_size", "layout.ep"),
)
BATCH = (same("micro_batch_size", "layout.mbs"), same("global_batch_size", "work.global_batch"))
SIZES = (
    same("num_layers", "model.num_hidden_layers"),
    same("hidden_size", "model.hidden_size"),
    same("num_attention_heads", "model.num_attention_heads"),
    same("max_position_embeddings", "model.max_position_embeddings"),
)
ADAPTERS = "trains adapters; priced as training of all weights, which takes more time and memory"
# Names of the optimizer that is priced, without what people write differently; others have more or fewer states.
# NxD Training registers the same class under two names.
_ADAM = ("adam", "adamw", "fusedadam", "distributedfusedadam", "adamwfp32optimparams", "adamwfp32optstate", "torchadam",
         "cpuadam", "auto")  # fmt: skip
ZERO_2 = "ZeRO-2 is priced as ZeRO-1, which holds whole gradients and sums them once a step"
_ALL_OF_THEM = ("none", "auto", "gpu", "-1")  # of torchrun and of the Trainer of Lightning
FULL, NONE = (Recompute(kind="full"),), (Recompute(),)


def selective(names: tuple[str, ...]) -> tuple[Recompute, ...]:
    """Return selective recompute of these sets; none of no set."""
    return (Recompute(kind="selective", ops=names),) if names else NONE


def zero_of_stage(stage: int) -> Facts:
    """Return the facts of a stage of ZeRO.

    >>> zero_of_stage(3), zero_of_stage(2)["layout.zero"]
    ({'layout.zero': 3}, 1)
    """
    require((0 <= stage <= 3, "", f"there is no stage {stage} of ZeRO, only 0 to 3"))
    return (
        {"layout.zero": 1, "remarks": [ZERO_2]} if stage == 2 else {"layout.zero": 3 if stage == 3 else min(stage, 1)}
    )


def part(num_layers: int) -> tuple[Recompute, ...]:
    """Return full recompute of so many layers of each stage."""
    return (Recompute(kind="full", num_layers=num_layers),)


def recompute_of(facts: Facts) -> Recompute:
    """Return the only recompute of facts."""
    stages: tuple[Recompute, ...] = facts.get("layout.recompute", NONE)
    return stages[0]


def launched(key: str, fact: str) -> KeyEntry:
    """Return the entry of a number of nodes, or of devices of a node: launchers also take "all of them", or a range.

    >>> [launched("nnodes", "n").reads({"nnodes": value}) for value in ("4", "auto", "1:4")]
    [{'n': 4}, {}, {'unread': ['nnodes = 1:4']}]
    """

    def read(keys: Keys) -> Facts:
        text = str(keys[key])
        if ":" in text:
            return {"unread": [f"{key} = {text}"]}
        return {} if text.lower() in _ALL_OF_THEM else {fact: whole_number(keys[key])}

    return replace(same(key, fact), reads=read)


def rope() -> tuple[KeyEntry, ...]:
    """Return the entries of the base of rotary positions, which Megatron-LM's own parser takes as a whole number."""
    base = same("rotary_base", "model.rope_theta", number)

    def written(facts: Facts) -> Keys:
        return {key: int(value) for key, value in base.writes(facts).items()}

    return replace(base, writes=written), alias("rope_theta", "model.rope_theta", number)


def accumulated(keys: Keys) -> Facts:
    """Read how many micro-batches a step has on each replica."""
    value = keys["gradient_accumulation_steps"]
    return {} if value in (None, "auto") else {"work.accumulation": whole_number(value)}


def accumulation(facts: Facts) -> Mapping[str, Any]:
    """Write how many micro-batches a step has on each replica."""
    replicas = facts.get("layout.dp", 1) * facts.get("layout.mbs", 1)
    batch = facts.get("work.global_batch")
    return {} if batch is None else {"gradient_accumulation_steps": max(1, batch // replicas)}


def precision_flags(facts: Facts) -> Mapping[str, Any]:
    """Write the number format as two flags, bf16 and fp16."""
    name = str(facts.get("work.precision", "bf16")).split(",")[0]
    return {flag: True for flag in ("bf16", "fp16") if name == flag}


def module_names(value: object) -> tuple[str, ...]:
    """Read the names of modules without their paths."""
    return tuple(name.rpartition(".")[2] for name in words(value))


def optimizer(key: str) -> KeyEntry:
    """Return the entry of the name of an optimizer, of which all but Adam are named as not read.

    >>> entry = optimizer("optim.name")
    >>> entry.reads({"optim.name": "adamw_fp32OptimParams"}), entry.reads({"optim.name": "sgd"})
    ({'unread': []}, {'unread': ['optim.name = sgd, priced as AdamW']})
    """

    def unread(keys: Keys) -> Facts:
        word = "".join(letter for letter in str(keys[key] or "adam").lower() if letter.isalnum())
        return {"unread": [] if word in _ADAM else [f"{key} = {keys[key]}, priced as AdamW"]}

    return read_only(key, reads=unread)
