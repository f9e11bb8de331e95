"""The model of one rank: the blocks of the plan's graph with NxD's layers in them, and its part of the weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from autoshard.engine.nxd.blocks import (
    BlockModule,
    Compute,
    FirstStage,
    LastStage,
    Leaf,
    MiddleStage,
    ModuleStep,
    NxdDecoder,
    attend,
    compute_of,
    module_steps,
)
from autoshard.engine.nxd.layers import (
    ColumnProducts,
    ExpertsLayer,
    Recomputed,
    RowProduct,
    TokenLosses,
    flash_attend,
    ring_attend,
)
from autoshard.engine.nxd.library import groups, named
from autoshard.engine.nxd.lowering import NxdLowering
from autoshard.engine.nxd.shards import TpRank, local_of, local_shape
from autoshard.errors import require
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend, Rotary
from autoshard.graph.kinds.indexing import Lookup
from autoshard.graph.op import Array
from autoshard.plan.nxd.forms import form_sizes
from autoshard.plan.nxd.match import TP, Argument, Form, FormParameter
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, step_of

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Kernels = Mapping[str, Any]  # functions by the names of those of NxD
_RING = "nki_ring_attn_func"
# Where the whole model lies until NxD has taken this rank's stages: on a host, layers would draw whole weights first.
_NOWHERE = torch.device("meta")


@dataclass(frozen=True, slots=True)
class ParameterContents:
    """What a parameter of the model holds: of which block (``layer.3``), and which parts of our weights."""

    instance: str
    holds: FormParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The model of one rank, and what each of its parameters holds, by name."""

    model: NxdDecoder
    contents: Mapping[str, ParameterContents]
    rank: TpRank
    sizes: Mapping[str, int]
    whole: Mapping[str, int]  # the same without padding

    def fill(self, parameters: Iterable[tuple[str, nn.Parameter]], whole: Callable[[str], Array]) -> None:
        """Give parameters this rank's part of whole weights: what NxD draws differs between copies of keys."""
        for name, parameter in parameters:
            contents = self.contents[name]
            arrays = {piece.tensor: whole(f"{contents.instance}.{piece.tensor}") for piece in contents.holds.pieces}
            array = local_of(contents.holds, self.rank, self.sizes, arrays)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def mark(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Say of parameters what NxD's reductions and its norm ask; its own layers forget to, or lose it."""
        for name, parameter in parameters:
            holds = self.contents[name].holds
            marks: dict[str, object] = {"sequence_parallel_enabled": holds.summed}
            if holds.split is not None:
                marks |= {"tensor_model_parallel": True, "partition_dim": holds.split}
                marks |= {"partition_stride": len(holds.pieces), "num_partitions": self.rank.size(TP)}
            if holds.copies > 1:
                marks["shared"] = self.rank.coordinate(("rep",)) > 0  # the first that holds it counts in the norm
            for mark, value in marks.items():
                setattr(parameter, mark, value)


def build_model(plan: Plan, lowering: NxdLowering, kernels: Kernels) -> Built:
    """Build the model with this rank's share of every layer; NxD's groups must stand.

    ``kernels`` take the place of NxD's where those cannot run, by their names.
    """
    building = _Building(plan, lowering, kernels)
    blocks, positions = plan_blocks(plan), positions_of(plan)
    rotary = next((op.kind for op in blocks["layer"].ops if isinstance(op.kind, Rotary)), None)
    runs = [again.runs for again in lowering.recompute for _ in range(again.num_layers)]
    layers = [
        MiddleStage(
            _recomputing(building.block(blocks["layer"], f"layer.{number}"), again),
            rotary, plan.model.head_dim, positions,
        )
        for number, again in enumerate(runs)
    ]  # fmt: skip
    head = LastStage(building.block(blocks["head"], "head.0"), lowering.loss_scale)
    model = NxdDecoder(FirstStage(building.block(blocks["embed"], "embed.0"), positions), layers, head)
    if plan.model.tied_embeddings:
        tie(model)
    contents = {name: building.contents[id(parameter)] for name, parameter in model.named_parameters()}
    whole = step_of(plan).sizes(plan.micro_batch)
    return Built(model=model, contents=contents, rank=building.rank, sizes=building.sizes, whole=whole)


def positions_of(plan: Plan) -> range:
    """Return which positions of every sequence are this rank's: over cp, NxD cuts it into pieces in a row."""
    length = plan.workload.seq_len // plan.mesh.size("cp")
    first = length * groups().get_context_model_parallel_rank()
    return range(first, first + length)


def tie(model: NxdDecoder) -> None:
    """Let the head use the weights of the embedding; NxD forgets that when it gives modules their memory."""
    tables = [
        block.get_submodule(name) for block, name in ((model.embed.block, "embed"), (model.head.block, "unembed"))
    ]
    owner, other = (getattr(module, "layer", module) for module in tables)  # the layer of NxD, or the leaf
    other.weight = owner.weight


class _Building:
    """The modules of a model while they are made, and what their parameters hold, by identity."""

    def __init__(self, plan: Plan, lowering: NxdLowering, kernels: Kernels) -> None:
        self.rank = TpRank.of(plan.mesh, groups().get_tensor_model_parallel_rank())
        self.sizes, self._kernels = form_sizes(plan), kernels
        self.contents: dict[int, ParameterContents] = {}
        self._plan, self._lowering = plan, lowering

    def block(self, block: Block, instance: str) -> BlockModule:
        """Make the module of a block: layers of NxD for the runs of forms, leaves for all other operations."""
        forms = {form.leaves: form for form in self._lowering.forms[block.kind]}
        steps = module_steps(block, tuple(forms))
        return BlockModule(
            [(step, self._module(block, step, forms.get(step.ops), instance)) for step in steps],
            (block.carry_out or "loss",),
        )

    def _module(self, block: Block, step: ModuleStep, form: Form | None, instance: str) -> nn.Module:
        if form is None or form.layer == "leaf":
            return self._leaf(block, step, form, instance)
        if form.layer == "parallel_cross_entropy":
            size = self.sizes["vocab"] // self.rank.size(TP)
            return TokenLosses(named(form.layer), self.rank.index * size, self._plan.model.vocab)
        given = _given(form.arguments)
        if form.layer == "MoE":
            parts = {"router": "RouterTopK", "expert_mlps": "ExpertMLPs"}
            given |= {part: named(name)(device=_NOWHERE, **given[part]) for part, name in parts.items()}
        else:
            given["device"] = _NOWHERE
        layer = named(form.layer)(**given)
        self._place(layer, form, instance)
        if form.layer == "MoE":
            return ExpertsLayer(layer)
        if form.layer == "ParallelEmbedding":
            return layer
        first = self._lowering.sequence_first
        pieces = [piece for parameter in form.parameters for piece in parameter.pieces]
        if form.layer == "RowParallelLinear":
            return RowProduct(layer, len(pieces[0].axes[-1]), sequence_first=first)
        made = [
            tuple(self.sizes[dim] // self.rank.size(piece.cuts.get(dim, ())) for dim in piece.axes[0])
            for piece in pieces
        ]
        return ColumnProducts(layer, made, sequence_first=first)

    def _leaf(self, block: Block, step: ModuleStep, form: Form | None, instance: str) -> nn.Module:
        op = block.op(step.ops[0])
        dtype, parameters = DTYPES[self._plan.workload.precision.weights], form.parameters if form else ()
        weights = {
            one.name: nn.Parameter(torch.empty(local_shape(one, self.rank, self.sizes), dtype=dtype, device=_NOWHERE))
            for one in parameters
        }
        compute = self._attention() if isinstance(op.kind, Attend) else compute_of(block, op)
        if isinstance(op.kind, Lookup) and self._lowering.sequence_first and any(one.summed for one in parameters):
            compute = partial(_rows_of_part, self.rank.index, self.rank.size(TP))
        leaf = Leaf(compute, weights)
        if form:
            self._place(leaf, form, instance)
        return leaf

    def _attention(self) -> Compute:
        """Return the plan's attention; on a CPU, which has no kernels, single operations that compute the same."""
        kind, on_cpu = self._lowering.attention, named("cpu_mode")()
        if kind == "ring":
            kernel = self._kernels.get(_RING) or named(_RING)
            message = "NxD's ring attention is a kernel for NeuronCores, and there are none here. Use cp=1"
            require((not on_cpu or _RING in self._kernels, "cp", message))
            pairs = groups().get_context_model_parallel_src_tgt_pairs()
            return partial(ring_attend, kernel, dist.get_rank(), pairs)
        if kind == "core" or on_cpu:
            return attend
        return partial(flash_attend, named("nki_flash_attn_func"), self._plan.cluster.lnc or 1)

    def _place(self, module: nn.Module, form: Form, instance: str) -> None:
        for parameter in form.parameters:
            self.contents[id(module.get_parameter(parameter.name))] = ParameterContents(instance, parameter)


def _rows_of_part(part: int, num_parts: int, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Take the rows of one part of the positions, for a hidden state that begins with the sequence."""
    return functional.embedding(positions.chunk(num_parts)[part], table).unsqueeze(1)


def _recomputing(layer: BlockModule, again: tuple[tuple[str, ...], ...]) -> nn.Module:
    """Mark what a layer computes again for backward."""
    if again == (("",),):
        return Recomputed(layer)
    mixture = next((one for one in layer.children() if isinstance(one, ExpertsLayer)), None)
    for run in again:
        if mixture and len(run) > 1:
            mixture.recompute()
        else:
            layer = layer.grouped(run, Recomputed)
    return layer


def _given(arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Return arguments as a layer takes them: types of torch for names of formats, and lists."""
    return {
        name: _given(value) if isinstance(value, Mapping)
        else DTYPES[str(value)] if name in ("dtype", "reduce_dtype")
        else list(value) if isinstance(value, tuple)
        else value
        for name, value in arguments.items()
    }  # fmt: skip
