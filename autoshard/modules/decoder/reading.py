"""A decoder that a user's function makes, read without its weights."""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from autoshard.errors import Fault, InputError, inside, require
from autoshard.extensions import user_function
from autoshard.modules.capture import Captured, capture
from autoshard.modules.decoder.arguments import argument_of_next, first_argument, token_arguments, with_two_samples
from autoshard.modules.decoder.cards import card_match
from autoshard.modules.decoder.ends import trained_end, up_to_logits
from autoshard.modules.decoder.lift import lift_decoder
from autoshard.modules.decoder.masks import NoValues
from autoshard.modules.decoder.stack.joined import joined_outside, merged_layers, unify_tokens, with_joined_tokens
from autoshard.spec.model import ModelSpec

Show = Callable[[str], None]
OPTION = "--module"
_LONGEST = 8192  # tokens that are looked at, unless a sequence is asked for
_MOST = 16384  # masks are evaluated: a byte for each pair
_NOT_ITS_CARD = "it is not the card of its config"
_OWN_INPUTS = "it was given inputs of its own, and cards are compared for tokens alone"
# As torch says of code that makes masks where its weights are not, and of autocast for a device without formats.
_NOT_ON_META = ("to be on the same device", "unsupported scalarType")
_SEQUENCES = 2  # so that a batch is a dim
MOST_FROZEN = 2**28  # numbers of frozen weights together, which all hosts hold whole: a gigabyte in FP32
_FROZEN = "weights_that_are_constants"  # what a submodule calls the names of these


def decoder_of(where: str, seq_len: int | None = None, show: Show = lambda _: None) -> ModelSpec:
    """Read the decoder that a function makes: a module, or a module with example inputs by name.

    It is made on torch's meta device, where tensors have no numbers, if its code can be run there. ``show`` is told
    what is being done.
    """

    def read(on_meta: bool) -> ModelSpec:
        module, inputs = made_decoder(where, on_meta=on_meta)
        with inside(f"{OPTION} {where}"):
            titles = {"name": where.rpartition(":")[2], "source": f"the code of {where}"}
            return read_decoder(module, seq_len, inputs, show=show, **titles)

    try:
        return read(on_meta=True)
    except NoValues:  # masks that are made of buffers
        return read(on_meta=False)
    except InputError as error:
        if not any(words in str(error) for words in _NOT_ON_META):
            raise
        return read(on_meta=False)


def made_decoder(where: str, *, on_meta: bool) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """Return the decoder that a function makes, and its example inputs if there are any.

    If it is made ``on_meta``, it has no numbers, unless its code must look at some.
    """
    devices = [torch.device("meta"), nullcontext()] if on_meta else [nullcontext()]
    module, inputs = _module_of(where, _made(where, user_function(where, OPTION), devices))
    return with_constants(module), inputs


def with_constants(module: torch.nn.Module) -> torch.nn.Module:
    """Let weights that are frozen be buffers of a module, as tables of positions are: no run trains these.

    The largest stay what they are where all together are more than a host has room for: of one size, which equal
    layers have, all or none.
    """
    weights = {id(weight): weight for weight in module.parameters() if not weight.requires_grad}
    counts = Counter(weight.numel() for weight in weights.values())
    ends = itertools.accumulate(size * count for size, count in sorted(counts.items()))
    sizes = {size for size, end in zip(sorted(counts), ends, strict=True) if end <= MOST_FROZEN}
    held = {number for number, weight in weights.items() if weight.numel() in sizes}
    buffers: dict[int, torch.Tensor] = {}  # a weight may have several names
    for submodule in module.modules():
        for name, weight in [*submodule.named_parameters(recurse=False)]:
            if id(weight) in held:
                delattr(submodule, name)
                submodule.register_buffer(name, buffers.setdefault(id(weight), weight.detach()))
                setattr(submodule, _FROZEN, (*getattr(submodule, _FROZEN, ()), name))
    return module


def frozen_buffers(module: torch.nn.Module) -> Sequence[str]:
    """Return the paths of a module's buffers that were frozen weights, and have their format."""
    named = ((path, name) for path, part in module.named_modules() for name in getattr(part, _FROZEN, ()))
    return [f"{path}.{name}".removeprefix(".") for path, name in named]


