"""Whether a Hugging Face module is the card of its config: by what its code calls, its weights, and its numbers.

A small twin of the same class and config computes the numbers, and the operations of its card must compute the same.
The module itself must call the same functions as its twin, with the same constants, and have the weights of its card.
So nothing of a card is taken for granted, and nothing of the size of the module is computed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.engine.hf_names import HfNames
from autoshard.engine.hf_tables import HF_NAMES
from autoshard.errors import InputError
from autoshard.modules.decoder.agreeing import FREQUENCIES, differing_frequencies, differing_numbers, twin_graph
from autoshard.modules.decoder.calls import taped
from autoshard.modules.decoder.matching import Pairs, differing_calls
from autoshard.modules.decoder.twins import NUM_DRAWS, TWIN_SEQUENCES, TWIN_TOKENS, Twin, size_pairs, without_numbers
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.hf.types import MODEL_TYPES
from autoshard.spec.model import ModelSpec

_TOKENS = 8192  # more than most windows hold
_ROUNDED = 1e-6  # of a constant of the twin, which was of FP32 before


@dataclass(frozen=True, kw_only=True)
class CardMatch:
    """The card of a module's config, and where the module's code differs from it; no card where there is none."""

    card: ModelSpec | None = None
    differences: tuple[str, ...] = ()


def card_match(module: Any, name: str, source: str, show: Callable[[str], None] = lambda _: None) -> CardMatch:
    """Compare a module with the card of its config. It must be in ``eval`` mode, and not return caches."""
    card = card_of_config(module.config, name, source) if hasattr(module, "config") else None
    if card is None or module.config.model_type not in HF_NAMES:
        return CardMatch()
    try:
        return CardMatch(card=card, differences=tuple(dict.fromkeys(_differences(module, card, show))))
    except InputError as error:
        return CardMatch(card=card, differences=tuple(f"{fault.where}: {fault.message}" for fault in error.faults))
    except Exception as error:  # a class may refuse to be made small, or to run so
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return CardMatch(card=card, differences=(f"could not be compared with its config ({reason})",))


def card_of_config(config: Any, name: str, source: str) -> ModelSpec | None:
    """Return the card of a Hugging Face config, if autoshard knows its type and all of its options."""
    data: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    if data.get("model_type") not in MODEL_TYPES:
        return None
    try:
        return spec_from_config(data, name=name, source=source)
    except InputError:  # it has an option that cards lack, so its code says more
        return None


def _differences(module: Any, card: ModelSpec, show: Callable[[str], None]) -> Iterator[str]:
    family, layers, bare = module.config.model_type, _layers(module, card.num_layers), without_numbers(module)
    yield from _weights_that_differ(module, card, family)
    show("making a small twin of its class")
    twin = Twin.of(bare, card)
    # Code of linear attention calls the same functions for each chunk of a sequence: as many as those of the twin.
    length = TWIN_TOKENS if card.has_linear_layers else max(_TOKENS, 2 * max(_windows(card), default=0))
    tokens = torch.zeros(TWIN_SEQUENCES, length, dtype=torch.int64, device="meta")
    pairs = size_pairs(bare, twin, (length, TWIN_TOKENS))
    yield from differing_calls(taped(bare, layers, tokens, show), twin.tape(layers), twin.standing, pairs)
    small = card_of_config(twin.module.config, "twin", "its config")
    if small is None:
        yield "its config cannot be made small"
        return
    yield from differing_frequencies(twin_graph(small), dict(twin.module.named_buffers()))
    yield from _constants_that_differ(module, card, twin, pairs)
    yield from _numbers_that_differ(small, family, twin, layers, show)


def _windows(card: ModelSpec) -> Iterator[int]:
    for kind in card.layer_counts:
        if window := card.of_kind(kind).window:
            yield window


def _layers(module: Any, count: int) -> str:
    lists = (path for path, submodule in module.named_modules() if isinstance(submodule, torch.nn.ModuleList))
    path = next((path for path in lists if len(module.get_submodule(path)) == count), None)
    if path is None:
        raise InputError.of("module", f"has no list of {count} layers, as many as its config says")
    return path


def _weights_that_differ(module: Any, card: ModelSpec, family: str) -> Iterator[str]:
    names = HfNames.of(family, card, "module")
    expected = dict(names.shapes)
    has = {path: tuple(tensor.shape) for path, tensor in module.named_parameters()}
    has |= {path: tuple(buffer.shape) for path, buffer in module.named_buffers() if path in expected}
    for path in sorted(expected.keys() | has.keys()):
        if expected.get(path) != has.get(path):
            ours, its = (shapes.get(path, "missing") for shapes in (has, expected))
            yield f"{path} is {ours} in the code, and {its} by its config"


def _numbers_that_differ(
    card: ModelSpec, family: str, twin: Twin, layers: str, show: Callable[[str], None]
) -> Iterator[str]:
    tokens = twin.tokens()
    for draw in range(NUM_DRAWS):
        show("comparing the numbers of its twin with its card")
        twin.draw(draw)
        differences = tuple(differing_numbers(card, family, twin, taped(twin.module, layers, tokens), tokens))
        if differences:
            yield from differences
            return


def _constants_that_differ(module: Any, card: ModelSpec, twin: Twin, pairs: Pairs) -> Iterator[str]:
    """Compare the constants that a module holds, where they have numbers, with its card and its twin."""
    stored, expected = module.state_dict().keys(), dict(twin.module.named_buffers())
    constants = {path: buffer for path, buffer in module.named_buffers() if path not in stored and not buffer.is_meta}
    yield from differing_frequencies(twin_graph(card), constants)
    for path, buffer in constants.items():
        if not path.endswith(FREQUENCIES) and not _is_expected(buffer, expected.get(twin.path_of(path)), pairs):
            yield f"{path} has other numbers in the code than by its config"


def _is_expected(buffer: torch.Tensor, small: torch.Tensor | None, pairs: Pairs) -> bool:
    """Say whether a constant has the numbers of the twin's, or one number that follows from another size."""
    if small is None or small.shape != buffer.shape:
        return False
    numbers, expected = buffer.detach().double().cpu(), small.detach().double()
    rtol = float(torch.finfo(buffer.dtype).eps) if buffer.is_floating_point() else 0.0
    if torch.allclose(numbers, expected, rtol=rtol, atol=0):
        return True
    return numbers.numel() == 1 and any(
        math.isclose(float(numbers), a, rel_tol=rtol) and math.isclose(float(expected), b, rel_tol=_ROUNDED)
        for a, b in pairs
    )
