"""Rules about Strategies: what an atom may cut in an operation. The solver deletes what they refuse before it solves.

Those of the axes say what the outer search means by an axis: dp cuts the batch, cp the sequence, ep the experts, and tp
weights. Which dim of its weights an operation cuts over tp, and what runs cut in between, is solved. Those of an engine
say what it cannot run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autoshard.graph.block import Block
from autoshard.graph.op import Dims, Op
from autoshard.layout.legal import op_dims
from autoshard.plan.rules.rule import Rejection

DATA, TP = ("edp", "ep"), ("kv", "rep")
SHARED: Dims = ("kv_heads", "ffn", "vocab")  # weights along these are many, and what is computed with them independent
CpKind = Literal["ring", "all_to_all"]
_OUTER = "derived: what the outer search chooses sizes of; every other use of these ranks is another axis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one atom cuts in one operation: along a dim, or nowhere.

    ``dims`` are all that the operation has, ``matrix`` those of the weights with more than one dim that it reads.
    """

    op: str
    dims: Dims
    matrix: Dims
    atom: str
    dim: str | None

    @classmethod
    def of(cls, block: Block, op: Op, atom: str, dim: str | None) -> "Place":
        """Read off a block what the Rules ask about an operation."""
        weights = [block.tensors[name] for name in op.inputs if block.tensors[name].role == "parameter"]
        matrix = tuple(dim for weight in weights if len(weight.dims) > 1 for dim in weight.dims)
        return cls(op=op.name, dims=op_dims(block, op), matrix=matrix, atom=atom, dim=dim)

    @property
    def shares_weights(self) -> bool:
        """Whether the operation has weights that tp is there for."""
        return any(dim in SHARED for dim in self.matrix)

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.op} cuts {self.dim} over {self.atom}" if self.dim else f"{self.op} is not cut over {self.atom}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRule:
    """A Rule whose subject is a Strategy: a predicate over the place of one atom in it.

    One that says what an axis is for gives way to a layout that the user pins; what an engine cannot run does not.
    """

    id: str
    allows: Callable[[Place], bool]
    remedy: str
    source: str
    yields_to_pins: bool = True

    def rejection(self, place: Place) -> Rejection | None:
        """Judge one place."""
        if self.allows(place):
            return None
        return Rejection(rule_id=self.id, message=f"{place}: {self.remedy}", source=self.source)


def strategy_rules(
    engine: Literal["nxd", "torch"], *, sequence_parallel: bool, cp_kind: CpKind = "ring"
) -> tuple[StrategyRule, ...]:
    """Return the Rules under which the Strategies of a plan are searched."""
    sp = WITH_SP if sequence_parallel else WITHOUT_SP
    router = (NXD_ROUTER,) if engine == "nxd" and sequence_parallel else ()
    return (DP_BATCH, CP_SEQUENCE if cp_kind == "ring" else CP_HEADS, *TP_RULES, sp, *engine_rules(engine), *router)


def engine_rules(engine: Literal["nxd", "torch"]) -> tuple[StrategyRule, ...]:
    """Return what an engine cannot run, whoever chose it."""
    return NXD_RULES if engine == "nxd" else ()  # the torch engine executes every legal Strategy as listed


def _dp(place: Place) -> bool:
    if place.atom not in DATA:
        return True
    if "batch" in place.dims:
        return place.dim == "batch"
    return place.dim == _first(place.dims, ("experts", "slots") if place.atom == "ep" else ("slots",))


def _cp(place: Place) -> bool:
    return place.atom != "cp" or place.dim == _first(place.dims, ("seq", "slots"))


def _cp_heads(place: Place) -> bool:
    attends = "kv_seq" in place.dims and "kv_heads" in place.dims
    return place.dim == "kv_heads" if place.atom == "cp" and attends else _cp(place)


def _first(dims: Dims, wanted: Dims) -> str | None:
    return next((dim for dim in wanted if dim in dims), None)


def _tp_tokens(place: Place) -> bool:
    if place.atom not in TP or place.dim not in ("batch", "seq", "slots", "experts"):
        return True
    return place.dim == "seq" and not place.shares_weights


def _tp_hidden(place: Place) -> bool:
    return place.atom not in TP or place.dim != "hidden" or place.shares_weights


def _tp_weights(place: Place) -> bool:
    copies = place.atom == "rep" and "kv_heads" in place.matrix and "q_group" not in place.matrix
    return place.atom not in TP or place.dim is not None or copies or not place.shares_weights


def _tp_vocab(place: Place) -> bool:
    return place.atom not in TP or "vocab" not in place.matrix or place.dim == "vocab"


def _with_sp(place: Place) -> bool:
    """Leave operations between products no choice: what the engines call sequence parallelism."""
    between = {"seq", "hidden"} <= set(place.dims) <= {"batch", "seq", "hidden"} and not place.matrix
    return place.atom not in TP or place.dim is not None or not between


def _without_sp(place: Place) -> bool:
    return place.atom not in TP or place.dim != "seq"


def _nxd_sequence(place: Place) -> bool:
    inner = ("kv_heads", "ffn", "vocab", "slots", "choices")
    return place.atom not in TP or place.dim != "seq" or not any(dim in inner for dim in place.dims)


