"""What the words of measured rows mean here: one table per column, with what is assumed where a word leaves it open."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from autoshard.errors import InputError, nearest
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster_catalogue import cluster_names
from autoshard.spec.workload import Precision

T = TypeVar("T")
Zero = Literal[0, 1, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[T]):
    """A value, and what had to be assumed for it; nothing if the row says it all."""

    value: T
    assumed: str = ""


_UNSAID = ("", "unknown")

# aws-neuron/neuronx-distributed-training, precision types: bf16SR sets XLA_USE_BF16, under which every FP32 tensor of
# the program, states of the optimizer included, is BF16 on the device; rounding is stochastic, there are no masters.
_BF16_SR = Precision(weights="bf16", activations="bf16", gradients="bf16", masters=None, moments="bf16")
_BF16 = Precision.named("bf16")
# NVIDIA/Megatron-LM training/arguments.py: gradients are added up in FP32 with bf16; with fp16 only if asked for.
_FP16 = replace(Precision.named("fp16"), gradients="fp16")
_FLOAT8 = Reading(
    value=replace(_BF16, products="fp8"), assumed="float8 products of all layers, not of the output; casts free"
)

_PRECISIONS: Mapping[str, Reading[Precision]] = {
    "autocast:bf16+fp32optimizer": Reading(value=_BF16),
    "autocast:bf16+sr": Reading(value=_BF16_SR),
    "bf16+sr": Reading(value=_BF16_SR),
    "bf16": Reading(value=_BF16),
    "bf16-sr": Reading(value=Precision.named("bf16-sr")),
    "bf16 eager": Reading(value=_BF16),
    "bf16 compile": Reading(value=_BF16),
    "bf16 vanilla tp": Reading(value=_BF16),
    "bf16 async tp": Reading(value=_BF16),
    "bf16, fp32 gradient accumulation, fp32 master weights and adam states": Reading(value=_BF16),
    "float8": _FLOAT8,
    "float8 compile": _FLOAT8,
    "float8 compile asynctp": _FLOAT8,
    "mixed fp16": Reading(value=_FP16),
    "fp16 mixed": Reading(value=_FP16),
    "fp16": Reading(value=_FP16),
    "fp32": Reading(value=Precision.named("fp32")),
}

_SHARDINGS: Mapping[str, Reading[Zero]] = {
    "none": Reading(value=0),
    "zero-1": Reading(value=1),
    "zero-3": Reading(value=3),
    "fsdp2 (zero-3)": Reading(value=3),
    "none or zero-1 (see script)": Reading(value=1, assumed="zero=1, of the two that the row names"),
}

_FULL = Recompute(kind="full")
_ATTENTION = Recompute(kind="selective", ops=("attend",))
# pytorch/torchtitan 9dec370 torchtitan/parallelisms/parallelize_llama.py, policy `op`: keeps the output of attention
# and of every second product (q, v, gate and down; not k, o and up), and nothing else.
_PER_OP_DROPS = ("attn_norm", "k", "q_rotary", "k_rotary", "o", "attn_add", "mlp_norm", "up", "act", "product")
_PER_OP = Recompute(kind="selective", ops=_PER_OP_DROPS)

_RECOMPUTES: Mapping[str, Recompute] = {
    "none": Recompute(),
    "full": _FULL,
    "full (uniform)": _FULL,
    "full (uniform, 1 layer)": _FULL,
    "selective": _ATTENTION,
    "selective (core attention)": _ATTENTION,
}
_RECOMPUTES_OF: Mapping[tuple[str, str], Recompute] = {
    ("torchtitan", "selective"): _PER_OP,
    ("torchtitan", "per-op selective"): _PER_OP,
}

_SCHEDULES: Mapping[str, str] = {"1f1b": "1f1b", "interleaved 1f1b": "interleaved", "gpipe": "gpipe"}

# Which kernels a framework runs: the beginning of its name -> a table of spec/kernel_tables. The longest wins.
_KERNELS: Mapping[str, Reading[str]] = {
    "neuronx-distributed": Reading(value="nxd"),
    "neuronx-nemo-megatron": Reading(value="nxd", assumed="nxd: the kernels of neuronx-distributed"),
    "aws-neuron-reference-for-megatron-lm": Reading(value="nxd", assumed="nxd: the kernels of neuronx-distributed"),
    "torchtitan": Reading(value="torch_compiled", assumed="torch_compiled: torch.compile, as in most published runs"),
    "megatron-lm + transformerengine": Reading(value="te"),
    "megatron-core": Reading(value="mcore"),
    "megatron-lm": Reading(value="megatron"),
    "megatron-deepspeed": Reading(value="megatron"),
}
# What the format of a run says about its kernels besides: the framework's table, a word of the format -> another table.
_KERNELS_OF: Mapping[tuple[str, str], str] = {
    ("torch_compiled", "eager"): "torch_cuda",
    ("torch_compiled", "async"): "torch_async_tp",
    ("torch_compiled", "asynctp"): "torch_async_tp",
    ("torch_compiled", "compile"): "torch_compiled",
}
# aws-neuron/neuronx-distributed examples/training/llama: scripts for 4096 tokens do not ask for flash attention
# (--use_flash_attention is 0 unless given), those for 8192 do; before it came (Neuron 2.19) 4096 were the most.
_FLASH_FROM = 8192

_DGX = "the network of NVIDIA's own systems"
_CLUSTERS: Mapping[str, Reading[str]] = {
    "trn1": Reading(value="trn1.32xlarge"),
    "trn1n": Reading(value="trn1n.32xlarge"),
    "trn2": Reading(value="trn2.48xlarge"),
    "trn2u": Reading(value="trn2u.48xlarge"),
    "a100": Reading(value="a100-80", assumed=f"a100-80: 80 GB chips, {_DGX}"),
    "h100": Reading(value="h100-80", assumed=f"h100-80: 80 GB chips, {_DGX}"),
    "h200": Reading(value="h200", assumed=f"h200: {_DGX}"),
    "b200": Reading(value="b200", assumed=f"b200: {_DGX}"),
}
_CLUSTERS_OF: Mapping[tuple[str, str], Reading[str]] = {
    ("megatron-deepspeed", "a100"): Reading(
        value="a100-800g", assumed="a100-800g: the machine of VIA-Research/vTrain's runs, 800 Gb/s a node"
    ),
    ("torchtitan", "h100"): Reading(
        value="h100-96", assumed="h100-96: the machine of torchtitan's published H100 runs"
    ),
}


def read_precision(text: str | None) -> Reading[Precision]:
    """Read number formats; without any, bf16 with FP32 masters is assumed.

    >>> read_precision("mixed FP16").value.weights, read_precision(None).assumed
    ('fp16', 'bf16 with FP32 gradients, masters and moments')
    """
    if _unsaid(text):
        return Reading(value=_BF16, assumed="bf16 with FP32 gradients, masters and moments")
    return _of(_PRECISIONS, text, "precision")


def read_sharding(text: str | None) -> Reading[Zero]:
    """Read what data parallelism shards; without a word, ZeRO-1 is assumed.

    >>> read_sharding("FSDP2 (ZeRO-3)").value, read_sharding(None).value
    (3, 1)
    """
    return Reading(value=1, assumed="zero=1") if _unsaid(text) else _of(_SHARDINGS, text, "sharding")


def read_recompute(text: str | None, framework: str | None) -> Reading[Recompute]:
    """Read what is computed again, in the framework's own sense; without a word, nothing is assumed to be.

    >>> str(read_recompute("selective[CoreAttention,LlamaMLP]", None).value), read_recompute("unknown", None).assumed
    ('selective[CoreAttention,LlamaMLP]', 'none')
    """
    if _unsaid(text):
        return Reading(value=Recompute(), assumed="none")
    assert text is not None
    own = _RECOMPUTES_OF.get((_key(framework), _key(text)))
    if own is not None:
        return Reading(value=own)
    try:
        return Reading(value=_RECOMPUTES.get(_key(text)) or Recompute.parse(text))
    except InputError as error:
        raise error.under("recompute") from None


def read_schedule(text: str | None, num_chunks: int) -> Reading[str]:
    """Read the order of a pipeline; 1f1b is assumed, of several chunks interleaved.

    >>> read_schedule("1F1B", 1).value, read_schedule(None, 3).value
    ('1f1b', 'interleaved')
    """
    in_order = "1f1b" if num_chunks == 1 else "interleaved"
    if _unsaid(text):
        return Reading(value=in_order, assumed=in_order)
    said = _of(_SCHEDULES, text, "pipeline_schedule")
    return Reading(value=in_order if said == "1f1b" else said)


def read_kernels(framework: str | None, usual: str, *, precision: str | None, seq_len: int) -> Reading[str]:
    """Read which kernels a framework runs; one that is not known is assumed to run what its platform usually does.

    >>> read_kernels("torchtitan", "te", precision="bf16 eager", seq_len=8192).value
    'torch_cuda'
    >>> read_kernels("neuronx-distributed", "nxd", precision=None, seq_len=4096).assumed
    'nxd_core: no flash attention below 8192 tokens'
    """
    found = [name for name in _KERNELS if _key(framework).startswith(name)]
    if not found:
        return Reading(value=usual, assumed=f"{usual}: the usual kernels of the platform")
    reading = _KERNELS[max(found, key=len)]
    if reading.value == "nxd" and seq_len < _FLASH_FROM:
        flash = f"nxd_core: no flash attention below {_FLASH_FROM} tokens"
        return Reading(value="nxd_core", assumed="; ".join(filter(None, (reading.assumed, flash))))
    said = (_KERNELS_OF.get((reading.value, word)) for word in reversed(_key(precision).split()))
    other = next(filter(None, said), None)
    return Reading(value=other) if other else reading


def read_platform(text: str, framework: str | None) -> Reading[str]:
    """Read on which cluster of the catalogue a row was measured; its own names are known as well.

    >>> read_platform("trn1", None).value, read_platform("p5.48xlarge", None).value
    ('trn1.32xlarge', 'p5.48xlarge')
    """
    own = _CLUSTERS_OF.get((_key(framework), _key(text)))
    names = {name: Reading(value=name) for name in cluster_names()}
    return own or _of({**names, **_CLUSTERS}, text, "platform")


def _of(table: Mapping[str, T], text: str | None, column: str) -> T:
    key = _key(text)
    if key not in table:
        raise InputError.of(column, f"cannot read {text!r}. {nearest(key, list(table))}")
    return table[key]


def _key(text: str | None) -> str:
    return " ".join((text or "").casefold().split())


def _unsaid(text: str | None) -> bool:
    return _key(text) in _UNSAID
