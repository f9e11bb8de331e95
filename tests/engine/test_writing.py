"""Pieces of written functions: what they read, make and empty."""

import keyword
from typing import Any

import pytest
import torch

from autoshard.engine.torch.writing import Statement, Step, Variables, piece


@pytest.mark.parametrize("num_inputs", range(3))
def test_a_piece_empties_its_list_of_any_number_of_inputs(num_inputs: int):
    inputs = [f"x{number}" for number in range(num_inputs)]
    total = Statement(
        text=f"y = torch.ones(2){''.join(f' + {name}' for name in inputs)}", reads=tuple(inputs), writes=("y",)
    )
    text, reads, _ = piece("part", [Step(comment="y", statements=(total,))], {"y"})
    space: dict[str, Any] = {"torch": torch}
    exec(text, space)
    tensors = [torch.full((2,), 10.0) for _ in reads]
    (result,) = space["part"](tensors)
    assert reads == tuple(inputs) and result.tolist() == [1.0 + 10 * num_inputs] * 2 and not tensors


def test_values_of_any_name_are_variables_of_their_own():
    variables, names = Variables(), ["0.norm.weight", "0-norm.weight", "class", "t1", "_2", "1", "w", "w"]
    tensors = [torch.zeros(1) for _ in names]
    for tensor, name in zip(tensors, names, strict=True):
        variables.call(tensor, name)
    made = [variables.of(tensor) for tensor in tensors]
    assert len({*made}) == len(names) and all(name.isidentifier() and not keyword.iskeyword(name) for name in made)
