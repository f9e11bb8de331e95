"""Sequences that are products of dims, as the rows and columns of an image: one dim for the layers of a stack."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as tree

from autoshard.modules.decoder.segments import state_shape
from autoshard.modules.decoder.stack.passing import STATE_DIMS, hidden_states
from autoshard.modules.decoder.stack.splitting import split_steps
from autoshard.modules.dims import size_of, unify
from autoshard.modules.local import registered
from autoshard.modules.program import TracedProgram, TracedStep

_JOINING = "joined_tokens"


def merged_layers(program: TracedProgram) -> tuple[str, ...]:
    """Return the layers' names if their sequence is a product of dims, as the rows and columns of an image are."""
    names, parts = split_steps(program.steps)
    batch, sequence, hidden = state_shape(hidden_states(names, parts)[0], names[0])
    is_merged = len(sequence) > 1 and len(batch) == len(hidden) == 1
    return tuple(names[:-1]) if is_merged else ()


@contextmanager
def with_joined_tokens(module: torch.nn.Module, names: Sequence[str], *, between: bool) -> Iterator[None]:
    """Let the sequence be one dim for layers of these names, or ``between`` every two, while a module is traced."""
    into, out_of = (names, names) if between else ((names[0],), (names[-1],))

    def before(_: Any, arguments: Any, keywords: Any) -> Any:
        return _with_joined((arguments, keywords))

    def after(_: Any, __: Any, result: Any) -> Any:
        return _with_joined(result)

    handles = [module.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True) for name in into]
    handles += [module.get_submodule(name).register_forward_hook(after) for name in out_of]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def joined_outside(program: TracedProgram) -> TracedProgram:
    """Return a program in which no layer joins tokens: hooks of a layer do, and are no part of it."""

    def outside(step: TracedStep) -> TracedStep:
        function = getattr(step.function, "keywords", {}).get("function")
        return replace(step, path="") if getattr(function, "_opname", "") == _JOINING else step

    return replace(program, steps=tuple(map(outside, program.steps)))


def unify_tokens(program: TracedProgram) -> None:
    """Let the sequences that go from layer to layer be one dim."""
    first, *states = hidden_states(*split_steps(program.steps))
    for state in (state for state in states if size_of(state.positions[1]) == size_of(first.positions[1])):
        unify(state.positions[1], first.positions[1])


def _with_joined(values: Any) -> Any:
    """Join the tokens of the first tensor that can be a hidden state."""
    flat, layout = tree.tree_flatten(values)
    places = [
        place
        for place, value in enumerate(flat)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == STATE_DIMS
    ]
    for place in places[:1]:
        text = f"batch _ hidden -> batch {flat[place].shape[1]} hidden"
        (flat[place],) = _joining()([flat[place]], text)
    return tree.tree_unflatten(flat, layout)


@cache
def _joining() -> Any:
    """Return the operation that gives a hidden state as it is: whoever reads the result sees one dim of tokens."""
    return registered(torch.clone, "module", _JOINING)
