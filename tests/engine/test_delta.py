"""Linear attention in chunks: the same as token by token, for every length, and the same as transformers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels import KernelContext, kernel_of
from autoshard.graph.kinds.delta import CHUNK, CausalConv, GatedDelta, GatedDeltaGradient
from autoshard.graph.op import Array, Call, OpKind, Tensor

SIZES = {"batch": 2, "delta_heads": 2, "delta_group": 3, "delta_key": 4, "delta_value": 5, "taps": 4}
QUERY = ("batch", "seq", "delta_heads", "delta_key")
VALUE = ("batch", "seq", "delta_heads", "delta_group", "delta_value")
INPUTS = (QUERY, QUERY, VALUE, VALUE[:-1], VALUE[:-1])
LENGTHS = (1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 8 * CHUNK, 8 * CHUNK + 1, 17 * CHUNK - 5)


def call_of(kind: OpKind, dims: Sequence[tuple[str, ...]], length: int) -> Call:
    inputs = tuple(Tensor(name=f"in{number}", dims=of, dtype="fp32") for number, of in enumerate(dims))
    outputs = tuple(
        Tensor(name=f"out{number}", dims=output.dims, dtype=output.dtype)
        for number, output in enumerate(kind.infer(inputs))
    )
    return Call(inputs=inputs, outputs=outputs, sizes={**SIZES, "seq": length})


def drawn(length: int) -> list[Array]:
    """Queries, keys, values, decays of which some forget all and some nothing, and moves between none and whole."""
    rng = np.random.default_rng(length)
    shapes = [[{**SIZES, "seq": length}[dim] for dim in dims] for dims in INPUTS]
    query, key, value, decay, move = (rng.normal(size=shape) for shape in shapes)
    return [query, key, value, -np.exp(3 * decay - 3), 1 / (1 + np.exp(-3 * move))]


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_as_token_by_token_with_every_gradient(length: int) -> None:
    context, inputs = KernelContext(formats=Formats(exact=True)), drawn(length)
    upstream = np.random.default_rng(0).normal(size=inputs[2].shape)
    cases: list[tuple[OpKind, tuple[tuple[str, ...], ...], list[Array]]] = [
        (GatedDelta(), INPUTS, inputs),
        (GatedDeltaGradient(), (VALUE, *INPUTS), [upstream, *inputs]),
    ]
    for kind, dims, arrays in cases:
        call = call_of(kind, dims, length)
        expected = kind.evaluate(call, *arrays)
        results = kernel_of(kind, call, context)(*map(torch.tensor, arrays))
        for result, right in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.numpy(), right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_as_in_transformers(length: int) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    query, key, value, decay, move = (torch.tensor(array, dtype=torch.float32) for array in drawn(length))
    (read,) = kernel_of(GatedDelta(), call_of(GatedDelta(), INPUTS, length), KernelContext(formats=Formats()))(
        query, key, value, decay, move
    )
    by_head = (x.flatten(2, 3) for x in (value, decay, move))
    theirs, _ = qwen.torch_recurrent_gated_delta_rule(query, key, *by_head, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(
        read.flatten(2, 3), theirs, rtol=1e-3, atol=1e-3
    )  # decays of hundreds lose digits in sums


def test_bf16_inputs_are_computed_in_fp32() -> None:
    query, key, value, decay, move = (torch.tensor(array) for array in drawn(70))
    halves = [x.bfloat16() for x in (query, key, value, move)]
    call, context = call_of(GatedDelta(), INPUTS, 70), KernelContext(formats=Formats())
    (exact,) = kernel_of(GatedDelta(), call, context)(*(x.double() for x in halves[:3]), decay, halves[3].double())
    (read,) = kernel_of(GatedDelta(), call, context)(*halves[:3], decay.float(), halves[3])
    assert read.dtype == torch.bfloat16
    torch.testing.assert_close(read.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_a_convolution_sees_no_later_token(length: int) -> None:
    dims, channels = (QUERY, (*QUERY[2:], "taps")), (2, 4)
    call = call_of(CausalConv(), dims, length)
    kernel = kernel_of(CausalConv(), call, KernelContext(formats=Formats(exact=True)))
    x, weight = torch.randn(2, length, *channels).double(), torch.randn(*channels, 4).double()
    (before,) = kernel(x, weight)
    x[:, -1] += 1
    (after,) = kernel(x, weight)
    torch.testing.assert_close(after[:, :-1], before[:, :-1], rtol=0, atol=0)
    torch.testing.assert_close(after[:, -1] - before[:, -1], weight[..., -1].expand(2, *channels))
