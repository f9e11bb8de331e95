"""A decoder's own code as the graph of a training step: a block for the embedding, each kind of layer, and the head."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.errors import require
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.builder import BlockBuilder, finish
from autoshard.graph.decoder import emit_loss, update_block
from autoshard.graph.fusing import recompute
from autoshard.graph.kinds.pointwise import Cast, Multiply
from autoshard.modules.blocks import ProgramWriter, named_dims
from autoshard.modules.capture import Captured
from autoshard.modules.decoder.ends import TrainedEnd
from autoshard.modules.decoder.segments import Stack
from autoshard.modules.dims import Dim, factors
from autoshard.modules.fingerprint import hash_of
from autoshard.modules.nodes import Node
from autoshard.modules.program import free_name
from autoshard.modules.training.packing import Packing
from autoshard.modules.training.parts import LOSS_SHARE, TAKEN, CodePart, code_parts
from autoshard.plan.lowering import ENDS
from autoshard.plan.recompute import Recompute
from autoshard.plan.tables import table_name
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import LAYER
from autoshard.spec.workload import Workload

BATCH = "batch"
_CARRIED = (BATCH, "seq", "hidden")
_WORDS = "vocab"
_MATRIX = 2  # dims
_CARDS_OWN = ("kv_seq", "slots", "experts", "choices", "kv_heads", "q_group", "head_dim")  # dims of which engines know
_NO_KERNELS = replace(load_kernels("torch_engine"), kernels=())  # what an operation keeps follows from its gradient


@dataclass(frozen=True, kw_only=True)
class CodeGraph:
    """The step of a decoder's code.

    ``paths`` has the module's paths of all weights, and ``nodes`` the nodes of the exported graph that make all other
    inputs; both by block as ``OpGraph.instances`` names it, and by tensor.
    """

    captured: Captured
    graph: OpGraph
    num_traced: int  # sequences of the example; a graph of one sequence is traced with two
    loss_share: float  # of a micro-batch in the mean loss of a step
    paths: Mapping[str, Mapping[str, str]]
    nodes: Mapping[str, Mapping[str, Node]]

    @property
    def blocks(self) -> Mapping[str, Block]:
        """The kinds of blocks by name, in order."""
        return {block.kind: block for block in self.graph.blocks}

    def shape_of(self, weight: str) -> tuple[int, ...]:
        """Return the shape of a weight, as ``OpGraph.instances`` names it, along the dims of its block."""
        _, _, name = weight.split(".", 2)
        return tuple(self.graph.sizes[dim] for dim in self.graph.block_of(weight).tensors[name].dims)

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """The hash of each kind of block, whatever the number of sequences."""
        sizes = {dim: size for dim, size in self.graph.sizes.items() if dim != BATCH}
        return {kind: hash_of(block, sizes) for kind, block in self.blocks.items()}

    def table_blocks(self, layers: Sequence[Recompute]) -> Mapping[str, Block]:
        """Return the blocks that have a table: all kinds, and layers with what is computed again, by table.

        A layer that computes some of its operations again computes all of them again: the names of operations that a
        plan lists are those of its lines.
        """
        blocks = dict(self.blocks)
        for kind, drop in zip(self.graph.order, layers, strict=True):
            if drop.kind != "none":
                again = table_name(kind, Recompute(kind="full"))
                if again not in blocks:
                    blocks[again] = recompute(self.blocks[kind], _NO_KERNELS, None)
        return blocks


def code_graph(
    captured: Captured, stack: Stack, end: TrainedEnd, workload: Workload, num_sequences: int, *, doubles: bool
) -> CodeGraph:
    """Write a decoder down as the graph of a step on so many sequences, of numbers in double if it ``doubles``."""
    packing = Packing.of(stack, num_sequences, casts=not doubles)
    names, parts = _names(captured, stack, end), list(code_parts(captured, stack, packing))
    if packing and not packing.is_alone:
        names = {**names, packing.carried[1][0]: free_name("rows", {*names.values()})}
    embed, *layers, head = parts
    ties = _ties(parts)
    writer = _GraphWriter(names=names, workload=workload, ties=ties)
    kinds, order = _kinds([writer.layer(part) for part in layers])
    blocks = {"embed": writer.embed(embed), **kinds, "head": writer.head(head, has_loss=end.is_loss)}
    graph = OpGraph(
        sizes={name: dim.size for dim, name in names.items()} | {BATCH: num_sequences},
        blocks=tuple(blocks.values()), order=order, update=update_block(workload, tuple(blocks.values())),
        tied={f"head.{copy}": f"embed.{owner}" for copy, owner in ties.items()},
    )  # fmt: skip
    by_instance = dict(zip((name for name, _ in graph.instances()), parts, strict=True))
    return CodeGraph(
        captured=captured, graph=graph, num_traced=stack.carried[0][0].size,
        loss_share=num_sequences / workload.global_batch,
        paths={name: part.paths for name, part in by_instance.items()},
        nodes={name: part.nodes for name, part in by_instance.items()},
    )  # fmt: skip


def _kinds(layers: Sequence[Block]) -> tuple[Mapping[str, Block], tuple[str, ...]]:
    """Return the kinds of layers, by name, and the kind of every layer; equal ones are of one kind."""
    hashes = [hash_of(block, {}) for block in layers]
    names = {text: f"{LAYER}_{number}" if number > 1 else LAYER for number, text in enumerate(dict.fromkeys(hashes), 1)}
    blocks = {
        names[text]: replace(block, kind=names[text], repeat=hashes.count(text))
        for block, text in zip(layers, hashes, strict=True)
    }
    return blocks, tuple(names[text] for text in hashes)


def _names(captured: Captured, stack: Stack, end: TrainedEnd) -> Mapping[Dim, str]:
    """Name all dims: those that parts hand on, and the words of the head, as cards do; no other as cards do."""
    steps = dict.fromkeys(step for part in stack.parts for step in part.steps)  # layers make some for themselves
    names = dict(named_dims(replace(captured.program, steps=tuple(steps))))
    carried = factors(dim for position in stack.carried for dim in position)
    usual: dict[Dim, str] = dict(zip(carried, _CARRIED, strict=True))
    if not end.data:
        message = "makes logits whose dims cannot be told apart as batch, sequence and vocabulary"
        words = factors(end.logits.positions[-1])
        require((len(words) == 1 and {*end.logits.dims} == {*carried[:2], *words}, "module", message))
        swapped = "makes logits along [sequence, batch, vocabulary]. Transpose what the last product reads"
        require((end.logits.dims == (*carried[:2], *words), end.logits.name, swapped))
        usual[words[0]] = _WORDS
        require((len(usual) == len(_CARRIED) + 1, "module", message))
    for dim, name in names.items():
        if dim not in usual and name in (*_CARRIED, _WORDS, *_CARDS_OWN):
            names[dim] = free_name(f"{name}_dim", {*names.values()})
    return names | usual


def _ties(parts: Sequence[CodePart]) -> Mapping[str, str]:
    """Return the head's weights that are the embedding's, with these; refuse weights that layers share."""
    embed, head = parts[0], parts[-1]
    uses = Counter(path for part in parts for path in part.paths.values())
    by_ends = {*embed.paths.values()} & {*head.paths.values()}
    message = (
        "is used by a layer and elsewhere, and is larger than what goes on from layer to layer. Give each use a weight "
        "of its own, or train by a loop of your own with autoshard.shard"
    )
    require(*((count == 1 or (count == len(ENDS) and path in by_ends), path, message) for path, count in uses.items()))
    owners = {path: name for name, path in embed.paths.items()}
    return {name: owners[path] for name, path in head.paths.items() if path in by_ends}


@dataclass(frozen=True, kw_only=True)
class _GraphWriter:
    """Writes parts into blocks of one workload."""

    names: Mapping[Dim, str]
    workload: Workload
    ties: Mapping[str, str]  # of weights of the head

    def embed(self, part: CodePart) -> Block:
        """Write the embedding, to whose shared weights the head adds its gradient."""
        b, writer = self._written(part)
        ties = {owner: f"head.{copy}.sum" for copy, owner in self.ties.items()}
        return self._finished(b, "embed", writer.written[part.gives], ties)

    def layer(self, part: CodePart) -> Block:
        """Write a layer."""
        b, writer = self._written(part)
        return self._finished(b, LAYER, writer.written[part.gives], {})

    def head(self, part: CodePart, *, has_loss: bool) -> Block:
        """Write the head, and the loss of its logits, or its own: a mean, of which each micro-batch has a share."""
        b, writer = self._written(part)
        result = writer.written[part.gives]
        if has_loss:
            result = result if b.tensors[result].dtype == "fp32" else b.emit("loss_fp32", Cast(dtype="fp32"), result)
            b.emit("loss", Multiply(), result, b.input(LOSS_SHARE, (), "fp32"))
        else:
            emit_loss(b, result)
        return self._finished(b, "head", "loss", dict.fromkeys(self.ties))

    def _written(self, part: CodePart) -> tuple[BlockBuilder, ProgramWriter]:
        b = BlockBuilder(self.workload.precision, self.workload.optimizer)
        values = [value for value in part.program.values if value.origin == "parameter"]
        b.decayed |= {value.name for value in values if len(value.positions) >= _MATRIX}  # a table that is added, too
        b.undecayed |= {value.name for value in values} - b.decayed  # as of cards
        writer = ProgramWriter(part.program, b, self.names)
        writer.write()
        return b, writer

    def _finished(self, b: BlockBuilder, kind: str, gives: str, ties: Mapping[str, str | None]) -> Block:
        takes = (TAKEN,) if TAKEN in b.tensors else ()
        return finish(b, kind, _NO_KERNELS, gives=(gives,), takes=takes, ties=ties)
