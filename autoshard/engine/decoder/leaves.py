"""The leaf modules of dense layers: one class per kind of operation, dims named as in the graph.

Only leaves rearrange. A leaf takes any leading dims where its kind does, so that an engine may hand it shards.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from autoshard.graph.kinds.attention import Rotary
from autoshard.spec.model import Activation, ModelSpec

Sizes = Mapping[str, int]
Factory = Mapping[str, Any]  # ``device`` and ``dtype`` of new parameters, as torch's own modules take them

# cited: the standard deviation of GPT-2's weights, and initializer_range of every architecture of spec/hf_config.
_INIT_SCALE = 0.02

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def drawn(sizes: Sizes, factory: Factory) -> nn.Parameter:
    """Return a weight with these dims, drawn as new models start."""
    return nn.Parameter(torch.empty(*sizes.values(), **factory).normal_(0.0, _INIT_SCALE))


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which statistics, angles and losses are computed."""
    return torch.promote_types(dtype, torch.float32)


class Lookup(nn.Module):
    """Rows of a table at the given indices: embeddings of words or of positions."""

    def __init__(self, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.weight = drawn(sizes, factory)

    def forward(self, index: Tensor) -> Tensor:
        """Take the rows."""
        return functional.embedding(index, self.weight)


class Product(nn.Module):
    """A product with a weight; dims ``out`` replace the last dims of the input, those ``contracted``."""

    def __init__(self, out: Sizes, contracted: Sizes, factory: Factory) -> None:
        super().__init__()
        self.weight = drawn({**out, **contracted}, factory)
        self._made = tuple(out)
        self._is_flat = len(out) == len(contracted) == 1
        made, read = " ".join(out), " ".join(contracted)
        self._flat_weight = f"{made} {read} -> ({made}) ({read})"
        self._flat_input = f"... {read} -> ... ({read})"
        self._split_output = f"... ({made}) -> ... {made}"

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and sum over the contracted dims."""
        if self._is_flat:
            return functional.linear(x, self.weight)
        product = functional.linear(rearrange(x, self._flat_input), rearrange(self.weight, self._flat_weight))
        sizes = dict(zip(self._made, self.weight.shape, strict=False))  # the weight may be a shard
        return rearrange(product, self._split_output, **sizes)


class Shift(nn.Module):
    """A bias, repeated along the dims that it lacks."""

    def __init__(self, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(*sizes.values(), **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Add it."""
        return x + self.bias


class Norm(nn.Module):
    """RMS norm or layer norm over the last dim, computed in FP32.

    It is made of single operations, because backward then has an FP32 statistic on every device: the layer norm of
    torch keeps it in BF16 on a CPU.
    """

    def __init__(self, model: ModelSpec, size: int, factory: Factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.bias = nn.Parameter(torch.zeros(size, **factory)) if model.norm_has_bias else None
        self._centres = model.norm == "layer"
        self._eps = model.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale by the weight and shift by the bias."""
        wide = x.to(at_least_fp32(x.dtype))
        if self._centres:
            wide = wide - wide.mean(dim=-1, keepdim=True)
        stat = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self._eps)
        scaled = (wide * stat).to(x.dtype) * self.weight
        return scaled if self.bias is None else scaled + self.bias


def rotary_turns(model: ModelSpec, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines, [2, (batch,) seq, pairs], of the angles of every position; made once for all layers.

    They are computed anew from the positions: a buffer would hold garbage after a start on the meta device.
    """
    rotary = Rotary(fraction=model.rotary_fraction, theta=model.rotary_theta, scaling=model.rotary_scaling)
    wide = at_least_fp32(dtype)
    frequencies = torch.tensor(rotary.frequencies(model.head_dim).tolist(), dtype=wide, device=positions.device)
    angles = rearrange(positions.to(wide), "... seq -> ... seq 1") * frequencies
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


class Turn(nn.Module):
    """Rotary positions: the two halves of the first part of each head turned by an angle that grows with the position.

    Takes queries or keys, [batch, seq, heads ..., head_dim], and the ``rotary_turns`` of their positions.
    """

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Rotate; backward needs nothing but the turns."""
        between = " ".join("1" for _ in x.shape[2:-1])
        cos, sin = rearrange(turns, f"part ... seq pairs -> part ... seq {between} pairs").unbind(0)
        half = turns.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Activate(nn.Module):
    """A function of each element."""

    def __init__(self, function: Activation) -> None:
        super().__init__()
        self._function = _ACTIVATIONS[function]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self._function(x)


class Multiply(nn.Module):
    """The element-wise product of two tensors with the same dims."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply."""
        return left * right


class Add(nn.Module):
    """The sum of two tensors; the second is repeated along the leading dims that it lacks."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Add."""
        return left + right


class Taken(torch.autograd.Function):
    """The elements at indices along the last dim; ``torch.gather`` would keep its whole input for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        """Take them."""
        ctx.size = x.shape[-1]
        ctx.save_for_backward(index)
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Put the gradient back where each element was taken."""
        (index,) = ctx.saved_tensors
        zeros = upstream[0].new_zeros(*index.shape[:-1], ctx.size)
        return zeros.scatter_(-1, index, upstream[0]), None
