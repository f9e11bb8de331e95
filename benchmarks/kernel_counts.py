"""How many kernels a GPU starts for a layer, and what they move, as Inductor fuses them: counted without a GPU."""

# pyright: basic
# torch's own signatures are only partly typed.

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import autoshard.engine.torch.generated as generated
import autoshard.engine.torch.kernels.matrices as matrices
import autoshard.engine.torch.steps as steps
import autoshard.engine.torch.writing as text_writing
from autoshard.engine.programs import BlockProgram, programs_of
from autoshard.engine.torch.compiled import Piece, like, traced
from autoshard.engine.torch.execution import RankStep
from autoshard.engine.torch.fake import fake_world
from autoshard.engine.torch.formats import NOWHERE, Formats, memory_of
from autoshard.engine.torch.kernels import Rotations, fused_attention
from autoshard.engine.torch.recording import Operation, Recording, tensors_in
from autoshard.engine.torch.steps import RankContext
from autoshard.engine.torch.world import World
from autoshard.layout.program import Given
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.placement import MeshRank, sequence_order
from autoshard.run.protocol import HOST
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from benchmarks.result import Extra, Result

BAR = 0.25  # of the kernels that the interpreter starts
BAR_TRAFFIC = 0.4  # of the bytes that its operations between products move
CASES: Mapping[str, tuple[str, str]] = {
    "llama_tp1": ("llama3-8b", "tp=1,pp=1,dp=1"),
    "llama_tp8": ("llama3-8b", "tp=8,pp=1,dp=1"),
    "mixtral_tp2_ep8": ("mixtral-8x7b", "tp=2,pp=1,dp=8,ep=8"),
}
# cited: NVIDIA H100 Tensor Core GPU Architecture, V1.04: table 2; Inductor asks how many parts of a sum run at once
_HOPPER = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, warp_size=32,
)  # fmt: skip
_PRODUCTS = ("mm", "attention")  # parts of the names of what computes on the matrix unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Kernels of a layer forward and backward, and the bytes that they read and write outside products."""

    kernels: int = 0
    elementwise_bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        """Add up."""
        return Count(
            kernels=self.kernels + other.kernels,
            elementwise_bytes=self.elementwise_bytes + other.elementwise_bytes,
        )

    def __mul__(self, times: int) -> "Count":
        """Run it several times."""
        return Count(kernels=times * self.kernels, elementwise_bytes=times * self.elementwise_bytes)

    def __sub__(self, other: "Count") -> "Count":
        """Take away."""
        return self + other * -1


def plan_of(model: str, text: str) -> Plan:
    """Return the plan of a layer on 8k tokens in BF16, which choose all experts alike."""
    candidate = Candidate.parse(f"{text},kernels=torch_engine_gpu")
    workload = Workload(
        seq_len=8192, global_batch=candidate.num_ranks, precision=Precision.named("bf16"), expert_imbalance=0.0
    )
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    spec = replace(load_model(model), num_layers=1)
    return plan_at(Request(model=spec, cluster=cluster, workload=workload, engines=("torch",)), candidate)


def counts(plan: Plan, kind: str = "layer") -> tuple[Count, Count]:
    """Return what the interpreter starts for a block of the plan, and what is left when its functions are compiled."""
    written, pieces = list[Operation](), list[tuple[Piece, Sequence[torch.Tensor], Count]]()
    statement = text_writing.statement

    def writing(operation: Operation, variables: Any) -> Any:
        written.append(operation)
        return statement(operation, variables)

    def counting(piece: Piece, examples: Sequence[torch.Tensor]) -> Piece:
        with Recording() as recording:
            piece([recording.name(one) for one in examples])
        pieces.append((piece, examples, sum(map(alone, recording.operations), Count())))
        return piece

    def calling(step: RankStep) -> Any:
        """Count what a call asks of torch that sends or multiplies rows of experts: the functions do not show it."""
        run = called(step)

        def recorded(*given: torch.Tensor) -> Any:
            with Recording() as recording:
                made = run(*map(recording.name, given))
            written.extend(recording.operations)
            return made

        return recorded if step.counted else run

    def generate(compiler: Any = None) -> tuple[Count, str]:
        written.clear()
        generator = generated.Generator(context=context, kinds="FB", compiler=compiler)
        text = generator.generate(blocks[f"{kind}.0"], [f"{kind}.0"]).text
        return sum(map(alone, written), Count()), text

    called = generated._called
    patches = mock.patch.object(text_writing, "statement", writing), mock.patch.object(generated, "_called", calling)
    with _rank_of(plan) as (context, blocks), patches[0], patches[1]:
        with mock.patch.object(steps, "_adding", lambda *_: None):  # every instruction of the table by itself
            literal, _ = generate()
        left, text = generate(counting)
    for piece, examples, inside in pieces:
        runs = _num_runs(text, piece, examples)
        literal += inside * (runs - 1)
        left += fused(piece, examples) * runs - inside
    return literal, left