def read_decoder(
    module: torch.nn.Module, seq_len: int | None = None, inputs: Mapping[str, Any] | None = None, *, name: str = "",
    source: str = "", show: Show = lambda _: None,
) -> ModelSpec:  # fmt: skip
    """Read a decoder off its code, to be planned as a card is: a module that makes logits, or a loss, of tokens.

    ``inputs`` are example inputs by name, if tokens alone, [sequences, ``seq_len``], do not do. The module stays as it
    is; on torch's meta device it needs no memory. ``traced`` of the result says what is not as in the code; it is None
    where the module is the card of its Hugging Face config. ``show`` is told what is being done.
    """
    kind, of_torch = type(module).__name__, isinstance(module, torch.nn.Module)  # pyright: ignore
    require((of_torch, "module", f"must be a torch.nn.Module, not a value of {kind}"))
    titles = {"name": name or kind, "source": source or f"the code of {kind}"}
    with _as_in_evaluation(module):
        match = card_match(module, titles["name"], titles["source"], show)
        has_more = bool({*(inputs or ())} - {first_argument(module)})
        differences = (*match.differences, *([_OWN_INPUTS] if has_more else []))
        if match.card and not differences:
            return match.card
        try:
            show("tracing its operations")
            examples = with_two_samples(inputs or {}) or _tokens(module, seq_len)
            captured = captured_stack(module, lambda: capture(module, examples), token_arguments(module, examples))
            return lift_decoder(captured, module, differences=differences if match.card else (), **titles)
        except NoValues:
            raise
        except InputError as error:
            said = [Fault(where="config", message=f"{_NOT_ITS_CARD}: {what}") for what in differences[:1]]
            raise InputError([*error.faults, *(said if match.card else [])]) from error


def captured_stack(module: torch.nn.Module, trace: Callable[[], Captured], of_tokens: Collection[str]) -> Captured:
    """Trace a stack of layers, again if these see a sequence that is a product of dims: then it is one dim for them.

    Where layers take it apart in chunks, it is one dim between every two.
    """
    captured = trace()
    for is_chunked in (False, True):
        names = merged_layers(up_to_logits(captured, trained_end(captured, of_tokens)).program)
        if names:
            with with_joined_tokens(module, names, between=is_chunked):
                captured = trace()
            if is_chunked:
                unify_tokens(up_to_logits(captured, trained_end(captured, of_tokens)).program)
            else:
                captured = replace(captured, program=joined_outside(captured.program))
    return captured


@contextmanager
def _as_in_evaluation(module: torch.nn.Module) -> Iterator[None]:
    """Let a module drop nothing and return no caches, as long as it is read."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        with without_caches(module):
            module.eval()
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def without_caches(module: torch.nn.Module) -> Iterator[None]:
    """Switch off KV caches of a Hugging Face module while it is traced; training returns none."""
    configs: list[Any] = [getattr(submodule, "config", None) for submodule in module.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None)]
    try:
        for config in caching:
            config.use_cache = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch to transformers
            yield
    finally:
        for config in caching:
            config.use_cache = True


def _module_of(where: str, result: Any) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """Return what a function has made: a decoder, and its inputs if there are any."""
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    is_module = isinstance(module, torch.nn.Module) and isinstance(inputs, Mapping)
    require((is_module, OPTION, f"{where} must return a torch.nn.Module, or a module and its inputs by name"))
    return cast(torch.nn.Module, module), cast(Mapping[str, Any], inputs)


def _made(where: str, function: Any, devices: Sequence[AbstractContextManager[Any]]) -> Any:
    failure = None
    for device in devices:
        try:
            with device:
                return function()
        except (RuntimeError, NotImplementedError) as error:  # code that looks at numbers, which the meta device lacks
            failure = error
        except Exception as error:
            raise InputError.of(f"{OPTION} {where}", f"raised {type(error).__name__}: {error}") from error
    assert failure
    raise InputError.of(f"{OPTION} {where}", f"raised {type(failure).__name__}: {failure}") from failure


def _tokens(module: torch.nn.Module, seq_len: int | None) -> Mapping[str, Any]:
    """Return tokens under the names of the arguments that take tokens."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    config: Any = getattr(module, "config", None)
    usual = min(getattr(config, "max_position_embeddings", None) or _LONGEST, _LONGEST)
    length = min(seq_len or usual, _MOST)
    names = filter(None, (first_argument(module), argument_of_next(module)))
    return {name: torch.zeros(_SEQUENCES, length, dtype=torch.int64, device=device) for name in names}
