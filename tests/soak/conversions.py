"""Weights go from Hugging Face to NxD and back, over all that decides which rank holds which heads."""

import random
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autoshard.engine.nxd.shards import Qkv
from autoshard.errors import InputError
from autoshard.spec.model_catalogue import load_model
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written
from tests.soak.hunt import HuntResult

HEAD_DIM, LAYERS = 4, 4
CARDS = ("llama3-8b", "llama2-13b", "mistral-7b", "mixtral-8x7b", "qwen3-8b", "gpt-neox-20b")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIPELINES = ("pp=1", "pp=2", "pp=3", "pp=4", "pp=2,vp=2,schedule=interleaved")
FORMS: tuple[Qkv | None, ...] = ("fused", "split", "plain", "apart", None)
# After NxD: at once back, with the plan typed, through a checkpoint of ours, or through files cut for another plan.
WAYS = ("back", "planned", "ours", "cut again")


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Draw models, cuts and ways; what comes back must be the same bit for bit, or be refused in a sentence."""
    draw, with_copies, refusals, failures = random.Random(seed), Counter[bool](), Counter[str](), list[str]()
    for number in range(cases):
        case, at = drawn(draw), folder / str(number)
        try:
            round_trip(case, at)
            with_copies[case["tp"] > case["kv_heads"]] += 1
        except InputError as error:
            fault = error.faults[0]
            refusals[fault.where.rpartition("/")[2]] += 1
            if len(fault.message.split()) < 5:
                failures.append(f"{named(case)}: must be refused in a sentence, and it says only: {fault}")
        except Exception as error:
            failures.append(f"{named(case)}: must come back bit for bit: {' '.join(str(error).split())[:300]}")
        shutil.rmtree(at, ignore_errors=True)
    places = ", ".join(f"{place} {count}" for place, count in refusals.most_common()) or "nothing"
    return HuntResult(
        held=with_copies.total(),
        refused=refusals.total(),
        failures=failures,
        remark=f"{with_copies[True]} with copies of KV heads; refused: {places}",
    )


def drawn(draw: random.Random) -> Mapping[str, Any]:
    """Return a case: a model of few numbers, whose heads are any, and how it is cut."""
    card = draw.choice(CARDS)
    kv_heads, group = draw.choice((1, 2, 2, 4, 4, 8, 3, 6)), draw.choice((1, 2, 4, 8, 16))
    if "neox" in card:  # which has a KV head for each query head
        kv_heads, group = kv_heads * group, 1
    fitting = [2**power for power in range(6) if kv_heads * group % 2**power == 0]
    return {
        "card": card, "kv_heads": kv_heads, "heads": kv_heads * group,
        "tp": draw.choice(fitting if draw.random() < 0.9 else (2, 4, 8, 16, 32)), "pp": draw.choice(PIPELINES),
        "platform": draw.choice(("trn1", "trn2")), "qkv": draw.choice(FORMS), "tied": draw.random() < 0.3,
        "dtype": draw.choice(DTYPES), "vocab": draw.choice((37, 64)), "way": draw.choice(WAYS),
        "weights": draw.randrange(2**31),
    }  # fmt: skip


def round_trip(case: Mapping[str, Any], folder: Path) -> None:
    """Convert a model to NxD and back, and compare all of its bits."""
    first = written(folder / "first", config_of(case), case["dtype"], case["weights"])
    model = load_model(first)
    plan = cut(f"tp={case['tp']},dp=1,{case['pp']}", model, case["platform"])
    converted(first, folder / "nxd", form="nxd", plan=plan, qkv=case["qkv"])
    source, options = folder / "nxd", {"plan": plan} if case["way"] == "planned" else {}
    if case["way"] == "ours":
        converted(source, folder / "ours", form="autoshard")
        source, options = folder / "ours", {"model": str(first)}
    if case["way"] == "cut again":
        other = "trn1" if case["platform"] == "trn2" else "trn2"
        again = cut(f"tp={case['tp']},dp=1,pp=1", model, other)
        converted(source, folder / "again", form="nxd", plan=again, qkv=case["qkv"])
        source = folder / "again"
    converted(source, folder / "last", **options)
    same(read(first), read(folder / "last"))


def config_of(case: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a case."""
    heads = case["heads"]
    sizes = {
        "num_attention_heads": heads, "num_key_value_heads": case["kv_heads"], "head_dim": HEAD_DIM,
        "hidden_size": heads * HEAD_DIM if "neox" in case["card"] else 16, "intermediate_size": 64,
        "num_hidden_layers": LAYERS, "vocab_size": case["vocab"], "tie_word_embeddings": case["tied"],
    }  # fmt: skip
    config = reduced(case["card"])
    if "neox" not in case["card"]:
        return {**config, **sizes}
    grouped = {"num_key_value_heads", "head_dim"}  # which it does not have
    return {**config, **{name: size for name, size in sizes.items() if name not in grouped}, "rotary_pct": 1.0}


def named(case: Mapping[str, Any]) -> str:
    """Return a case on a line."""
    return ", ".join(f"{name}={value}" for name, value in case.items())
