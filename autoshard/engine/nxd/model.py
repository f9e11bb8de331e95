"""The model of one rank: the blocks of the plan's graph with NxD's layers in them, and its part of the weights.

Between its layers NxD keeps [seq, batch, hidden] where the sequence is cut over tp, else [batch, seq, hidden]. Inside
attention, MLP and loss the graph's order holds: batch, seq, then the dims of the operation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional

from autoshard.engine.nxd import blocks
from autoshard.engine.nxd.blocks import BlockModule, ModuleStep, NxdDecoder
from autoshard.engine.nxd.library import groups, named, ring_kernel
from autoshard.engine.nxd.lowering import NxdLowering
from autoshard.engine.nxd.shards import TpRank, local_of, local_patches
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend, Rotary
from autoshard.graph.kinds.indexing import Lookup
from autoshard.graph.op import Array
from autoshard.plan.nxd.forms import form_sizes
from autoshard.plan.nxd.match import TP, Argument, Form, FormParameter
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, step_graph_of

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Where the whole model lies until NxD has taken this rank's stages: on a host, layers would draw whole weights first.
_NOWHERE = torch.device("meta")


class Adapted(nn.Module):
    """A layer of NxD, with what brings a tensor into its form, and what brings its result into ours."""

    def __init__(self, layer: Any, into: Callable[[Tensor], Tensor], back: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = layer
        self._into, self._back = into, back

    def forward(self, x: Tensor) -> Any:
        """Apply NxD's layer to the input in its form; return the result in ours."""
        return self._back(self.layer(self._into(x)))


def _as_it_is(x: Any) -> Any:
    return x


def _column_products(shapes: Sequence[tuple[int, ...]], sequence_first: bool, product: Any) -> Any:
    """Return the products of a layer, one tensor for each weight: batch, seq, and then its shape."""
    products: Sequence[Tensor] = product if isinstance(product, tuple) else (product,)
    for tensor in products:
        if tensor.requires_grad:
            tensor.register_hook(torch.Tensor.contiguous)  # NxD's products ask that of gradients on a CPU
    parts = products if isinstance(product, tuple) else product.chunk(len(shapes), dim=-1)
    ordered = [part.transpose(0, 1) if sequence_first else part for part in parts]
    shaped = [part.unflatten(-1, shape) for part, shape in zip(ordered, shapes, strict=True)]
    return tuple(shaped) if len(shaped) > 1 else shaped[0]


def _flattened(num_read: int, sequence_first: bool, x: Tensor) -> Tensor:
    """Join the dims that a product sums over."""
    flat = x.flatten(-num_read) if num_read > 1 else x
    return flat.transpose(0, 1).contiguous() if sequence_first else flat


class TokenLosses(nn.Module):
    """The loss of every token of a cut vocabulary; logits of padding count as very small."""

    def __init__(self, loss: Any, first: int, vocab: int) -> None:
        super().__init__()
        self._loss, self._first, self._vocab = loss, first, vocab

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return [batch, seq]; NxD works in place, on logits in FP32 without gaps in memory."""
        wide = blocks.at_least_fp32(logits).contiguous()
        entries = torch.arange(logits.shape[-1], device=logits.device) + self._first
        if self._first + logits.shape[-1] > self._vocab:
            wide = wide.masked_fill(entries >= self._vocab, torch.finfo(wide.dtype).min / 2)
        elif wide is logits:
            wide = logits.clone()
        return self._loss(wide, labels)


class Recomputed(nn.Module):
    """Marks a module whose result is computed again for backward: NxD wraps every module of this class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """Apply the module."""
        return self.module(*inputs)


