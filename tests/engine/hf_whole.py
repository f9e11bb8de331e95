"""Whole models from Hugging Face form to ours and back, for numpy arrays and torch tensors alike."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from autoshard.engine.hf_names import Form, HfNames, shapes_of
from autoshard.spec.model import ModelSpec

A = TypeVar("A")
Empty = Callable[..., Any]  # ``numpy.empty`` or ``torch.empty``: called with a shape and ``dtype=``


def from_hf(family: str, model: ModelSpec, tensors: Mapping[str, A], empty: Empty) -> dict[str, A]:
    """Return our weights, named as in ``graph/evaluate``, of a whole model in either form."""
    names = HfNames.fitting(family, model, tensors.keys())
    ours = {name: empty(shape, dtype=_some(tensors).dtype) for name, shape in shapes_of(model).items()}
    for name, patches in names.patches().items():
        for patch in patches:
            ours[patch.tensor][patch.place] = patch.view(tensors[name])
    return ours | {other: ours[owner] for other, owner in names.tied.items()}


def to_hf(
    family: str, model: ModelSpec, weights: Mapping[str, A], empty: Empty, form: Form = "published"
) -> dict[str, A]:
    """Return the tensors of a Hugging Face model with our weights; a tied head is left out, as their files do."""
    names = HfNames.of(family, model, form)
    theirs = {name: empty(shape, dtype=_some(weights).dtype) for name, shape in names.shapes.items()}
    for name, patches in names.patches().items():
        for patch in patches:
            patch.view(theirs[name])[...] = cast(Any, weights[patch.tensor])[patch.place]
    return theirs


def _some(tensors: Mapping[str, Any]) -> Any:
    return next(iter(tensors.values()))