def _nxd_router(place: Place) -> bool:
    routes = "experts" in place.matrix and "seq" in place.dims
    return place.atom not in TP or place.dim == "seq" or not routes


def _nxd_heads(place: Place) -> bool:
    if place.atom not in TP or "kv_heads" not in place.dims:
        return True
    if place.atom == "kv":
        return place.dim == "kv_heads"
    return place.dim == ("q_group" if "q_group" in place.dims else None)


def _nxd_loss(place: Place) -> bool:
    if place.atom not in TP:
        return True
    if "vocab" in place.dims:
        return place.dim == "vocab"
    return place.dim != "seq" or not set(place.dims) <= {"batch", "seq"}


def _nxd_weights(place: Place) -> bool:
    if place.atom not in TP or place.dim == "positions":
        return place.atom not in TP
    return place.dim not in ("hidden", "head_dim") or not place.shares_weights


DP_BATCH = StrategyRule(
    id="dp-batch", allows=_dp, remedy="dp cuts the batch, ep the experts, wherever there are any", source=_OUTER
)
CP_SEQUENCE = StrategyRule(
    id="cp-sequence", allows=_cp, remedy="cp cuts the sequence, wherever there is one", source=_OUTER
)
CP_HEADS = StrategyRule(
    id="cp-heads",
    allows=_cp_heads,
    remedy="with cp_kind=all_to_all cp cuts the heads of attention, and the sequence everywhere else. Use cp_kind=ring",
    source="Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509)",
)
DATA_RULES = (DP_BATCH, CP_SEQUENCE)
TP_RULES = (
    StrategyRule(
        id="tp-tokens",
        allows=_tp_tokens,
        remedy="tp cuts tokens only along the sequence, and only where no heads, ffn or vocabulary of weights could be "
        "cut; for anything else use dp, cp or ep",
        source=_OUTER,
    ),
    StrategyRule(
        id="tp-hidden",
        allows=_tp_hidden,
        remedy="between products the hidden state is whole, or cut along its tokens",
        source="derived: norms need all of it; boundary=[batch/dp, seq/cp.tp, hidden]",
    ),
    StrategyRule(
        id="tp-weights",
        allows=_tp_weights,
        remedy="tp cuts every matrix that has heads, ffn or vocabulary along some dim; only rep leaves the weights of "
        "keys and values whole",
        source=_OUTER,
    ),
    StrategyRule(
        id="tp-vocabulary",
        allows=_tp_vocab,
        remedy="a table of tokens is cut along its vocabulary, so that embedding and unembedding can share it",
        source="aws-neuron/neuronx-distributed parallel_layers/layers.py ParallelEmbedding; Megatron-LM "
        "tensor_parallel/layers.py VocabParallelEmbedding",
    ),
)
AXIS_RULES = (*DATA_RULES, *TP_RULES)
WITH_SP = StrategyRule(
    id="sp",
    allows=_with_sp,
    remedy="with sp=true tp cuts the tokens between products. Use sp=false",
    source="Korthikanti et al. 2022, Reducing Activation Recomputation: what is saved there shrinks by tp",
)
WITHOUT_SP = StrategyRule(
    id="sp", allows=_without_sp, remedy="with sp=false tp does not cut the sequence. Use sp=true", source=_OUTER
)
NXD_ROUTER = StrategyRule(
    id="nxd-router",
    allows=_nxd_router,
    remedy="with sp=true each rank of tp routes its own tokens, and gathers the logits",
    source="aws-neuron/neuronx-distributed modules/moe/routing.py: one that routes gathered tokens keeps them so, "
    "where every other layer gathers again",
    yields_to_pins=False,
)
NXD_RULES = (
    StrategyRule(
        id="nxd-sequence",
        allows=_nxd_sequence,
        remedy="NxD cuts the sequence over tp in norms, residual additions and routers only; leave it whole over tp",
        source="aws-neuron/neuronx-distributed parallel_layers/layers.py and modules/moe: sequence_parallel_enabled",
        yields_to_pins=False,
    ),
    StrategyRule(
        id="nxd-weights",
        allows=_nxd_weights,
        remedy="NxD's layers cut weights over tp along heads, ffn or vocabulary",
        source="aws-neuron/neuronx-distributed parallel_layers/layers.py, modules/qkv_linear.py: ColumnParallelLinear "
        "gathers its output along the dim that it cuts, RowParallelLinear sums into the hidden state",
        yields_to_pins=False,
    ),
    StrategyRule(
        id="nxd-heads",
        allows=_nxd_heads,
        remedy="NxD's attention has whole KV heads: kv cuts their number, rep the queries of each, and no keys",
        source="aws-neuron/neuronx-distributed modules/qkv_linear.py: kv_size_multiplier repeats heads until tp "
        "divides them",
        yields_to_pins=False,
    ),
    StrategyRule(
        id="nxd-loss",
        allows=_nxd_loss,
        remedy="NxD's loss leaves logits cut along the vocabulary, and gives every rank of tp the loss of all tokens",
        source="aws-neuron/neuronx-distributed parallel_layers/loss_functions.py: parallel_cross_entropy all-reduces "
        "the largest logit, the label's logit and the sum of exponentials of all tokens",
        yields_to_pins=False,
    ),
)
