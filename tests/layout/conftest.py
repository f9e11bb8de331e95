"""Blocks of small models with random arrays, lowered and compared with the block that nobody cut."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from autoshard.graph.block import Block
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.fusing import recompute
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.kinds.linear import Collect
from autoshard.graph.op import Array
from autoshard.layout.interpret import Interpreter, queueing_apart
from autoshard.layout.layout import Cuts
from autoshard.layout.lower import lower
from autoshard.layout.program import Communicate, Compute, Program, Value
from autoshard.layout.redistribute import Price, bytes_price
from autoshard.layout.shards import Executor
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import Precision, Workload
from tests.kit import tiny
from tests.layout.meaning import cuts_by_meaning

# Nothing divides by everything: some ranks hold less than others, or nothing.
ODD = {"hidden": 6, "ffn": 10, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "vocab": 14, "max_positions": 9}
# Every size divides by 8: each rank holds something, so that no collective is without effect.
EVEN = {"hidden": 16, "ffn": 16, "num_heads": 64, "num_kv_heads": 8, "head_dim": 8, "vocab": 16, "max_positions": 8}
_ALL_TOKENS = 64.0  # the capacity at which an expert has slots for all tokens on each of up to 16 ranks


@dataclass(frozen=True, kw_only=True)
class Uncut:
    """A block with the arrays that it is given and every tensor that it makes."""

    block: Block
    sizes: Mapping[str, int]
    given: Mapping[str, Array]
    tensors: Mapping[str, Array]

    def lower(self, cuts: Mapping[str, Cuts], mesh: Mesh, boundary: Cuts, *, keeps_gathered: bool) -> Program:
        """Lower the block, pricing by bytes."""
        return lower(self.block, cuts, dict(mesh.axes), _price(mesh), boundary=boundary, keeps_gathered=keeps_gathered)

    def error(self, program: Program, mesh: Mesh) -> float:
        """Return how far the results are from those of the uncut block, relative to its largest gradient."""
        results = Interpreter(block=self.block, mesh=mesh, sizes=self.sizes).run(program, self.given)
        largest = max(float(np.abs(self.tensors[name]).max()) for name in results)
        return max(float(np.abs(found - self.tensors[name]).max()) for name, found in results.items()) / largest

    def tensors_agree(self, program: Program, mesh: Mesh) -> bool:
        """Whether every tensor that operations make and delivers hand on is that of the uncut block."""
        held = Interpreter(block=self.block, mesh=mesh, sizes=self.sizes).execute(program, self.given)
        executor = Executor(mesh=mesh, sizes=self.sizes)
        for value in self._whole_values(program):
            whole = executor.gather(held[value.name], tuple(dim for dim, _ in value.layout.dims), value.layout)
            if not np.allclose(whole, self.tensors[value.tensor], rtol=1e-7, atol=1e-9):
                return False
        return True

    def queueing_as(self, program: Program, mesh: Mesh) -> "Uncut":
        """The same block from the same arrays, with its tokens queueing in the groups of a program."""
        return _evaluated(queueing_apart(self.block, program, mesh, self.sizes), self.sizes, self.given)

    def _whole_values(self, program: Program) -> Iterator[Value]:
        """Yield values that hold all of a tensor: not a part of a sum, nor what each rank numbers in its own way."""
        parts = {op.outputs[0] for op in self.block.ops if isinstance(op.kind, Collect) and len(op.inputs) > 1}
        for entry in program.instructions:
            if not isinstance(entry, Compute | Communicate):
                continue
            for value in entry.writes if isinstance(entry, Compute) else (entry.writes,):
                numbered = "slots" in dict(value.layout.dims) or value.tensor.startswith("queue")
                if value.tensor not in parts and not numbered and not value.name.endswith("!"):
                    yield value


def _evaluated(block: Block, sizes: Mapping[str, int], given: Mapping[str, Array]) -> Uncut:
    tensors = dict(given)
    block.run(block.select("micro_batch"), sizes, tensors)
    return Uncut(block=block, sizes=sizes, given=given, tensors=tensors)


@functools.cache
def _price(mesh: Mesh) -> Price:
    """Return the same price for the same mesh, so that what was found for one case serves the next."""
    return bytes_price(1e6, dict(mesh.axes))


@functools.cache
def _block(  # noqa: PLR0913
    options: str, even: bool, batch: int, seq: int, kind: str, again: Any, capacity: float | None, platform: str
) -> tuple[Block, Mapping[str, int]]:
    name, _, what = options.partition(" of ")
    over = what.removeprefix("a balanced ") if "balanced" in what else None
    losses = {"router_balance_loss": 0.1, "router_z_loss": 0.1, "router_balance_over": over} if over else {}
    own = {"activation": "gelu_tanh"} if name == "neox" else {}
    model = tiny(name, num_layers=1, **(EVEN if even else ODD), **own)
    workload = Workload(
        seq_len=seq, global_batch=8, precision=Precision.named("fp32"), expert_capacity=capacity,
        documents="separate" if what == "documents" else "joined", **losses,
    )  # fmt: skip
    kernels = load_kernels(platform)
    graph = decoder_graph(model, workload, kernels, micro_batch=batch)
    block = graph.block(kind)
    return (block if again == () else recompute(block, kernels, again)), graph.sizes


def _given(block: Block, sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Array]:
    made = {output for op in block.ops for output in op.outputs}
    arrays: dict[str, Array] = {}
    for name, tensor in block.tensors.items():
        shape = [sizes[dim] for dim in tensor.dims]
        if name in made:
            continue
        if name in ("positions", "key_positions"):
            arrays[name] = np.arange(shape[0])
        elif name == "document_starts":
            arrays[name] = random_document_starts(rng, (sizes["batch"], sizes["seq"]))
        elif tensor.dtype == "int64":
            arrays[name] = rng.integers(0, sizes["vocab"], shape)
        else:
            arrays[name] = rng.normal(size=shape)
    return arrays


@pytest.fixture(scope="session")
def uncut() -> Callable[..., Uncut]:
    """``uncut("llama", "layer", batch=2, seq=5, again=("attend",), even=True)``, or ``"llama of documents"``.

    ``"mixtral of a balanced batch"`` and ``"mixtral of a balanced sequence"`` have losses of their routers.
    """

    def build(  # noqa: PLR0913
        options: str, kind: str = "layer", *, batch: int = 2, seq: int = 4, again: Any = (), seed: int = 0,
        even: bool = False, capacity: float | None = _ALL_TOKENS, platform: str = "torch_cuda",
    ) -> Uncut:  # fmt: skip
        block, sizes = _block(options, even, batch, seq, kind, again, capacity, platform)
        return _evaluated(block, sizes, _given(block, sizes, np.random.default_rng(seed)))

    return build


@pytest.fixture(scope="session")
def natural_cuts() -> Callable[..., Mapping[str, Cuts]]:
    """How people would cut a block."""
    return cuts_by_meaning
