"""Random numbers of a traced module: inputs of its program, of which every rank draws its part.

torch's own generators give numbers in the order in which they are asked for, so that a rank with a part of a tensor
would draw others. Here each call of the module has a key, which torch's generator on rank 0 gives, and each random
tensor in it has a stream: a number follows from both and from where it stands in the whole tensor.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autoshard.engine.torch.kernels.philox import Distribution, random_part
from autoshard.errors import require
from autoshard.modules.nodes import Node, argument, line_of, torch_name

_aten: Any = torch.ops.aten
_KEYS = 2**63 - 1
_MOST_INTEGERS = 2**24  # that a fraction of a number in FP32 tells apart
_IN_PARTS = "autoshard_in_parts"
_LEAST = 2.0**-25  # an exponential number is never 0: its logarithm is taken
_DECOMPOSED = ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")  # by torch, into random bits


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomInput:
    """A tensor of random numbers in FP32 that a module draws at each call."""

    name: str  # of its placeholder
    shape: tuple[int, ...]
    distribution: Distribution
    stream: int

    def part(self, key: torch.Tensor, sizes: Sequence[int], bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return a part of the numbers of a call, whose key is given; the whole tensor has these sizes, row by row."""
        return random_part(self.distribution, sizes, bounds, self.stream, key)

    def whole(self, key: torch.Tensor) -> torch.Tensor:
        """Return all numbers of a call."""
        return self.part(key, self.shape, [(0, size) for size in self.shape])


def new_key(device: torch.device) -> torch.Tensor:
    """Draw a key for a call from torch's generator."""
    return torch.randint(_KEYS, ()).to(device)


@contextmanager
def unseeded() -> Iterator[None]:
    """Refuse what draws real numbers while a module is traced, or sets a seed: each call would have those numbers."""

    def states() -> tuple[Any, ...]:
        _, numbers, place, *_ = np.random.get_state()
        return random.getstate(), np.asarray(numbers).tobytes(), place, torch.get_rng_state().tolist()

    before = states()
    yield
    message = "draws numbers from Python or numpy, or sets a seed, which only the first call would do; use torch.rand"
    require((before == states(), "module", f"forward {message}, or give numbers as an input"))


def is_in_parts(node: Node) -> bool:
    """Say whether every rank draws its part of a node alone, also where nothing but plain operations reads it."""
    return _IN_PARTS in node.meta


def draws(node: Node) -> bool:
    """Say whether torch itself decomposes an operation into random bits."""
    return torch_name(node.target) in _DECOMPOSED and bool(node.args[1] and node.args[2])


def take_random_inputs(graph_module: torch.fx.GraphModule) -> tuple[RandomInput, ...]:
    """Let a graph take its random numbers as inputs; operations of which nobody has written how remain."""
    writer = _RandomWriter(graph_module.graph)
    for node in [*graph_module.graph.nodes]:
        write = _WRITTEN.get(torch_name(node.target)) if node.op == "call_function" else None
        if write is not None:
            writer.replace(node, write)
    if writer.inputs:
        graph_module.recompile()
    return tuple(writer.inputs)


