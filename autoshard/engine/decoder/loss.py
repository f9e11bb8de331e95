"""The leaf modules of the loss: cross entropy in FP32, in the steps of the graph."""

from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor, nn

from autoshard.engine.decoder.leaves import Taken, at_least_fp32


class ToFp32(nn.Module):
    """The same numbers in FP32; wider ones stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """Cast."""
        return x.to(at_least_fp32(x.dtype))


class Top(nn.Module):
    """The largest logit of each token, taken as a constant: it only keeps exponentials in range."""

    def forward(self, logits: Tensor) -> Tensor:
        """Reduce."""
        return reduce(logits.detach(), "batch seq vocab -> batch seq", "max")


class BelowTop(nn.Module):
    """The logits with the largest subtracted."""

    def forward(self, logits: Tensor, top: Tensor) -> Tensor:
        """Subtract."""
        return logits - rearrange(top, "batch seq -> batch seq 1")


class Exp(nn.Module):
    """The exponential of each element; its result is all that the loss keeps of the logits."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return x.exp()


class Total(nn.Module):
    """The sum over the vocabulary."""

    def forward(self, power: Tensor) -> Tensor:
        """Sum."""
        return reduce(power, "batch seq vocab -> batch seq", "sum")


class Log(nn.Module):
    """The logarithm of each element."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return x.log()


class Pick(nn.Module):
    """The label's logit of each token."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Take it."""
        picked: Any = Taken.apply(logits, rearrange(labels, "batch seq -> batch seq 1"))
        return rearrange(picked, "batch seq 1 -> batch seq")


class Subtract(nn.Module):
    """The difference of two tensors with the same dims."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Subtract."""
        return left - right


class SumOfAll(nn.Module):
    """One number: the sum over the tokens of a micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Sum."""
        return torch.sum(x)