def flash_attend(kernel: Any, lnc: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend in NxD's kernel, in the layout that is its default: [batch, head, head_dim, seq].

    Over the cores of a logical one it shares whole heads, ``heads // lnc`` for each, and what is left over is never
    computed. Without sharing (``lnc`` 1) its grid has all heads.
    """
    cores = 1 if query.shape[2] * query.shape[3] % lnc else lnc
    turned = (rearrange(x, "batch head seq head_dim -> batch head head_dim seq") for x in _by_head(query, key, value))
    return _as_queries(kernel(*turned, cores, mixed_precision=_in_bf16(query)), query)


def ring_attend(
    kernel: Any, rank: int, ring: Sequence[Sequence[int]], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attend with a part of every sequence in NxD's kernel, which passes keys and values around a ring of ranks.

    It finds from the number of this rank which part is its own. Its layout is [batch, head, seq, head_dim].
    """
    heads = _by_head(query, key, value)
    return _as_queries(kernel(*heads, rank, ring, mixed_precision=_in_bf16(query)), query)


def _by_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Give every query head a key and a value, as the kernels' grids ask: [batch, head, seq, head_dim]."""
    shared, q_group = "batch seq kv_heads head_dim -> batch (kv_heads q_group) seq head_dim", query.shape[3]
    heads = rearrange(query, "batch seq kv_heads q_group head_dim -> batch (kv_heads q_group) seq head_dim")
    return heads, *(repeat(x, shared, q_group=q_group) for x in (key, value))


def _in_bf16(query: Tensor) -> bool:
    """Say whether a kernel may multiply in BF16, which it does by default, FP32 included."""
    return query.dtype != torch.float32


def _as_queries(mixed: Tensor, query: Tensor) -> Tensor:
    """Return the result of a kernel, [batch, head, seq, head_dim], with the dims of the queries."""
    in_groups = "batch (kv_heads q_group) seq head_dim -> batch seq kv_heads q_group head_dim"
    return rearrange(mixed, in_groups, q_group=query.shape[3])


@dataclass(frozen=True, slots=True)
class ParameterContents:
    """What a parameter of the model holds: of which block (``layer.3``), and which parts of our weights."""

    instance: str
    holds: FormParameter


class NxdModel:
    """The model of one rank, and what each of its parameters holds, by name; NxD's groups must stand.

    ``whole`` are sizes without padding; ``positions`` are those of every sequence that are this rank's: over cp, NxD
    cuts it into pieces in a row.
    """

    def __init__(self, plan: Plan, lowering: NxdLowering) -> None:
        """Make every layer with this rank's share."""
        self.rank = TpRank.of(plan.mesh, groups().get_tensor_model_parallel_rank())
        self.sizes, self.whole = form_sizes(plan), step_graph_of(plan).sizes(plan.micro_batch)
        length = plan.workload.seq_len // plan.mesh.size("cp")
        first = length * groups().get_context_model_parallel_rank()
        self.positions = range(first, first + length)
        self._plan, self._lowering = plan, lowering
        self._holds: dict[int, ParameterContents] = {}  # by identity
        parts = plan_blocks(plan)
        kind = next((op.kind for op in parts["layer"].ops if isinstance(op.kind, Rotary)), None)
        self.rotary = blocks.RotaryTable(kind, plan.model.head_dim, self.positions) if kind else None
        runs = [again.runs for again in lowering.recompute for _ in range(again.num_layers)]
        layers = [_recomputing(self._block(parts["layer"], f"layer.{at}"), again) for at, again in enumerate(runs)]
        self.module = NxdDecoder(
            blocks.FirstStage(self._block(parts["embed"], "embed.0"), self.positions),
            [blocks.MiddleStage(layer, self.rotary) for layer in layers],
            blocks.LastStage(self._block(parts["head"], "head.0"), lowering.loss_scale),
        )
        self.tie()
        self.contents = {name: self._holds[id(parameter)] for name, parameter in self.module.named_parameters()}

    def tie(self) -> None:
        """Let the head of a tied model use the weights of the embedding.

        NxD forgets that when it gives modules their memory.
        """
        if self._plan.model.tied_embeddings:
            owner = self.module.embed.block.get_submodule("embed")
            head = self.module.head.block.get_submodule("unembed")
            owner, head = (getattr(module, "layer", module) for module in (owner, head))  # of NxD, or the leaf
            head.weight = owner.weight

    def fill(self, parameters: Iterable[tuple[str, nn.Parameter]], whole: Callable[[str], Array]) -> None:
        """Give parameters this rank's part of whole weights: what NxD draws differs between copies of keys."""
        for name, parameter in parameters:
            contents = self.contents[name]
            arrays = {piece.tensor: whole(f"{contents.instance}.{piece.tensor}") for piece in contents.holds.pieces}
            array = local_of(contents.holds, self.rank, self.sizes, arrays)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def make_tables(self, device: torch.device) -> None:
        """Compute the table of rotary angles before the first step, in the format of the hidden state."""
        if self.rotary:
            self.rotary.made(device, DTYPES[self._plan.workload.precision.weights])

    def mark(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Set the attributes of parameters that NxD's reductions and norm read; its own layers forget or lose some."""
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

    def _block(self, block: Block, instance: str) -> BlockModule:
        """Make the module of a block: layers of NxD for the runs of forms, leaves for all other operations."""
        forms = {form.leaves: form for form in self._lowering.forms[block.kind]}
        steps: list[tuple[ModuleStep, nn.Module]] = []
        for step in blocks.module_steps(block, tuple(forms)):
            form = forms.get(step.ops)
            if form is None or form.layer == "leaf":
                module = inner = self._leaf(block, step, form)
            else:
                module, inner = self._layer(form)
            for parameter in form.parameters if form else ():
                self._holds[id(inner.get_parameter(parameter.name))] = ParameterContents(instance, parameter)
            steps.append((step, module))
        return BlockModule(steps, (block.gives[0],))

    def _layer(self, form: Form) -> tuple[nn.Module, nn.Module]:
        """Return a module that stands for a form, and the layer of NxD in it."""
        if form.layer == "parallel_cross_entropy":
            size = self.sizes["vocab"] // self.rank.size(TP)
            losses = TokenLosses(named(form.layer), self.rank.index * size, self._plan.model.vocab)
            return losses, losses
        arguments = _given(form.arguments)
        if form.layer == "MoE":
            parts = {"router": "RouterTopK", "expert_mlps": "ExpertMLPs"}
            arguments |= {part: named(name)(device=_NOWHERE, **arguments[part]) for part, name in parts.items()}
        else:
            arguments["device"] = _NOWHERE
        layer = named(form.layer)(**arguments)
        first = self._lowering.sequence_first
        pieces = [piece for parameter in form.parameters for piece in parameter.pieces]
        match form.layer:
            case "MoE":
                return Adapted(layer, _as_it_is, itemgetter(0)), layer  # NxD gives a tuple
            case "ParallelEmbedding":
                return layer, layer
            case "RowParallelLinear":
                return Adapted(layer, partial(_flattened, len(pieces[0].axes[-1]), first), _as_it_is), layer
            case _:
                shapes = [
                    tuple(self.sizes[dim] // self.rank.size(piece.cuts.get(dim, ())) for dim in piece.axes[0])
                    for piece in pieces
                ]
                return Adapted(layer, _as_it_is, partial(_column_products, shapes, first)), layer

    def _leaf(self, block: Block, step: ModuleStep, form: Form | None) -> nn.Module:
        op = block.op(step.ops[0])
        dtype, parameters = DTYPES[self._plan.workload.precision.weights], form.parameters if form else ()
        shapes = {
            parameter.name: local_patches(parameter, self.rank, self.sizes, self.sizes)[0] for parameter in parameters
        }
        weights = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device=_NOWHERE)) for name, shape in shapes.items()
        }
        compute = self._attention() if isinstance(op.kind, Attend) else blocks.compute_of(block, op)
        sums_gradient = any(parameter.summed for parameter in parameters)
        if isinstance(op.kind, Lookup) and self._lowering.sequence_first and sums_gradient:
            compute = partial(_rows_of_part, self.rank.index, self.rank.size(TP))
        return blocks.Leaf(compute, weights)

    def _attention(self) -> blocks.Compute:
        """Return the plan's attention; on a CPU, which has no kernels, single operations that compute the same."""
        kind = self._lowering.attention
        if kind == "ring":
            pairs = groups().get_context_model_parallel_src_tgt_pairs()
            return partial(ring_attend, ring_kernel(), dist.get_rank(), pairs)
        if kind == "core" or named("cpu_mode")():
            return blocks.attend
        return partial(flash_attend, named("nki_flash_attn_func"), self._plan.cluster.lnc or 1)


def _rows_of_part(part: int, num_parts: int, positions: Tensor, table: Tensor) -> Tensor:
    """Take the rows of one part of the positions, for a hidden state that begins with the sequence."""
    return functional.embedding(positions.chunk(num_parts)[part], table).unsqueeze(1)


def _recomputing(layer: BlockModule, again: tuple[tuple[str, ...], ...]) -> nn.Module:
    """Mark what a layer computes again for backward; of a mixture, the products of experts and what lies between."""
    if again == (("",),):
        return Recomputed(layer)
    nxd_layers = (module.layer for module in layer.children() if isinstance(module, Adapted))
    mixture = next((layer for layer in nxd_layers if hasattr(layer, "expert_mlps")), None)
    for run in again:
        if mixture and len(run) > 1:
            mixture.expert_mlps.mlp_op = Recomputed(mixture.expert_mlps.mlp_op)
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
