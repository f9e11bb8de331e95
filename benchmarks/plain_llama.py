"""Llama and its training step as people write them with PyTorch alone: what the torch engine is measured against."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from autoshard.run.protocol import Batch
from autoshard.spec.model import ModelSpec

Step = Callable[[Sequence[Batch]], None]
Wrap = Callable[[nn.Module], Any]  # torch.compile, or nothing
Plain = Callable[[ModelSpec, int, Wrap], Step]
CLIP_NORM = 1.0
_Turns = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    """Attention and MLP with their norms."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.head_dim = model.head_dim
        self.attn_norm = nn.RMSNorm(model.hidden, model.norm_eps)
        self.mlp_norm = nn.RMSNorm(model.hidden, model.norm_eps)
        self.q, self.k, self.v = (nn.Linear(model.hidden, out, bias=False) for out in (queries, keys, keys))
        self.o = nn.Linear(queries, model.hidden, bias=False)
        self.gate, self.up = (nn.Linear(model.hidden, model.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: _Turns) -> torch.Tensor:
        """Add what attention makes, then what the MLP makes."""
        batch, seq, _ = x.shape
        normed = self.attn_norm(x)
        query, key, value = (
            one(normed).view(batch, seq, -1, self.head_dim).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the gated MLP makes."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def _turned(x: torch.Tensor, turns: _Turns) -> torch.Tensor:
    cos, sin = turns
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class PlainLlama(nn.Module):
    """The whole model, or the layers of one stage of it."""

    def __init__(self, model: ModelSpec, seq_len: int, layers: range | None = None, layer: type[Layer] = Layer) -> None:
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        self.embed = nn.Embedding(model.vocab, model.hidden) if layers.start == 0 else None
        self.layers = nn.ModuleList(layer(model) for _ in layers)
        ends = layers.stop == model.num_layers
        self.norm = nn.RMSNorm(model.hidden, model.norm_eps) if ends else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=False) if ends else None
        half = torch.arange(0, model.head_dim, 2) / model.head_dim
        angles = torch.arange(seq_len)[:, None] * model.rotary_theta**-half
        self.turns = (angles.cos(), angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run what this stage has."""
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of a micro-batch."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


def _tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["labels"])


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)


def _accumulating(module: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[nn.Module], None]) -> Step:
    """Add up the gradients of the micro-batches, clip, update."""

    def step(batches: Sequence[Batch]) -> None:
        for batch in batches:
            tokens, labels = _tensors(batch)
            (loss(module(tokens), labels) / len(batches)).backward()
        clip(module)
        _update(optimizer)

    return step


def _clip(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)


def _clip_apart(module: nn.Module) -> None:
    """Clip weights that are cut and weights that are not by one norm, which PyTorch does not do by itself."""
    weights = [weight for weight in module.parameters() if weight.grad is not None]
    kinds = [[one for one in weights if isinstance(one, DTensor) == cut] for cut in (False, True)]
    norms = [nn.utils.get_total_norm([one.grad for one in some if one.grad is not None]) for some in kinds if some]
    total = torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms]).norm()
    factor = float((CLIP_NORM / (total + 1e-6)).clamp(max=1.0))
    for weight in weights:
        if weight.grad is not None:
            weight.grad.mul_(factor)


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def as_it_is(module: nn.Module) -> nn.Module:
    """Compile nothing."""
    return module


def one_process(model: ModelSpec, seq_len: int, wrap: Wrap) -> Step:
    """A loop over the micro-batches."""
    module = PlainLlama(model, seq_len)
    return _accumulating(wrap(module), _optimizer(module), _clip)


def data_parallel(model: ModelSpec, seq_len: int, wrap: Wrap) -> Step:
    """DistributedDataParallel, which reduces with the last micro-batch."""
    module = DistributedDataParallel(PlainLlama(model, seq_len))
    whole, optimizer = wrap(module), _optimizer(module)

    def step(batches: Sequence[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            tokens, labels = _own_part(batch)
            module.require_backward_grad_sync = number == len(batches)
            (loss(whole(tokens), labels) / len(batches)).backward()
        _clip(module)
        _update(optimizer)

    return step


def fully_sharded(model: ModelSpec, seq_len: int, wrap: Wrap) -> Step:
    """FSDP2 with a unit for each layer, compiled layer by layer."""
    module = PlainLlama(model, seq_len)
    for layer in module.layers:
        if wrap is not as_it_is:
            layer.compile()
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = _optimizer(module)

    def step(batches: Sequence[Batch]) -> None:
        for batch in batches:
            tokens, labels = _own_part(batch)
            (loss(module(tokens), labels) / len(batches)).backward()
        _clip(module)
        _update(optimizer)

    return step


def _own_part(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = (one.chunk(dist.get_world_size())[dist.get_rank()] for one in _tensors(batch))
    return tokens, labels


def parallelize(module: PlainLlama, mesh: DeviceMesh) -> None:
    """Cut a module by the plan of PyTorch's own tutorial; logits stay cut over the vocabulary."""
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    for layer in module.layers:
        parallelize_module(layer, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, ends)


def tensor_parallel(model: ModelSpec, seq_len: int, wrap: Wrap) -> Step:
    """``parallelize_module``, and its loss over a cut vocabulary."""
    module = PlainLlama(model, seq_len)
    parallelize(module, init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = list(module.parameters())
    apart = [[one for one in weights if isinstance(one, DTensor) == cut] for cut in (False, True)]
    optimizer = torch.optim.AdamW([{"params": some} for some in apart], 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)
    inner = _accumulating(wrap(module), optimizer, _clip_apart)

    def step(batches: Sequence[Batch]) -> None:
        with loss_parallel():
            inner(batches)

    return step


def pipelined(model: ModelSpec, seq_len: int, wrap: Wrap) -> Step:
    """``torch.distributed.pipelining`` with 1F1B, a stage for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = model.num_layers // size
    module = PlainLlama(model, seq_len, range(rank * share, (rank + 1) * share))
    stage = PipelineStage(wrap(module), rank, size, torch.device("cpu"))
    optimizer = _optimizer(module)
    schedules: dict[int, Schedule1F1B] = {}

    def step(batches: Sequence[Batch]) -> None:
        count = len(batches)
        if count not in schedules:
            schedules[count] = Schedule1F1B(stage, count, loss_fn=loss, scale_grads=True)
        tokens, labels = (torch.cat(parts) for parts in zip(*map(_tensors, batches), strict=True))
        if rank == 0:
            schedules[count].step(tokens)
        else:
            schedules[count].step(target=labels) if rank == size - 1 else schedules[count].step()
        _clip(module)
        _update(optimizer)

    return step
