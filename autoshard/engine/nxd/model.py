"""The decoder with NxD's layers in it, and this rank's part of its weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autoshard.engine.decoder.leaves import Lookup
from autoshard.engine.decoder.model import TOKEN_LOSS, Block, Decoder, Layer
from autoshard.engine.nxd.layers import (
    Columns,
    CoreAttend,
    FlashAttend,
    Gated,
    InOrder,
    Mixture,
    Places,
    Recomputed,
    RingAttend,
    Rows,
    Together,
    TokenLosses,
)
from autoshard.engine.nxd.library import groups, named
from autoshard.engine.nxd.lowering import Lowering
from autoshard.engine.nxd.shards import TpRank, local_of, local_shape
from autoshard.engine.nxd.stages import FirstStage, LastStage, MiddleStage, NxdDecoder
from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.nxd.form import Argument, Form, FormParameter
from autoshard.plan.nxd.forms import setting_of
from autoshard.plan.plan import Plan
from autoshard.plan.tables import step_of

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Kernels = Mapping[str, Any]  # functions by the names of those of NxD
_RING = "nki_ring_attn_func"
_PARTS = {"router": "RouterTopK", "expert_mlps": "ExpertMLPs"}  # of a layer of experts
# Where the whole model lies until NxD has taken this rank's stages: on a host, layers would draw whole weights first.
_NOWHERE = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Placed:
    """What a parameter of the model holds: of which block (``layer.3``), and which parts of our weights."""

    instance: str
    holds: FormParameter

    @property
    def kind(self) -> str:
        """Of which kind the block is."""
        return self.instance.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The model of one rank, and what each of its parameters holds, by name."""

    model: NxdDecoder
    placed: Mapping[str, Placed]
    rank: TpRank
    sizes: Mapping[str, int]
    whole: Mapping[str, int]  # the same without padding

    def fill(self, parameters: Iterable[tuple[str, nn.Parameter]], whole: Callable[[str], Array]) -> None:
        """Give parameters this rank's part of whole weights: what NxD draws differs between copies of keys."""
        for name, parameter in parameters:
            placed = self.placed[name]
            arrays = {piece.tensor: whole(f"{placed.instance}.{piece.tensor}") for piece in placed.holds.pieces}
            array = local_of(placed.holds, self.rank, self.sizes, arrays)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def mark(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Say of parameters what NxD's reductions and its norm ask; its own layers forget to, or lose it."""
        for name, parameter in parameters:
            holds = self.placed[name].holds
            for mark, value in _marks(holds, self.rank).items():
                setattr(parameter, mark, value)


def build_model(plan: Plan, lowering: Lowering, kernels: Kernels) -> Built:
    """Build the model with this rank's share of every layer; NxD's groups must stand.

    ``kernels`` take the place of NxD's where those cannot run, by their names.
    """
    making = _Making(plan, lowering, kernels)
    with _NOWHERE:
        plain = Decoder(plan.model, dtype=making.dtype)
    places = places_of(plan)
    making.replace(plain.embed, "embed", "embed.0")
    making.replace(plain.head, "head", "head.0")
    layers: list[MiddleStage] = []
    runs = [again.runs for again in lowering.recompute for _ in range(again.num_layers)]
    for number, (layer, again) in enumerate(zip(plain.layers, runs, strict=True)):
        assert isinstance(layer, Layer)
        making.replace(layer, "layer", f"layer.{number}")
        layer.join(["attend"], making.attention(layer))
        layers.append(MiddleStage(_recomputing(layer, again), plan.model, places))
    head = LastStage(plain.head, lowering.loss_scale)
    model = NxdDecoder(FirstStage(plain.embed, places), layers, head)
    if plan.model.tied_embeddings:
        tie(model)
    placed = {name: making.placed[id(parameter)] for name, parameter in model.named_parameters()}
    whole = step_of(plan).sizes(plan.micro_batch)
    return Built(model=model, placed=placed, rank=making.rank, sizes=making.sizes, whole=whole)


def places_of(plan: Plan) -> range:
    """Return which positions of every sequence are this rank's: over cp, NxD cuts it into pieces in a row."""
    length = plan.workload.seq_len // plan.mesh.size("cp")
    first = length * groups().get_context_model_parallel_rank()
    return range(first, first + length)


def tie(model: NxdDecoder) -> None:
    """Let the head use the weights of the embedding; NxD forgets that when it gives modules their memory."""
    _weighted(model.head.block.unembed).weight = _weighted(model.embed.block.embed).weight


class _Making:
    """A model while it is made: what its parameters hold, by identity."""

    def __init__(self, plan: Plan, lowering: Lowering, kernels: Kernels) -> None:
        self.rank = TpRank.of(plan.mesh, groups().get_tensor_model_parallel_rank())
        self.sizes, self._kernels = setting_of(plan).sizes, kernels
        self.dtype = DTYPES[plan.workload.precision.weights]
        self.placed: dict[int, Placed] = {}
        self._plan, self._lowering = plan, lowering

    def replace(self, block: Block, kind: str, instance: str) -> None:
        """Put the layers of the forms in the place of a block's leaves."""
        for form in self._lowering.forms[kind]:
            module = self._module(form, block, instance)
            if form.layer == "parallel_cross_entropy":
                block.join(TOKEN_LOSS, module)
            else:
                block.join(form.leaves, module)

    def attention(self, layer: Layer) -> nn.Module:
        """Return the plan's attention; on a CPU, which has no kernels, the decoder's own, which computes the same."""
        kind, on_cpu = self._lowering.attention, named("cpu_mode")()
        if kind == "core":
            return CoreAttend()
        if kind == "ring":
            kernel = self._kernels.get(_RING) or named(_RING)
            message = "NxD's ring attention is a kernel for NeuronCores, and there are none here. Use cp=1"
            require((not on_cpu or _RING in self._kernels, "cp", message))
            return RingAttend(kernel, dist.get_rank(), groups().get_context_model_parallel_src_tgt_pairs())
        if on_cpu:
            return layer.attend
        return FlashAttend(named("nki_flash_attn_func"), self._plan.cluster.lnc or 1)

    def _module(self, form: Form, block: Block, instance: str) -> nn.Module:
        first = self._lowering.sequence_first
        if form.layer == "leaf":
            return self._leaf(form, block.get_submodule(form.leaves[0]), instance)
        if form.layer == "parallel_cross_entropy":
            size = self.sizes["vocab"] // self.rank.size(("kv", "rep"))
            return TokenLosses(named(form.layer), self.rank.index * size, self._plan.model.vocab)
        given = _arguments(form.arguments)
        if form.layer == "MoE":
            parts = {part: named(_PARTS[part])(device=_NOWHERE, **given[part]) for part in _PARTS}
            layer = named(form.layer)(**{**given, **parts})
            self._place(layer, form, instance)
            return Mixture(layer)
        layer = named(form.layer)(device=_NOWHERE, **given)
        self._place(layer, form, instance)
        if form.layer == "ParallelEmbedding":
            return layer
        pieces = [piece for parameter in form.parameters for piece in parameter.pieces]
        if form.layer == "RowParallelLinear":
            return Rows(layer, len(pieces[0].axes[-1]), sequence_first=first)
        made = [
            tuple(self.sizes[dim] // self.rank.size(piece.cuts.get(dim, ())) for dim in piece.axes[0])
            for piece in pieces
        ]
        return Columns(layer, made, sequence_first=first)

    def _leaf(self, form: Form, leaf: nn.Module, instance: str) -> nn.Module:
        for parameter in form.parameters:
            shape = local_shape(parameter, self.rank, self.sizes)
            setattr(leaf, parameter.name, nn.Parameter(torch.empty(shape, dtype=self.dtype, device=_NOWHERE)))
        self._place(leaf, form, instance)
        if isinstance(leaf, Lookup) and self._lowering.sequence_first and form.parameters[0].summed:
            return Places(leaf, self.rank.index, self.rank.size(("kv", "rep")))
        return leaf

    def _place(self, module: nn.Module, form: Form, instance: str) -> None:
        for parameter in form.parameters:
            self.placed[id(module.get_parameter(parameter.name))] = Placed(instance, parameter)


def _recomputing(layer: Layer, again: tuple[tuple[str, ...], ...]) -> nn.Module:
    """Mark what a layer computes again for backward."""
    if again == (("",),):
        return Recomputed(layer)
    for run in again:
        if len(run) == 1:
            setattr(layer, run[0], Recomputed(layer.get_submodule(run[0])))
            continue
        mixture = next((one for one in layer.children() if isinstance(one, Mixture)), None)
        if mixture:
            mixture.recompute()
            continue
        alone = run == ("act", "product")
        gated = Gated(layer.act, layer.product, gate_first=alone)
        here = [name for name in ("up_gate", "up", "gate") if name in dict(layer.named_children())]
        products = Together(*(layer.get_submodule(name) for name in here))
        layer.join(run, Recomputed(gated if alone else InOrder(products, gated, layer.down)))
    return layer


def _weighted(module: nn.Module) -> Any:
    """Return what holds the weight: the layer of NxD, or the leaf."""
    return getattr(module, "layer", module)


def _arguments(given: Mapping[str, Argument]) -> dict[str, Any]:
    return {name: _argument(name, value) for name, value in given.items()}


def _argument(name: str, value: Argument) -> Any:
    if isinstance(value, Mapping):
        return _arguments(value)
    if name in ("dtype", "reduce_dtype"):
        return DTYPES[str(value)]
    return list(value) if isinstance(value, tuple) else value


def _marks(holds: FormParameter, rank: TpRank) -> Mapping[str, object]:
    """Return the attributes of a parameter, those that a layer has set itself once more."""
    found: dict[str, object] = {"sequence_parallel_enabled": holds.summed}
    if holds.split is not None:
        found |= {"tensor_model_parallel": True, "partition_dim": holds.split}
        found |= {"partition_stride": len(holds.pieces), "num_partitions": rank.size(("kv", "rep"))}
    if holds.copies > 1:
        found["shared"] = rank.coordinate(("rep",)) > 0  # counted in the norm by the first of those that hold it
    return found
