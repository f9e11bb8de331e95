"""How far attention looks, read off what a decoder adds to its scores, and off its masks."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.errors import Fault, InputError
from autoshard.modules.capture import Captured
from autoshard.modules.decoder.pieces import AttentionDetail, is_same, parameters_of
from autoshard.modules.dims import Position, factors, size_of
from autoshard.modules.nodes import Node
from autoshard.modules.program import Traced, TracedStep, name_of
from autoshard.modules.reach import steps_to

NOT_CAUSAL = "has attention that sees neither all tokens nor a window of one size, before a token or on both sides"
_NO_VALUES = "has a mask made of a buffer without values; build the module without a meta device"
_HIDDEN = -1e4  # what masks add to scores that must vanish is far below
_JOINING = ("add", "add_", "sub", "masked_fill", "masked_fill_", "where", "mul", "div")


class NoValues(InputError):
    """A mask that cannot be computed because the module has no numbers."""

    def under(self, parent: str | Path) -> "NoValues":
        """Return the same error seen from what contains the faulty value."""
        return NoValues(fault.under(parent) for fault in self.faults)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """How many tokens each token sees, itself included (None: all before it), and whether by different numbers.

    Or it sees what comes after it, too.
    """

    window: int | None
    is_biased: bool = False
    is_of_all: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreTerms:
    """What is added to the scores of an attention, or hides some of them: tensors, and their dims as scores have them.

    Weights add numbers, and hide nothing: they count as zeros.
    """

    captured: Captured
    attention: AttentionDetail
    batch: Position
    name: str  # of the layer

    @cached_property
    def terms(self) -> tuple[tuple[Traced, Position], ...]:
        """All of them, with what they are made of where that depends on what layers compute."""
        return tuple(term for read in self.attention.beside for term in self._terms(read.value, read.dims))

    @property
    def values(self) -> tuple[Traced, ...]:
        """The tensors alone."""
        return tuple(value for value, _ in self.terms)

    def sight(self) -> Sight:
        """Return what a token sees; raise InputError where that is neither all, nor all or some before it."""
        length, is_trained = size_of(self.attention.keys), any(map(self._is_trained, self.values))
        for fill in (torch.zeros, torch.ones):  # an input that says which tokens there are is all ones
            values = [self._evaluated(*term, fill) for term in self.terms if self._node_of(term[0])]
            everything = torch.ones(1, length, length, dtype=torch.bool)
            visible = functools.reduce(torch.logical_and, map(_visible, values), everything)
            window = int(visible[0, -1].sum())
            distance = torch.arange(length)[:, None] - torch.arange(length)
            expected = (distance >= 0) & (distance < window)
            added = [mask.masked_fill(mask <= _HIDDEN, 0) for mask in values if mask.is_floating_point()]
            is_biased = is_trained or any(bool(bias.any()) for bias in added)
            if bool((visible == expected).all()):
                return Sight(window=window if window < length else None, is_biased=is_biased)
            if fill is torch.ones and (reach := _reach_both_ways(visible)):
                return Sight(window=reach if reach < length else None, is_of_all=True, is_biased=is_biased)
        raise InputError.of(self.name, NOT_CAUSAL)

    def _terms(self, value: Traced, dims: Position) -> Iterator[tuple[Traced, Position]]:
        if not {*dims} & {*self.attention.keys}:
            return
        maker = self._makers.get(value.name)
        if maker is None or not (self._node_of(value) is None or self._is_computed(value)):
            yield value, dims
        elif is_same(maker) or name_of(maker) in _JOINING:
            as_read = dict(zip(maker.makes.dims, dims, strict=True))
            for inner in maker.reads:
                yield from self._terms(inner.value, tuple(as_read.get(dim, dim) for dim in inner.dims))
        else:
            yield value, dims

    @cached_property
    def _makers(self) -> Mapping[str, TracedStep]:
        return {step.makes.name: step for step in self.captured.program.steps}

    def _node_of(self, value: Traced) -> Node | None:
        """Return the node that makes a value without what layers compute; None if there is none."""
        if value.name in self.captured.inputs:
            return self.captured.inputs[value.name]
        return None if self._is_computed(value) else self.captured.makers.get(value.name)

    def _steps(self, value: Traced) -> tuple[TracedStep, ...]:
        maker = self._makers.get(value.name)
        return steps_to(self.captured.program.steps, [maker.makes]) if maker else ()

    def _is_computed(self, value: Traced) -> bool:
        """Say whether a value is made of weights for each sample by itself, as hidden states are."""
        batch = {*factors(self.batch)}
        return any(batch & {*step.makes.dims} and [*parameters_of([step])] for step in self._steps(value))

    def _is_trained(self, value: Traced) -> bool:
        is_made = value.name in self.captured.parameters or [*parameters_of(self._steps(value))]
        return bool(is_made) and not value.is_index

    def _evaluated(self, value: Traced, dims: Position, fill: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Compute a term as [any, queries, keys], for inputs filled with one number."""
        keys, queries = ({*factors(position)} for position in (self.attention.keys, self.attention.queries))
        beside = [dim for dim in dims if dim not in keys | queries]
        order = [*beside, *(dim for dim in dims if dim in queries), *(dim for dim in dims if dim in keys)]
        laid = self._computed(value, fill).reshape([dim.size for dim in dims])
        length = size_of(self.attention.keys)
        rows = laid.permute([dims.index(dim) for dim in order]).reshape(size_of(tuple(beside)), -1, length)
        return rows.expand(-1, length, -1)

    def _computed(self, value: Traced, fill: Callable[..., torch.Tensor]) -> torch.Tensor:
        exported, name = self.captured.exported, self.name
        node = self._node_of(value)
        assert node, "what has none is not looked at"
        part = exported.part([node])
        for node in part.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        part.recompile()
        buffers = dict(exported.program.named_buffers())
        used = {node.name for node in part.graph.nodes if node.op == "placeholder" and node.users}
        specs = [spec for spec in exported.program.graph_signature.input_specs if spec.arg.name in used]
        if any(spec.kind.name == "BUFFER" and _has_no_values(buffers[spec.target]) for spec in specs):
            raise NoValues([Fault(where=name, message=_NO_VALUES)])
        arguments = {
            key: fill(argument.shape, dtype=argument.dtype) if isinstance(argument, torch.Tensor) else argument
            for key, argument in exported.arguments.items()
        }
        empty = dict.fromkeys(exported.paths.values(), torch.empty(0))
        parameters = {
            exported.paths[node.name]: torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            for node in part.graph.nodes
            if node.name in used and node.name in exported.paths
        }
        try:
            with torch.no_grad():
                inputs = exported.placeholders(part, arguments, buffers, torch.tensor(0), empty | parameters)
                (numbers,) = part(*inputs)
        except Exception as error:  # whatever torch raises where tensors without numbers meet others
            message = f"has a mask that cannot be computed: {type(error).__name__}: {error}"
            raise NoValues([Fault(where=name, message=message)]) from error
        return numbers


def _reach_both_ways(visible: torch.Tensor) -> int:
    """Return how many tokens each token sees to either side, itself included; 0 where that differs among them."""
    length = visible.shape[-1]
    if bool(visible.all()):
        return length
    reach = int(visible[0, 0].sum())
    where = torch.arange(length)
    expected = (where[:, None] - where).abs() < reach
    return reach if visible.shape[1:] == expected.shape and bool((visible == expected).all()) else 0


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """Return whom a mask lets be seen; some say who is not seen, which is never oneself."""
    visible = mask if mask.dtype == torch.bool else ~(mask <= _HIDDEN)
    return visible if visible.diagonal(dim1=-2, dim2=-1).all() else ~visible


def _has_no_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
