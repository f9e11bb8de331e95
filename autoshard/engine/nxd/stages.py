"""What NxD takes as units of a pipeline, and the model made of them.

``places`` are the positions of this rank's part of every sequence, which is all of it without cp.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autoshard.engine.decoder.leaves import rotary_turns
from autoshard.engine.decoder.model import Embed, Head
from autoshard.spec.model import ModelSpec


class FirstStage(nn.Module):
    """The embedding, which counts its positions itself, so that nothing but tokens goes in."""

    def __init__(self, block: Embed, places: range) -> None:
        super().__init__()
        self.block, self._places = block, places

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden state."""
        return self.block(tokens, _counted(self._places, tokens.device))


class MiddleStage(nn.Module):
    """A layer, which makes the turns of its positions itself: else they would travel from stage to stage."""

    def __init__(self, block: nn.Module, model: ModelSpec, places: range) -> None:
        super().__init__()
        self.block, self._model, self._places = block, model, places

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        if self._model.positions != "rotary":
            return self.block(x)
        return self.block(x, rotary_turns(self._model, _counted(self._places, x.device), x.dtype))


def _counted(places: range, device: torch.device) -> Tensor:
    return torch.arange(places.start, places.stop, device=device)


class LastStage(nn.Module):
    """The head, whose loss is scaled so that NxD's means give the plan's sum."""

    def __init__(self, block: Head, scale: int) -> None:
        super().__init__()
        self.block, self._scale = block, scale

    def forward(self, x: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return self.block(x, labels, token_weight) * self._scale


class NxdDecoder(nn.Module):
    """The whole model, of which NxD takes a rank's stages."""

    def __init__(self, embed: FirstStage, layers: Iterable[MiddleStage], head: LastStage) -> None:
        super().__init__()
        self.embed, self.layers, self.head = embed, nn.ModuleList(layers), head

    def forward(self, tokens: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, labels, token_weight)
