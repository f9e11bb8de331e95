"""Every word of the published rows is read; one that is not known is named, with what is."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoshard.calibration.readings import (
    Reading,
    read_kernels,
    read_platform,
    read_precision,
    read_recompute,
    read_schedule,
    read_sharding,
)
from autoshard.errors import InputError
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import kernels_names
from tests.calibration.measured_cases import (
    FILES,
    FRAMEWORKS,
    PLATFORMS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
)

WORDS = {
    "recompute": RECOMPUTES,
    "precision": PRECISIONS,
    "sharding": SHARDINGS,
    "pipeline_schedule": SCHEDULES,
    "framework": FRAMEWORKS,
    "platform": PLATFORMS,
}


@pytest.mark.parametrize("column", WORDS)
def test_the_rows_of_this_repository_have_no_other_words(column: str):
    rows = [json.loads(line) for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows
    assert {row.get(column) for row in rows} <= set(WORDS[column])


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("Autocast:BF16+FP32Optimizer", "bf16 bf16 fp32 fp32 fp32"),
        ("Autocast:BF16+SR", "bf16 bf16 bf16 None bf16"),
        ("BF16+SR", "bf16 bf16 bf16 None bf16"),
        # Megatron-LM adds fp16 gradients up in fp16 unless asked for more (training/arguments.py).
        *((text, "fp16 fp16 fp16 fp32 fp32") for text in PRECISIONS if text and "fp16" in text.lower()),
        *((text, "bf16 bf16 fp32 fp32 fp32") for text in PRECISIONS if text is None or text[:5] in ("BF16", "bf16 ")),
        *((text, "bf16 bf16 fp32 fp32 fp32") for text in PRECISIONS if text and text[:5] in ("float", "bf16,")),
    ],
)
def test_precisions(text: str | None, formats: str):
    found = read_precision(text).value
    parts = (found.weights, found.activations, found.gradients, found.masters, found.moments)
    assert " ".join(map(str, parts)) == formats


def test_what_the_model_cannot_tell_apart_is_said():
    said = {text: read_precision(text).assumed for text in PRECISIONS}
    assert {text for text, assumed in said.items() if assumed} == {None, "float8 compile", "float8 compile asyncTP"}
    assert "not of the output" in said["float8 compile asyncTP"]


def test_float8_changes_the_products_and_nothing_that_is_held():
    bf16 = read_precision("BF16").value
    for text in ("float8", "float8 compile", "float8 compile asyncTP"):
        assert read_precision(text).value == replace(bf16, products="fp8")


@pytest.mark.parametrize(
    ("text", "framework", "meant"),
    [
        ("full", None, "full"),
        ("full (uniform)", "Megatron-LM", "full"),
        ("full (uniform, 1 layer)", "neuronx-nemo-megatron", "full"),
        ("none", None, "none"),
        ("selective (core attention)", "Megatron-LM", "selective[attend]"),
        ("selective", "Megatron-LM", "selective[attend]"),
        ("selective[CoreAttention]", "neuronx-distributed", "selective[CoreAttention]"),
        ("selective[CoreAttention,LlamaMLP]", "neuronx-distributed", "selective[CoreAttention,LlamaMLP]"),
        ("full:3", None, "full:3"),
    ],
)
def test_recomputes(text: str, framework: str | None, meant: str):
    found = read_recompute(text, framework)
    assert (str(found.value), found.assumed) == (meant, "")


def test_torchtitan_keeps_every_second_product():
    found = {read_recompute(text, "torchtitan").value for text in ("selective", "per-op selective")}
    (policy,) = found
    assert {"k", "o", "up"} <= set(policy.ops)
    assert not {"q", "v", "attend", "gate", "down"} & set(policy.ops)


@pytest.mark.parametrize("text", [None, "unknown", " Unknown "])
def test_nothing_said_is_assumed_and_told(text: str | None):
    assert (str(read_recompute(text, None).value), read_recompute(text, None).assumed) == ("none", "none")
    assert (read_sharding(text).value, read_sharding(text).assumed) == (1, "zero=1")
    assert read_schedule(text, 1).assumed == "1f1b"
    assert read_precision(text).assumed


def test_shardings_and_schedules():
    assert [read_sharding(text).value for text in SHARDINGS] == [0, 1, 3, 1, 1]
    assert [read_schedule(text, 1).value for text in SCHEDULES] == ["1f1b", "interleaved", "1f1b"]
    assert read_schedule("1F1B", 2).value == "interleaved"


def kernels_of(framework: str | None, precision: str | None = "BF16", seq_len: int = 8192) -> Reading[str]:
    return read_kernels(framework, "te", precision=precision, seq_len=seq_len)


def test_frameworks_name_tables_that_exist():
    found = [kernels_of(text).value for text in FRAMEWORKS]
    assert found == ["nxd", "nxd", "nxd", "torch_compiled", "megatron", "mcore", "megatron", "te"]
    assert set(found) <= set(kernels_names())
    assert not kernels_of(FRAMEWORKS[-1]).assumed
    assert "usual" in kernels_of(None).assumed


@pytest.mark.parametrize(
    ("precision", "table"),
    [
        ("bf16 eager", "torch_cuda"),
        ("bf16 compile", "torch_compiled"),
        ("float8 compile", "torch_compiled"),
        ("bf16 async TP", "torch_async_tp"),
        ("float8 compile asyncTP", "torch_async_tp"),
        ("bf16 vanilla TP", "torch_compiled"),
        (None, "torch_compiled"),
    ],
)
def test_what_a_format_says_about_kernels_counts_for_torchtitan_only(precision: str | None, table: str):
    assert kernels_of("torchtitan", precision).value == table
    assert kernels_of("Megatron-Core", precision).value == "mcore"


@pytest.mark.parametrize(("seq_len", "table"), [(2048, "nxd_core"), (8191, "nxd_core"), (8192, "nxd"), (32768, "nxd")])
def test_nxd_runs_flash_attention_from_8192_tokens(seq_len: int, table: str):
    found = kernels_of("neuronx-distributed", "BF16", seq_len)
    assert (found.value, bool(found.assumed)) == (table, table == "nxd_core")


def test_platforms_name_clusters_that_exist():
    found = [read_platform(text, None).value for text in PLATFORMS]
    assert found == ["trn1.32xlarge", "a100-80", "h100-80", "h200", "b200"]
    assert all(load_cluster(name).num_ranks for name in found)
    assert read_platform("h100", "torchtitan").value == "h100-96"
    assert read_platform("a100", "Megatron-DeepSpeed").value == "a100-800g"


@pytest.mark.parametrize(
    ("read", "column"),
    [
        (read_precision, "precision"),
        (read_sharding, "sharding"),
        (lambda text: read_recompute(text, None), "recompute"),
        (lambda text: read_schedule(text, 1), "pipeline_schedule"),
        (lambda text: read_platform(text, None), "platform"),
    ],
)
def test_other_words_are_faults(read: Callable[[str], object], column: str):
    with pytest.raises(InputError) as caught:
        read("zork")
    assert [fault.where for fault in caught.value.faults] == [column]
    assert "zork" in str(caught.value)