def _num_runs(text: str, piece: Piece, examples: Sequence[torch.Tensor]) -> int:
    """Return how often a piece runs: once, or for a few rows at a time until it has had all."""
    found = re.search(rf"by_rows\({getattr(piece, '__name__', '')}, .*, (\d+)\)", text)
    if not found:
        return 1
    wholes = (one.untyped_storage().nbytes() // (one.itemsize * one[0, 0].numel()) for one in examples)
    return -(-max(wholes) // int(found[1]))


@contextmanager
def _rank_of(plan: Plan) -> Iterator[tuple[RankContext, Mapping[str, BlockProgram]]]:
    """Be the first rank of a plan on a GPU that is not there; give what its blocks are run by, and these."""
    with (
        fake_world(0, plan.mesh.num_ranks),
        mock.patch.object(fused_attention, "KERNELS", {NOWHERE.type: fused_attention.GPU}),
        # cited: pytorch/pytorch v2.13 aten/src/ATen/native/cuda/Blas.cpp: addmm_dtype_out_cuda
        mock.patch.object(matrices, "adds_wide", lambda *_: True),
    ):
        programs = programs_of(plan, packs=True)
        world = World.build(plan.mesh, programs.group_atoms(), None, RankActivity())
        context = RankContext(
            world=world, mesh_rank=MeshRank(mesh=plan.mesh, rank=0, sizes=programs.graph.sizes),
            formats=Formats(device=NOWHERE), rotations=Rotations(), positions=torch.from_numpy(sequence_order(plan)),
            packed=programs.packed,
        )  # fmt: skip
        yield context, programs.stages[0]


def of_head(plan: Plan) -> "Memory":
    """Return what the head holds at most beside its weights, when its functions run one operation after the other.

    Compiled they hold less: what Inductor fuses is not written down.
    """
    with _rank_of(plan) as (context, blocks):
        head, generator = blocks["head.0"], generated.Generator(context=context, kinds="FB")
        run = generator.generate(head, ["head.0"])
        given = {
            entry.value.tensor: generator.example(head, entry)
            for entry in head.program.instructions
            if isinstance(entry, Given)
        }
        with Memory(frozenset(map(memory_of, given.values()))) as memory:
            _, values = run.forward(given.__getitem__)
            run.backward("B", given.__getitem__, values)
    return memory


class Memory(TorchDispatchMode):
    """Counts what operations make as long as it lives: the most bytes at a time, and the largest tensor in FP32."""

    def __init__(self, resting: frozenset[StorageWeakRef]) -> None:
        """Begin with nothing but what rests, which does not count."""
        super().__init__()
        self.resting = resting
        self.peak_bytes, self.largest_fp32 = 0, 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is made; a view lies where its tensor does, and what is only repeated takes no room."""
        found = func(*args, **(kwargs or {}))
        for one in (tensor for tensor in tensors_in([found]) if memory_of(tensor) not in self.resting):
            self._alive.setdefault(memory_of(one), one.untyped_storage().nbytes())
            if one.dtype == torch.float32:
                self.largest_fp32 = max(self.largest_fp32, _num_bytes(one) // one.itemsize)
        self._alive = {place: size for place, size in self._alive.items() if not place.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return found


def alone(operation: Operation) -> Count:
    """Return what an operation is when it is started by itself."""
    name = operation.func.overloadpacket.__name__
    if operation.is_view or name.startswith(("empty", "new_empty", "_unsafe_view")):  # a product's result, in its shape
        return Count()
    moved = sum(_num_bytes(one) for one in (*operation.reads, *operation.results))
    return Count(kernels=1, elementwise_bytes=0 if any(part in name for part in _PRODUCTS) else moved)


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes behind a tensor: a number that is repeated counts once."""
    repeated = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(repeated) * tensor.itemsize


def fused(piece: Piece, examples: Sequence[torch.Tensor]) -> Count:
    """Return the kernels that Inductor makes of a piece for a GPU: traced on the host, then moved."""
    from torch._inductor import debug, scheduler  # seconds, which who imports this file need not wait
    from torch._inductor.compile_fx import _recursive_post_grad_passes, record_original_output_strides
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fake = FakeTensorMode()
    piece.__globals__["device"] = torch.device(HOST)
    with fake:
        there = [like(one, torch.device(HOST)) for one in examples]
    graph = traced(piece, there, fake)
    given = [_on_gpu(one) for one in there]
    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(_on_gpu, (node.args, node.kwargs))
        node.meta["val"] = tree_map(_on_gpu, node.meta.get("val"))
    with _as_if_there_were_a_gpu():
        record_original_output_strides(graph)
        with V.set_fake_mode(fake):
            _recursive_post_grad_passes(graph, is_inference=True)
            lowered = GraphLowering(graph, example_inputs=given, is_inference=True)
            with V.set_debug_handler(debug.DebugContext()), V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
                lowered.run(*given)
                lowered.init_wrapper_code()
                lowered._update_scheduler()
                nodes = [
                    one for one in lowered.scheduler.nodes if not isinstance(one, scheduler.NopKernelSchedulerNode)
                ]
                return sum(map(_of_node, nodes), Count())


def _on_gpu(one: Any) -> Any:
    """Move a device, or a tensor without numbers, to a GPU."""
    if isinstance(one, FakeTensor):
        meta = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=NOWHERE)
        return FakeTensor(one.fake_mode, meta, torch.device("cuda", 0))
    return torch.device("cuda", 0) if isinstance(one, torch.device) else one


def _of_node(node: Any) -> Count:
    """Return a kernel of Inductor's; what it leaves to torch is a product, or moves what it reads and writes, too."""
    from torch._inductor.ir import MultiOutput

    if isinstance(node.node, MultiOutput):
        return Count()  # a name for a part of what a kernel returned
    name = str(getattr(node.node, "python_kernel_name", "")) if node.is_extern() else ""
    is_product = any(part in name for part in _PRODUCTS)
    return Count(kernels=1, elementwise_bytes=0 if is_product else node.get_read_write_buffers_sizes())


@contextmanager
def _as_if_there_were_a_gpu() -> Iterator[None]:
    """Answer what Inductor asks of a GPU and of Triton before it writes code for them."""
    from torch._inductor import scheduler

    with (
        mock.patch.object(DeviceProperties, "create", lambda _: _HOPPER),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: _HOPPER),
        mock.patch.object(scheduler, "has_triton", lambda *_: True),
    ):
        yield


