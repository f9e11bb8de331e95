"""A small decoder of the same class: what a Hugging Face module computes does not depend on how wide it is."""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.modules.decoder.calls import CallTape, taped
from autoshard.spec.model import ModelSpec

TWIN_TOKENS, TWIN_SEQUENCES = 13, 2
_WINDOW = 5  # shorter than the tokens, so that it hides some
_HEAD = 16  # numbers of a head, where they follow from the hidden size
_WIDTHS = {  # no two sizes are the same, so that a size of the code stands for one of the twin
    "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 28, "n_inner": 72, "vocab_size": 88,
    "q_lora_rank": 36, "kv_lora_rank": 44, "sliding_window": _WINDOW,
}  # fmt: skip
_LOUDNESS = (0.6, 2.5)  # of weights: with loud ones, numbers reach the limits at which they are clamped
NUM_DRAWS = len(_LOUDNESS)


@dataclass(frozen=True, eq=False, kw_only=True)
class Twin:
    """A small module with as many layers as show each kind, and which of them stands for each of the large one's.

    ``module`` has numbers, in FP64; ``like`` is the same on the device and in the formats of the large module, since
    code looks at both.
    """

    module: Any
    like: Any
    standing: tuple[int, ...]  # by layer of the large module

    @classmethod
    def of(cls, module: Any, card: ModelSpec) -> "Twin":
        """Make the twin of a module whose config says the card."""
        order = card.layer_order
        count = max(2, max(order.index(kind) for kind in card.layer_counts) + 1)
        count = min(count, len(order))
        config = _small_config(module.config, card.num_layers, count)
        modules = (_made(type(module), config, device) for device in (torch.device("cpu"), _device_of(module)))
        small, like = modules
        _take_formats(like, module)
        return cls(module=small.double(), like=like, standing=tuple(order.index(kind) for kind in order))

    def path_of(self, path: str) -> str:
        """Return the path of what stands for a part of the large module."""
        match = _IN_LAYER.fullmatch(path)
        return f"{match[1]}{self.standing[int(match[2])]}{match[3]}" if match else path

    def tape(self, layers: str) -> CallTape:
        """Run it on the device and in the formats of the large module."""
        return taped(self.like, layers, self.tokens().to(_device_of(self.like)))

    @torch.no_grad()
    def draw(self, number: int) -> None:
        """Give all weights random numbers, another draw for each number below ``NUM_DRAWS``."""
        generator = torch.Generator().manual_seed(number)
        loudness = _LOUDNESS[number]
        for weight in self.weights().values():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            fan_in = weight.shape[-1] if weight.dim() > 1 else 1
            weight.copy_(noise * loudness / math.sqrt(fan_in))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return what its state holds: parameters, and the buffers that are stored with them."""
        return self.module.state_dict()

    def tokens(self) -> torch.Tensor:
        """Return random tokens."""
        generator = torch.Generator().manual_seed(0)
        vocab = self.module.get_input_embeddings().weight.shape[0]
        return torch.randint(0, vocab, (TWIN_SEQUENCES, TWIN_TOKENS), generator=generator)


def without_numbers(module: Any) -> Any:
    """Return a copy of a module on the meta device; parameters and buffers are not copied."""
    if all(tensor.is_meta for _, tensor in _tensors(module)):
        return module
    bare: dict[int, Any] = {}
    for _, tensor in _tensors(module):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        bare[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, bare)


def _made(kind: Any, config: Any, device: torch.device) -> Any:
    with device:
        return kind(copy.deepcopy(config)).eval()


def _device_of(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device


def _take_formats(twin: torch.nn.Module, module: torch.nn.Module) -> None:
    formats = {path: tensor.dtype for path, tensor in _tensors(module)}
    for path, tensor in _tensors(twin):
        tensor.data = tensor.data.to(formats.get(path, tensor.dtype))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _small_config(large: Any, num_layers: int, count: int) -> Any:
    """Return a config with narrow layers, and as many as are asked for; all else is as in the large one."""
    config = copy.deepcopy(large)
    widths = dict(_WIDTHS)
    stated = getattr(config, "head_dim", None) or getattr(config, "qk_rope_head_dim", None)
    if not stated:
        widths["hidden_size"] = config.num_attention_heads * _HEAD
    for name, size in widths.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, size)
    for name, value in vars(large).items():
        if isinstance(value, list) and len(value) == num_layers:  # what each layer is
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 0)
    config.use_cache = False
    return config


_IN_LAYER = re.compile(r"(.*?\.)(\d+)(\..*)")


def size_pairs(large: Any, twin: Twin, num_tokens: tuple[int, int]) -> frozenset[tuple[float, float]]:
    """Return which numbers of the large module's code may stand where the twin has others: sizes and what follows.

    ``num_tokens`` are those of a sequence, in both.
    """
    return frozenset(_pairs(large, twin.module, num_tokens))


def _pairs(large: Any, small: Any, num_tokens: tuple[int, int]) -> Iterator[tuple[float, float]]:
    sizes = {num_tokens}
    for name, value in vars(large.config).items():
        now = getattr(small.config, name, None)
        if isinstance(value, int) and isinstance(now, int) and value != now:
            sizes.add((value, now))
    shapes = {path: tuple(tensor.shape) for path, tensor in _tensors(large)}
    for path, tensor in _tensors(small):
        sizes |= {*zip(shapes.get(path, ()), tensor.shape, strict=False)}
    chosen = getattr(large.config, "num_experts_per_tok", None) or 1
    sizes.add((num_tokens[0] * chosen, num_tokens[1] * chosen))
    heads = large.config.num_attention_heads
    widths = {(a // heads, b // heads) for a, b in sizes if a % heads == b % heads == 0}
    before_values = heads + (getattr(large.config, "num_key_value_heads", None) or heads)  # in a product of all three
    sizes |= widths | {(a * before_values, b * before_values) for a, b in widths}
    for a, b in sizes:
        if a != b:
            yield a, b
        if a != b and a > 0 and b > 0:
            yield a * TWIN_SEQUENCES, b * TWIN_SEQUENCES
            yield from ((a // 2, b // 2),) if a % 2 == b % 2 == 0 else ()
            yield from ((a**power, b**power) for power in (0.5, -0.5))
