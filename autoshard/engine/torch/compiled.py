"""Compiles pieces of generated functions for the shapes of this rank; what a compiler cannot runs as it is.

The compiler is Inductor, or what a device registers with torch under its own name, as TorchNeuron does.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.engine.base import HOST

Piece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
_THREADS_OF_HOST = 1  # ranks of one machine compile at the same time, and workers of theirs would outlive them


def compiler_of(device: torch.device) -> Callable[[Piece, Sequence[torch.Tensor]], Piece]:
    """Return what compiles for a device: a piece, with tensors of the shapes and strides that it will be given."""
    settings = {"compile_threads": _THREADS_OF_HOST} if device.type == HOST else {}
    fake, own = FakeTensorMode(), device.type in list_backends()

    def compiled(piece: Piece, examples: Sequence[torch.Tensor]) -> Piece:
        with fake:
            given = [like(one, device) for one in examples]
        try:
            with config.patch(settings), torch.no_grad():
                if own:
                    graph = traced(piece, given, fake, decomposes=False)
                    return _taking_a_list(lookup_backend(device.type)(graph, given))
                found: Any = compile_fx_inner(traced(piece, given, fake), given)
                return found.current_callable or found  # without what notes each call
        except Exception as error:  # compilers raise anything; the piece gives the same numbers without them
            name = getattr(piece, "__name__", "a piece")
            reason = next(iter(str(error).splitlines()), type(error).__name__)  # some errors say nothing
            warnings.warn(f"{name} runs without being compiled: {reason}", stacklevel=2)
            return piece

    return compiled


def like(example: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same shape where the run has it."""
    where = device if example.is_meta else example.device
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=where)


def _taking_a_list(function: Callable[..., Any]) -> Piece:
    def run(some: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(some)
        some.clear()
        return function(*given)

    return run


def traced(
    piece: Piece, given: Sequence[torch.Tensor], fake: FakeTensorMode, *, decomposes: bool = True
) -> GraphModule:
    """Return the graph that a compiler takes: without changes in place, but for those of what is given.

    Inductor wants operations that it decomposes; other compilers do so themselves.
    """

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return piece(list(tensors))

    functional: Any = torch.func.functionalize(run, remove="mutations")
    with fake:
        graph = make_fx(functional, decomposition_table=select_decomp_table() if decomposes else {})(*given)
    made: Any = graph.graph.output_node()
    made.meta["user_visible_output_idxs"] = list(range(len(made.args[0])))  # their strides are as traced
    return graph
