"""What the real functions around NxD's kernels launch: whole grids, and what the kernels' sources ask.

The sources are those that the Rules of ``nxd_kernels`` cite. The stand-ins ask the same, and compute attention.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.engine.nxd.blocks import attend
from autoshard.engine.nxd.model import flash_attend, ring_attend
from autoshard.plan.rules.nxd_kernels import ring_length_allows
from tests.neuron import standins
from tests.neuron.conditions import table

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
SEQ, HEAD_DIM, PMAX = 2048, 2, 128


class Launched:
    """In the place of a kernel: computes those heads that the launch grid has, and leaves the others as NaN."""

    def __init__(self, name: str, compute: Callable[..., Sequence[Tensor]]) -> None:
        self.name, self._compute = name, compute
        self.named: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Sequence[Tensor]]:
        def launch(*tensors: Any, **named: Any) -> Sequence[Tensor]:
            assert named["dropout_p"] == 0 and named["use_causal_mask"] is True
            self.named.append(named)
            made = self._compute(*tensors, **named)
            for one in made:
                assert one.shape[0] == grid[0], "one instance for each sequence"
                one[:, grid[1] :] = float("nan")
            return made

        return launch


def probabilities(query: Tensor, key: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Of every query for every key, and the log-sum-exps; both of [batch, head, head_dim, seq], in FP32."""
    scores = query.float().transpose(-1, -2) @ key.float() * softmax_scale
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~ones, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def forward(query: Tensor, key: Tensor, value: Tensor, seed: Any, *, config: Any, **named: Any) -> Sequence[Tensor]:
    """As flash_fwd and ring_attention_fwd assert: layouts, as many keys as queries (of this grid), no seed."""
    batch, heads, head_dim, seq = query.shape
    turns = bool(config) and getattr(config, "should_transpose_v", False)
    assert key.shape == query.shape and seed is None and head_dim <= PMAX
    assert value.shape == ((batch, heads, head_dim, seq) if turns else (batch, heads, seq, head_dim))
    assert query.dtype == key.dtype == value.dtype
    shares, sums = probabilities(query, key, named["softmax_scale"])
    mixed = shares @ (value.transpose(-1, -2) if turns else value).float()
    return mixed.to(query.dtype), sums.unflatten(-1, (seq // PMAX, PMAX)).transpose(-1, -2).contiguous()


def backward(*given: Any, **named: Any) -> Sequence[Tensor]:
    """As flash_attn_bwd and ring_attention_bwd assert: all of [batch, head, head_dim, seq], and of one format."""
    *tensors, sums, seed = given
    query = tensors[0]
    assert {one.shape for one in tensors} == {query.shape} and len({one.dtype for one in tensors}) == 1
    assert seed is None and sums.shape == (*query.shape[:2], PMAX, query.shape[3] // PMAX)
    scale, wide = named["softmax_scale"], [one.float() for one in tensors]
    shares, expected = probabilities(query, tensors[1], scale)
    torch.testing.assert_close(sums.transpose(-1, -2).flatten(-2), expected)
    to_values = wide[4] @ shares
    rows = (wide[4] * wide[3]).sum(-2)[..., None]
    to_scores = shares * (wide[4].transpose(-1, -2) @ wide[2] - rows) * scale
    made = wide[1] @ to_scores.transpose(-1, -2), wide[0] @ to_scores, to_values
    return [one.to(query.dtype) for one in made]


def kernels_of(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"neuronx_distributed.{name}")


def attends(through: Callable[..., Tensor], heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> None:
    """Run forward and backward with so many keys, and queries for each; compare with single operations."""
    kv_heads, q_group = heads
    query = torch.randn(1, SEQ, kv_heads, q_group, HEAD_DIM).to(dtype)
    given = [query, *(torch.randn(1, SEQ, kv_heads, HEAD_DIM).to(dtype) for _ in range(2))]
    upstream, found = torch.randn_like(query), list[Sequence[Tensor]]()
    for compute in (through, attend):
        leaves = [one.clone().requires_grad_() for one in given]
        mixed = compute(*leaves)
        found.append((mixed.detach(), *torch.autograd.grad(mixed, leaves, upstream)))
    rtol, atol = (1e-3, 1e-4) if dtype == torch.float32 else (5e-2, 5e-2)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Sequence[Launched]:
    """The kernels that the real functions of flash and ring attention launch, forward and backward."""
    found, ring = list[Launched](), kernels_of("kernels.ring_attention_kernel")
    for way, flash, compute in (("fwd", "flash_fwd", forward), ("bwd", "flash_attn_bwd", backward)):
        found += [Launched(flash, compute), Launched(f"ring_attention_{way}", compute)]
        monkeypatch.setattr(f"neuronxcc.nki.kernels.{flash}", found[-2])
        monkeypatch.setattr(ring, f"_ring_{way}_nki_call", found[-1])
    monkeypatch.setattr("neuronxcc.nki.language.nc", lambda cores: cores)
    return found


def attend_of(lnc: int) -> Callable[..., Tensor]:
    """Flash attention with so many cores of a logical one; 0: ring attention."""
    if not lnc:
        return partial(ring_attend, kernels_of("kernels.ring_attention_kernel").nki_ring_attn_func, 0, [(0, 0)])
    return partial(flash_attend, kernels_of("kernels.flash_attn").nki_flash_attn_func, lnc)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize(("platform", "lnc"), [("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn1", 0)])
def test_kernels_get_what_they_ask_and_attend_with_every_head(
    launched: Any, monkeypatch: pytest.MonkeyPatch, platform: str, lnc: int, heads: tuple[int, int]
) -> None:
    monkeypatch.setenv(standins.PLATFORM, platform)
    attends(attend_of(lnc), heads)


def test_the_function_itself_leaves_heads_out(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, NxD computes odd numbers of heads, and flash_attend need not care."""
    monkeypatch.setenv(standins.PLATFORM, "trn2")
    query = torch.randn(1, 7, HEAD_DIM, SEQ)
    assert kernels_of("kernels.flash_attn").nki_flash_attn_func(query, query, query, 2)[:, 6].isnan().all()


@pytest.mark.parametrize("lnc", [1, 0])
@pytest.mark.parametrize(("dtype", "in_bf16"), [(torch.float32, False), (torch.bfloat16, True)])
def test_fp32_is_not_multiplied_in_bf16(launched: Any, lnc: int, dtype: torch.dtype, *, in_bf16: bool) -> None:
    attends(attend_of(lnc), (2, 1), dtype)
    assert [one["mixed_precision"] for kernel in launched for one in kernel.named] == [in_bf16, in_bf16]


def test_the_rule_of_lengths_is_that_of_the_tiles_of_the_ring() -> None:
    tile = kernels_of("kernels.ring_attention_kernel").get_seq_tile_size
    for length in range(512, 32768 + 1, 512):
        assert ring_length_allows(length) == (length % 1024 == 0 and length % tile(length) == 0), length


def expert_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Which kernels of experts a training step launches, with one core and with two as one; format and block size."""
    blockwise, found = kernels_of("modules.moe.blockwise"), dict[str, tuple[Any, ...]]()
    for name in [name for name in vars(blockwise) if "_nki_" in name and name.endswith("_call")]:
        kernel = str(getattr(getattr(blockwise, name), "__name__", name)).removeprefix("kernel ")

        def launch(*_: Any, kernel: str = kernel, **named: Any) -> None:
            found[kernel] = (named.get("compute_dtype"), named["block_size"])

        called = type("Grid", (), {"__call__": staticmethod(launch), "__getitem__": lambda self, _: self})()
        monkeypatch.setattr(blockwise, name, called)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(blockwise.mappings, "get_tensor_model_parallel_group", lambda *_: None)
    tokens, experts, hidden, ffn = 4, 2, 8, 6
    shapes = (tokens, hidden), (tokens, experts), (experts, hidden, 2 * ffn), (experts, ffn, hidden)
    places, owners = torch.zeros(512, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for lnc in (1, 2):
        config = kernels_of("modules.moe.moe_configs").BlockwiseMatmulConfig.from_kwargs(logical_nc_config=lnc)
        config.skip_dma = blockwise.SkipMode(skip_token=False, skip_weight=False)  # as ExpertMLPs does
        given = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        blockwise.BlockwiseMatmulNKIFunc.apply(*given, places, owners, None, None, True, config).sum().backward()
    return found


def test_the_table_names_every_kernel_that_is_launched(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(standins.PLATFORM, "trn2")
    for lnc in (1, 2, 0):
        attends(attend_of(lnc), (2, 1))
    names, experts = {kernel.name for kernel in launched if kernel.named}, expert_kernels(monkeypatch)
    # Rule nxd-expert-precision: nobody says in which format they multiply; blocks have 512 tokens.
    assert set(experts.values()) == {(None, 512)}
    sends = {"all_gather of two ranks"}
    assert {row.kernel for row in table()} - sends == names | set(experts)
