"""Cosines and sines of rotary positions, made once for all layers that turn by the same angles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autoshard.graph.kinds.attention import Rotary
from autoshard.graph.kinds.indexing import places

_MOST = 8  # micro-batches in flight share their positions, so few are ever needed
Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines


@dataclass(frozen=True, slots=True)
class Rotations:
    """What was made last, by the angles' parameters and the positions; and tables of the first so many positions."""

    known: dict[object, tuple[Angles, Sequence[torch.Tensor]]] = field(default_factory=dict)
    tables: dict[object, Angles] = field(default_factory=dict)

    def of(self, kind: Rotary, where: Sequence[torch.Tensor], head_dim: int, like: torch.Tensor) -> Angles:
        """Return cosines and sines, in the format and on the device of ``like``: [position, pair].

        ``where`` holds positions; if documents do not see each other, also where each token's document starts. Then
        they are counted from there: [batch, position, pair].
        """
        turning = (kind.fraction, kind.theta, kind.scaling, head_dim, like.dtype)
        key = (turning, *((one.data_ptr(), one.shape) for one in where))
        if key not in self.known:
            if len(self.known) >= _MOST:
                self.known.pop(next(iter(self.known)))
            made = self._in_documents if len(where) > 1 else _of
            angles = made(kind, where, head_dim, like)
            self.known[key] = (angles, where)  # kept, so are the addresses
        return self.known[key][0]

    def _in_documents(self, kind: Rotary, where: Sequence[torch.Tensor], head_dim: int, like: torch.Tensor) -> Angles:
        """Look the angles up: documents differ in every micro-batch, and all count from zero."""
        index: torch.Tensor = places(*where)
        count = 1 << int(index.max()).bit_length() if index.numel() else 1  # few tables serve all documents
        key = (kind.fraction, kind.theta, kind.scaling, head_dim, like.dtype, count)
        if key not in self.tables:
            self.tables[key] = _of(kind, (torch.arange(count),), head_dim, like)
        cos, sin = self.tables[key]
        there = index.to(like.device)
        return cos[there], sin[there]


def _of(kind: Rotary, where: Sequence[torch.Tensor], head_dim: int, like: torch.Tensor) -> Angles:
    angles = where[0].double()[:, None] * torch.from_numpy(kind.frequencies(head_dim))
    return angles.cos().to(like), angles.sin().to(like)