def run() -> Result:
    """Count every case."""
    plans = {name: plan_of(*case) for name, case in CASES.items()}
    return judge({name: counts(plan) for name, plan in plans.items()}, {n: of_head(one) for n, one in plans.items()})


def judge(found: Mapping[str, tuple[Count, Count]], heads: Mapping[str, Memory]) -> Result:
    """The case with the largest share left must meet both bars."""
    extras: dict[str, Extra] = {}
    shares, traffic = list[float](), list[float]()
    for name, (before, after) in found.items():
        shares.append(after.kernels / before.kernels)
        traffic.append(after.elementwise_bytes / before.elementwise_bytes)
        extras |= {f"{name}_kernels": f"{before.kernels} -> {after.kernels}", f"{name}_traffic": round(traffic[-1], 3)}
        extras[f"{name}_gib"] = f"{before.elementwise_bytes / 2**30:.2f} -> {after.elementwise_bytes / 2**30:.2f}"
    for name, memory in heads.items():
        extras[f"{name}_head_gib"] = round(memory.peak_bytes / 2**30, 2)
        extras[f"{name}_largest_fp32_million"] = round(memory.largest_fp32 / 1e6, 1)
    return Result(
        name="kernel_counts",
        value=round(max(shares), 3),
        unit="of the interpreter's kernels",
        bar=BAR,
        holds=max(shares) <= BAR and max(traffic) <= BAR_TRAFFIC,
        extras={**extras, "most_traffic": round(max(traffic), 3), "traffic_bar": BAR_TRAFFIC},
    )
