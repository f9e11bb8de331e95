"""Cosines and sines of rotary positions, made once for all layers that turn by the same angles."""

from dataclasses import dataclass, field

import torch

from autoshard.graph.kinds.attention import Rotary

_MOST = 8  # micro-batches in flight share their positions, so few are ever needed


@dataclass(frozen=True, slots=True)
class Rotations:
    """What was made last, by the angles' parameters and the positions."""

    known: dict[object, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of(self, kind: Rotary, positions: torch.Tensor, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines, in the format and on the device of ``like``: [position, pair]."""
        key = (kind.fraction, kind.theta, kind.scaling, head_dim, like.dtype, positions.data_ptr(), len(positions))
        if key not in self.known:
            if len(self.known) >= _MOST:
                self.known.pop(next(iter(self.known)))
            frequencies = torch.from_numpy(kind.frequencies(head_dim))
            angles = positions.double()[:, None] * frequencies
            self.known[key] = (angles.cos().to(like), angles.sin().to(like), positions)  # kept, so is its address
        cos, sin, _ = self.known[key]
        return cos, sin
