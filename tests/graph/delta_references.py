"""What torch says of linear attention: token by token, with autograd's gradients."""

from typing import Any

import pytest

from autoshard.graph.kinds.delta import CausalConv, Decay, GatedDelta
from autoshard.graph.op import OpKind
from tests.graph.attention_references import Reference, Sizes

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

_QUERY, _VALUE = "batch seq delta_heads delta_key", "batch seq delta_heads delta_group delta_value"
_STATES, _OF_STATE = "batch seq delta_heads delta_group", "delta_heads delta_group"


def reference_conv(x: Any, weight: Any, _: Sizes) -> Any:
    """Torch's own convolution: a group for each channel, and zeros before the first token."""
    channels, taps = x.flatten(2).mT, weight.flatten(0, -2)
    mixed = F.conv1d(F.pad(channels, (taps.shape[-1] - 1, 0)), taps[:, None], groups=taps.shape[0])
    return mixed.mT.reshape(x.shape)


def reference_decay(x: Any, rate: Any, shift: Any, _: Sizes) -> Any:
    return -rate.exp() * F.softplus(x + shift)


def reference_delta(query: Any, key: Any, value: Any, decay: Any, move: Any, _: Sizes) -> Any:
    """For each head a matrix S: S <- a S (1 - b k k') + b v k', and S q is read."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    batch, length, heads, group, width = value.shape
    state, read = torch.zeros(batch, heads, group, width, key.shape[-1], dtype=value.dtype), []
    for token in range(length):
        k, b = key[:, token, :, None, :, None], move[:, token, ..., None, None]
        state = decay[:, token, ..., None, None].exp() * (state - b * state @ k @ k.mT)
        state = state + b * value[:, token, ..., None] @ k.mT
        read.append((state @ query[:, token, :, None, :, None])[..., 0] / key.shape[-1] ** 0.5)
    return torch.stack(read, 1)


# Kind, inputs, torch's word, and the FLOPs of matrices and vectors of 2 x 3 tokens, 59 heads of 61 states, 67 x 71, and
# 73 taps.
_STATES_OF_ALL = 2 * 3 * 59 * 61
DELTA: dict[str, tuple[OpKind, tuple[str, ...], Reference, tuple[int, int]]] = {
    "causal conv": (
        CausalConv(),
        (_VALUE, f"{_OF_STATE} delta_value taps"),
        reference_conv,
        (0, 2 * 73 * _STATES_OF_ALL * 71),
    ),
    "decay": (Decay(), (_STATES, _OF_STATE, _OF_STATE), reference_decay, (0, 5 * _STATES_OF_ALL)),
    "gated delta": (
        GatedDelta(),
        (_QUERY, _QUERY, _VALUE, _STATES, f"{_STATES} +"),
        reference_delta,
        (
            2 * _STATES_OF_ALL * (3 * (3 * 67 + 2 * 71) + 3 * 67 * 71),
            4 * 3 * _STATES_OF_ALL + 2 * 4 * 2 * 3 * 59 * 67,
        ),
    ),
}