class _RandomWriter:
    """Writes plain operations of torch in the place of random ones."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph, self.inputs = graph, list[RandomInput]()
        self._last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
        self._meta: Mapping[str, Any] = {}
        self._name = ""

    def replace(self, node: Node, write: "_Write") -> None:
        """Replace one node, if it draws numbers."""
        message = "draws with a generator of its own, which no layout can follow; draw outside, and keep a buffer"
        require((argument(node, "generator") is None, line_of(node), message))
        self._meta, self._name = {key: value for key, value in node.meta.items() if key != "val"}, node.name
        with self.graph.inserting_before(node):
            result = write(self, node)
        if result is None:
            return
        if isinstance(node.meta["val"], tuple | list):  # the mask beside the result is for torch's own backward pass
            for reader in [*node.users]:
                require((reader.args[1] == 0, line_of(node), "returns the mask of a dropout, which is not supported"))
                reader.replace_all_uses_with(result)
                self.graph.erase_node(reader)
        else:
            node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Write an operation; return its result."""

        def values(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [values(part) for part in value]
            return value.meta["val"] if isinstance(value, torch.fx.Node) else value

        node = self.graph.create_node("call_function", target, args, kwargs, self._name)
        node.meta = {
            **self._meta,
            "val": target(*values(args), **{key: values(value) for key, value in kwargs.items()}),
        }
        return node

    def drawn(self, distribution: Distribution, like: torch.Tensor) -> Node:
        """Return new random numbers of the shape of a tensor."""
        stream = len(self.inputs)
        name = f"random_numbers_{stream}"
        with self.graph.inserting_after(self._last[0]) if self._last else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta = {**self._meta, "val": torch.empty_like(like, dtype=torch.float32, memory_format=_CONTIGUOUS)}
        self._last = [node]
        shape = tuple(like.shape)
        self.inputs.append(RandomInput(name=node.name, shape=shape, distribution=distribution, stream=stream))
        return node

    def dropout(self, x: Node, dropped: float) -> Node:
        """Set each number to zero with the probability ``dropped``, and divide the rest by ``1 - dropped``."""
        if dropped >= 1.0:
            return self.call(_aten.mul.Tensor, x, 0.0)
        drawn = self.drawn("uniform", x.meta["val"])
        keeps = self.call(_aten.ge.Scalar, drawn, dropped)
        drawn.meta[_IN_PARTS] = True  # it is as large as what it is for
        return self.call(_aten.mul.Tensor, self.call(_aten.mul.Tensor, x, keeps), 1.0 / (1.0 - dropped))

    def formatted(self, x: Node, like: torch.Tensor) -> Node:
        """Return numbers in the format of a tensor."""
        return x if x.meta["val"].dtype == like.dtype else self.call(_aten.to.dtype, x, like.dtype)

    def uniform(self, like: torch.Tensor) -> Node:
        """Return numbers from 0 to below 1, with as many bits as the format of a tensor tells apart."""
        drawn = self.drawn("uniform", like)
        bits = round(1 - math.log2(torch.finfo(like.dtype).eps)) if like.dtype.itemsize < 4 else 0
        if bits:  # or else some round to 1
            drawn = self.call(_aten.floor.default, self.call(_aten.mul.Tensor, drawn, 2.0**bits))
            drawn = self.call(_aten.mul.Tensor, drawn, 2.0**-bits)
        return self.formatted(drawn, like)

    def scaled(self, x: Node, scale: float, shift: float) -> Node:
        """Return numbers times a factor, and more by a number."""
        x = x if scale == 1.0 else self.call(_aten.mul.Tensor, x, scale)
        return x if shift == 0.0 else self.call(_aten.add.Tensor, x, shift)


_Write = Callable[[_RandomWriter, Node], Node | None]
_CONTIGUOUS = torch.contiguous_format


def _dropout(writer: _RandomWriter, node: Node) -> Node | None:
    x, dropped, trains = node.args
    return writer.dropout(x, dropped) if dropped and trains else None


def _bernoulli(writer: _RandomWriter, node: Node) -> Node:
    probability: Any = argument(node, "p")
    like = node.meta["val"]
    drawn = writer.drawn("uniform", like)
    bound = node.args[0] if probability is None else probability
    less = _aten.lt.Tensor if isinstance(bound, torch.fx.Node) else _aten.lt.Scalar
    return writer.formatted(writer.call(less, drawn, bound), like)


def _rand(writer: _RandomWriter, node: Node) -> Node:
    return writer.uniform(node.meta["val"])


def _randn(writer: _RandomWriter, node: Node) -> Node:
    like = node.meta["val"]
    return writer.formatted(writer.drawn("normal", like), like)


def _uniform(writer: _RandomWriter, node: Node) -> Node:
    low, high = argument(node, "from"), argument(node, "to")
    return writer.scaled(writer.uniform(node.meta["val"]), high - low, low)


def _normal(writer: _RandomWriter, node: Node) -> Node:
    mean: Any = argument(node, "mean")
    std: Any = argument(node, "std")
    if isinstance(mean, torch.fx.Node) or isinstance(std, torch.fx.Node):
        drawn = writer.call(_aten.mul.Tensor, _randn(writer, node), std)
        return writer.call(_aten.add.Tensor, drawn, mean)
    return writer.scaled(_randn(writer, node), std, mean)


def _exponential(writer: _RandomWriter, node: Node) -> Node:
    like = node.meta["val"]
    rest = writer.call(_aten.neg.default, writer.drawn("uniform", like))
    drawn = writer.call(_aten.neg.default, writer.call(_aten.log1p.default, rest))
    drawn = writer.call(_aten.clamp_min.default, drawn, _LEAST)
    return writer.formatted(writer.scaled(drawn, 1.0 / argument(node, "lambd"), 0.0), like)


def _randint(writer: _RandomWriter, node: Node) -> Node:
    low, high, like = argument(node, "low") or 0, argument(node, "high"), node.meta["val"]
    message = f"draws whole numbers from {low} to {high}; at most {_MOST_INTEGERS} of them are supported"
    require((high - low <= _MOST_INTEGERS, line_of(node), message))
    drawn = writer.call(_aten.mul.Tensor, writer.drawn("uniform", like), float(high - low))
    drawn = writer.call(_aten.floor.default, drawn)
    return writer.formatted(writer.scaled(drawn, 1.0, low), like)


def _rrelu(writer: _RandomWriter, node: Node) -> Node:
    x, low, high = node.args[0], argument(node, "lower"), argument(node, "upper")
    if not argument(node, "training"):
        return writer.call(_aten.leaky_relu.default, x, (low + high) / 2)
    slopes = writer.scaled(writer.uniform(x.meta["val"]), high - low, low)
    return writer.call(
        _aten.where.self, writer.call(_aten.ge.Scalar, x, 0.0), x, writer.call(_aten.mul.Tensor, x, slopes)
    )


def _attention(writer: _RandomWriter, node: Node) -> Node | None:
    """Write attention with dropout as plain operations, as a fused kernel would draw its own random numbers.

    The attention weights of all keys are then in memory. None: nothing is dropped, and the kernel stays.
    """
    stated = {name: argument(node, name) for name in _ATTENTION}
    query, key, value, mask, dropped = (stated[name] for name in _ATTENTION[:5])
    if not dropped:
        return None
    if stated["enable_gqa"]:
        key, value = (_repeated(writer, heads, query.meta["val"].shape[-3]) for heads in (key, value))
    scale = stated["scale"] or 1.0 / math.sqrt(query.meta["val"].shape[-1])
    scores = writer.call(_aten.matmul.default, query, writer.call(_aten.transpose.int, key, -2, -1))
    scores = writer.call(_aten.mul.Tensor, scores, scale)
    if stated["is_causal"]:
        like = query.meta["val"]
        sizes = [like.shape[-2], key.meta["val"].shape[-2]]
        ones = writer.call(_aten.ones.default, sizes, dtype=torch.bool, device=like.device)
        mask = writer.call(_aten.tril.default, ones)
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        hidden = writer.call(_aten.logical_not.default, mask)
        scores = writer.call(_aten.masked_fill.Scalar, scores, hidden, -math.inf)
    elif mask is not None:
        scores = writer.call(_aten.add.Tensor, scores, mask)
    weights = writer.dropout(writer.call(_aten.softmax.int, scores, -1), dropped)
    return writer.call(_aten.matmul.default, weights, value)


def _repeated(writer: _RandomWriter, x: Node, num_heads: int) -> Node:
    """Return the heads of keys or values as often as there are queries of each."""
    *batch, heads, length, size = x.meta["val"].shape
    copies = writer.call(_aten.unsqueeze.default, x, -3)
    copies = writer.call(_aten.expand.default, copies, [*batch, heads, num_heads // heads, length, size])
    return writer.call(_aten.reshape.default, copies, [*batch, num_heads, length, size])


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_WRITTEN: Mapping[str, _Write] = {
    "dropout": _dropout,
    "native_dropout": _dropout,
    "bernoulli": _bernoulli,
    "rand": _rand,
    "rand_like": _rand,
    "randn": _randn,
    "randn_like": _randn,
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal,
    "exponential": _exponential,
    "randint": _randint,
    "randint_like": _randint,
    "rrelu": _rrelu,
    "scaled_dot_product_attention": _attention,
}
