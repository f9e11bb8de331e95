"""What a run asks of its data: samples by their number."""

from dataclasses import dataclass
from typing import Protocol

from autoshard.graph.op import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some samples, in order."""

    tokens: Array  # [count, seq_len + 1] int64: labels are the next tokens
    counted: Array  # [count, seq_len] bool: which labels count in the loss
    document_starts: Array  # [count, seq_len] int64: index of the first token of each token's document

    def __post_init__(self) -> None:
        """Hold the shapes together."""
        count, length = self.tokens.shape
        assert self.counted.shape == self.document_starts.shape == (count, length - 1)


class Source(Protocol):
    """Where samples come from. Sample k is a pure function of the source and k: no position, no state."""

    def samples(self, first: int, count: int) -> Samples:
        """Return the samples of these numbers, however they were asked for before."""
        ...
