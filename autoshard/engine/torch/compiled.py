"""Compiles pieces of generated functions for the shapes of this rank; a piece that fails to compile runs as it is.

The compiler is Inductor, or what a device registers with torch under its own name, as TorchNeuron does.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autoshard.engine.torch.recording import is_uneven
from autoshard.engine.torch.simplified import simplify
from autoshard.run.protocol import HOST

Piece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
_MOST_NUMBERS = 2**31 - 1  # of a tensor: compilers index with 32 bits where they may
_THREADS_OF_HOST = 1  # ranks of one machine compile at the same time, and workers of theirs would outlive them


def compiler_of(device: torch.device) -> Callable[[Piece, Sequence[torch.Tensor]], Piece]:
    """Return a device's compiler, which takes a piece, and tensors with the shapes and strides of its inputs."""
    from torch._inductor import config  # two seconds, which a run without a compiler need not wait
    from torch._inductor.compile_fx import compile_fx_inner

    settings: dict[str, Any] = {"compile_threads": _THREADS_OF_HOST} if device.type == HOST else {}
    if torch.are_deterministic_algorithms_enabled():
        settings["deterministic"] = True  # or else kernels are chosen by their time, and sums have their order
    even, registered = FakeTensorMode(), device.type in list_backends()

    def compiled(piece: Piece, examples: Sequence[torch.Tensor]) -> Piece:
        uneven = [example for example in examples if is_uneven(example)]
        fake = FakeTensorMode(shape_env=ShapeEnv()) if uneven else even
        count = _symbolic_count(uneven[0].shape[1], fake) if uneven else 0
        with fake:
            inputs = [like(example, device, count if is_uneven(example) else None) for example in examples]
        try:
            with config.patch(settings), torch.no_grad():
                if registered:
                    graph = traced(piece, inputs, fake, decomposes=False)
                    return _taking_a_list(lookup_backend(device.type)(graph, inputs))
                code: Any = compile_fx_inner(traced(piece, inputs, fake), inputs)
                code = code.current_callable or code  # without what notes each call
                return _for_many_rows(code, piece, examples) if uneven else code
        except Exception as error:  # compilers raise anything; the piece gives the same numbers without them
            name = getattr(piece, "__name__", "a piece")
            reason = next(iter(str(error).splitlines()), type(error).__name__)  # some errors say nothing
            warnings.warn(f"{name} runs without being compiled: {reason}", stacklevel=2)
            return piece

    return compiled


def _symbolic_count(usual: int, fake: FakeTensorMode) -> torch.SymInt | int:
    """Return a symbolic number of rows, of which a compiler knows only the usual range."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return fake.from_tensor(torch.empty(usual, device="meta"), symbolic_context=context).shape[0]


def _for_many_rows(code: Piece, piece: Piece, examples: Sequence[torch.Tensor]) -> Piece:
    """Run the compiled code, or the piece for fewer rows than the code expects or more than its indices count."""
    number = next(number for number, example in enumerate(examples) if is_uneven(example))
    most = _MOST_NUMBERS // max(example.shape[2] for example in examples if is_uneven(example))
    return lambda inputs: (code if 1 < inputs[number].shape[1] <= most else piece)(inputs)


def like(example: torch.Tensor, device: torch.device, count: torch.SymInt | int | None = None) -> torch.Tensor:
    """Return a tensor of the same shape and order of dims on the device of the run, or with another number of rows."""
    where = device if example.is_meta else example.device
    if count is not None:
        sizes = (1, count, *example.shape[2:])
        order = sorted(range(example.dim()), key=lambda dim: -example.stride(dim))  # products may transpose rows
        dense = torch.empty([sizes[dim] for dim in order], dtype=example.dtype, device=where)
        return dense.permute([order.index(dim) for dim in range(example.dim())])
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=where)


def _taking_a_list(function: Callable[..., Any]) -> Piece:
    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        arguments = tuple(inputs)
        inputs.clear()
        return function(*arguments)

    return run


def traced(
    piece: Piece, examples: Sequence[torch.Tensor], fake: FakeTensorMode, *, decomposes: bool = True
) -> GraphModule:
    """Return the graph that a compiler takes: no operation changes a tensor in place, except the inputs.

    Inductor wants operations that it decomposes; other compilers do so themselves.
    """
    from torch._inductor.decomposition import select_decomp_table

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return piece(list(tensors))

    functional: Any = torch.func.functionalize(run, remove="mutations")
    with fake:
        graph = make_fx(functional, decomposition_table=select_decomp_table() if decomposes else {})(*examples)
        if decomposes:
            simplify(graph)
    output: Any = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # their strides are as traced
    return graph
