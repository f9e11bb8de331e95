"""Rules about Strategies: what an atom may cut in an operation. The solver deletes what they refuse before it solves.

Those of the axes say what the outer search means by an axis: dp cuts the batch, cp the sequence, ep the experts, and tp
weights. Which dim of its weights an operation cuts over tp, and what runs cut in between, is solved. Those of an engine
say what it cannot run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autoshard.graph.block import Block
from autoshard.graph.op import Dims, Op
from autoshard.layout.legal import op_dims
from autoshard.plan.candidate import CpKind, Fold
from autoshard.plan.rules.columns import Engine
from autoshard.plan.rules.rule import Rejection

DATA, TP = ("edp", "ep"), ("kv", "rep")
SHARED: Dims = ("kv_heads", "ffn", "vocab")  # weights along these are many, and what is computed with them independent
_OUTER = "derived: what the outer search chooses sizes of; every other use of these ranks is another axis"
_LAYERS = "aws-neuron/neuronx-distributed parallel_layers/layers.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomCut:
    """Where one atom cuts in one operation: along a dim, or nowhere.

    ``dims`` are all that the operation has, ``matrix`` those of the weights with more than one dim that it reads.
    """

    op: str
    dims: Dims
    matrix: Dims
    atom: str
    dim: str | None

    @classmethod
    def of(cls, block: Block, op: Op, atom: str, dim: str | None) -> "AtomCut":
        """Read off a block what the Rules ask about an operation."""
        weights = [block.tensors[name] for name in op.inputs if block.tensors[name].role == "parameter"]
        whole = op.kind.whole_dims()
        # What a norm over several dims needs whole is no matrix; no axis is there for tokens that must not be cut.
        matrix = tuple(dim for one in weights if len(one.dims) > 1 for dim in one.dims if dim not in whole)
        dims = tuple(dim for dim in op_dims(block, op) if dim not in ("batch", "seq") or dim not in whole)
        return cls(op=op.name, dims=dims, matrix=matrix, atom=atom, dim=dim)

    @property
    def shares_weights(self) -> bool:
        """Whether the operation has weights that tp is there for."""
        return any(dim in SHARED or dim.startswith("ffn_") for dim in self.matrix)  # widths that no card has

    def __str__(self) -> str:
        return f"{self.op} cuts {self.dim} over {self.atom}" if self.dim else f"{self.op} is not cut over {self.atom}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRule:
    """A Rule whose subject is a Strategy, made of a predicate over one of its cuts by ``strategy_rule``.

    One that says what an axis is for gives way to a layout that the user pins; what an engine cannot run does not.
    """

    id: str
    allows: Callable[[AtomCut], bool]
    remedy: str
    source: str
    yields_to_pins: bool

    def rejection(self, cut: AtomCut) -> Rejection | None:
        """Judge one cut."""
        if self.allows(cut):
            return None
        return Rejection(rule_id=self.id, message=f"{cut}: {self.remedy}", source=self.source)


def strategy_rule(
    *, remedy: str, source: str, atoms: tuple[str, ...] = TP, rule_id: str = "", yields_to_pins: bool = True
) -> Callable[[Callable[[AtomCut], bool]], StrategyRule]:
    """Make a Rule of a predicate about the cuts of some atoms; cuts of others it allows. Its name is the Rule's id."""
    return lambda allows: StrategyRule(
        id=rule_id or allows.__name__.replace("_", "-"),
        allows=lambda cut: cut.atom not in atoms or allows(cut),
        remedy=remedy,
        source=source,
        yields_to_pins=yields_to_pins,
    )


_nxd_rule = partial(strategy_rule, yields_to_pins=False)


def strategy_rules(
    engine: Engine, *, sequence_parallel: bool, cp_kind: CpKind = "ring", fold: Fold | None = None
) -> tuple[StrategyRule, ...]:
    """Return the Rules under which the Strategies of a plan are searched."""
    sp = with_sp if sequence_parallel else without_sp
    router = (nxd_router,) if engine == "nxd" and sequence_parallel else ()
    folded = () if fold is None else (_folded(fold),)
    along_cp = cp_sequence if cp_kind == "ring" else cp_heads
    return (dp_batch, along_cp, *TP_RULES, sp, *folded, *engine_rules(engine), *router)


def engine_rules(engine: Engine) -> tuple[StrategyRule, ...]:
    """Return what an engine cannot run, whoever chose it."""
    return NXD_RULES if engine == "nxd" else ()  # the torch engine executes every legal Strategy as listed


@strategy_rule(atoms=DATA, remedy="dp cuts the batch, ep the experts, wherever there are any", source=_OUTER)
def dp_batch(cut: AtomCut) -> bool:
    experts = ("experts", "slots") if cut.atom == "ep" else ("slots",)
    return cut.dim == _first(cut.dims, ("batch",) if "batch" in cut.dims else experts)


@strategy_rule(atoms=("cp",), remedy="cp cuts the sequence, wherever there is one", source=_OUTER)
def cp_sequence(cut: AtomCut) -> bool:
    return cut.dim == _first(cut.dims, ("seq", "slots")) or _holds_experts(cut)


@strategy_rule(
    atoms=("cp",),
    remedy="with cp_kind=all_to_all cp cuts the heads of attention, and the sequence everywhere else. Use cp_kind=ring",
    source="Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509)",
)
def cp_heads(cut: AtomCut) -> bool:
    attends = "kv_seq" in cut.dims and "kv_heads" in cut.dims
    return cut.dim == ("kv_heads" if attends else _first(cut.dims, ("seq", "slots"))) or _holds_experts(cut)


def _folded(fold: Fold) -> StrategyRule:
    """Return the Rule of a pinned fold: which axes beside ep cut experts in what is computed for their slots."""
    atoms = {atom for axis in fold.split(".") for atom in {"tp": TP, "cp": ("cp",)}.get(axis, ())}

    @strategy_rule(rule_id="fold", atoms=("cp", *TP), remedy=f"pinned is fold={fold}", source=_OUTER)
    def allows(cut: AtomCut) -> bool:
        of_slots = {"experts", "slots"} <= {*cut.dims} and "seq" not in cut.dims
        return not of_slots or (cut.dim == "experts") == (cut.atom in atoms)

    return allows


def _holds_experts(cut: AtomCut) -> bool:
    """Whether ranks of an axis hold other experts each, in what is computed for their slots."""
    return cut.dim == "experts" and "slots" in cut.dims and "seq" not in cut.dims


def _first(dims: Dims, wanted: Dims) -> str | None:
    return next((dim for dim in wanted if dim in dims), None)


@strategy_rule(
    remedy="tp cuts tokens only along the sequence, and only where no heads, ffn or vocabulary of weights could be "
    "cut; for anything else use dp, cp or ep",
    source=_OUTER,
)
def tp_tokens(cut: AtomCut) -> bool:
    if _holds_experts(cut):
        return True
    return cut.dim not in ("batch", "seq", "slots", "experts") or (cut.dim == "seq" and not cut.shares_weights)


@strategy_rule(
    remedy="between products the hidden state is whole, or cut along its tokens",
    source="derived: norms need all of it; boundary=[batch/dp, seq/cp.tp, hidden]",
)
def tp_hidden(cut: AtomCut) -> bool:
    return cut.dim != "hidden" or cut.shares_weights


@strategy_rule(
    remedy="tp cuts every matrix that has heads, ffn or vocabulary along some dim; only rep leaves the weights of "
    "keys and values whole",
    source=_OUTER,
)
def tp_weights(cut: AtomCut) -> bool:
    copies = cut.atom == "rep" and "kv_heads" in cut.matrix and "q_group" not in cut.matrix
    return cut.dim is not None or copies or not cut.shares_weights


@strategy_rule(
    remedy="a table of tokens is cut along its vocabulary, so that embedding and unembedding can share it",
    source=f"{_LAYERS} ParallelEmbedding; Megatron-LM tensor_parallel/layers.py VocabParallelEmbedding",
)
def tp_vocabulary(cut: AtomCut) -> bool:
    return "vocab" not in cut.matrix or cut.dim == "vocab"


@strategy_rule(
    rule_id="sp",
    remedy="with sp=true tp cuts the tokens between products. Use sp=false",
    source="Korthikanti et al. 2022, Reducing Activation Recomputation: what is saved there shrinks by tp",
)
def with_sp(cut: AtomCut) -> bool:
    between = {"seq", "hidden"} <= set(cut.dims) <= {"batch", "seq", "hidden"} and not cut.matrix
    return cut.dim is not None or not between


@strategy_rule(rule_id="sp", remedy="with sp=false tp does not cut the sequence. Use sp=true", source=_OUTER)
def without_sp(cut: AtomCut) -> bool:
    return cut.dim != "seq"


@_nxd_rule(
    remedy="with sp=true each rank of tp routes its own tokens, and gathers the logits",
    source="aws-neuron/neuronx-distributed modules/moe/routing.py: gathered tokens stay so, where others gather again",
)
def nxd_router(cut: AtomCut) -> bool:
    routes = "experts" in cut.matrix and "seq" in cut.dims
    return cut.dim == "seq" or not routes


@_nxd_rule(
    remedy="NxD cuts the sequence over tp in norms, residual additions and routers only; leave it whole over tp",
    source=f"{_LAYERS} and modules/moe: sequence_parallel_enabled",
)
def nxd_sequence(cut: AtomCut) -> bool:
    return cut.dim != "seq" or not {"kv_heads", "ffn", "vocab", "slots", "choices"}.intersection(cut.dims)


@_nxd_rule(
    remedy="NxD's layers cut weights over tp along heads, ffn or vocabulary",
    source=f"{_LAYERS}, modules/qkv_linear.py: ColumnParallelLinear, RowParallelLinear",
)
def nxd_weights(cut: AtomCut) -> bool:
    return cut.dim != "positions" and (cut.dim not in ("hidden", "head_dim") or not cut.shares_weights)


@_nxd_rule(
    remedy="NxD's layer of experts cuts each expert over tp: a rank of tp has a part of all",
    source="aws-neuron/neuronx-distributed modules/moe/moe_parallel_layers.py: ExpertFusedColumnParallelLinear",
)
def nxd_experts(cut: AtomCut) -> bool:
    return cut.dim != "experts" or "slots" not in cut.dims


@_nxd_rule(
    remedy="NxD's attention has whole KV heads: kv cuts their number, rep the queries of each, and no keys",
    source="aws-neuron/neuronx-distributed modules/qkv_linear.py: kv_size_multiplier repeats heads until tp divides",
)
def nxd_heads(cut: AtomCut) -> bool:
    by_rep = "q_group" if "q_group" in cut.dims else None
    return "kv_heads" not in cut.dims or cut.dim == ("kv_heads" if cut.atom == "kv" else by_rep)


@_nxd_rule(
    remedy="NxD's loss leaves logits cut along the vocabulary, and gives every rank of tp the loss of all tokens",
    source="aws-neuron/neuronx-distributed parallel_layers/loss_functions.py: what parallel_cross_entropy all-reduces",
)
def nxd_loss(cut: AtomCut) -> bool:
    if "vocab" in cut.dims:
        return cut.dim == "vocab"
    return cut.dim != "seq" or not set(cut.dims) <= {"batch", "seq"}


DATA_RULES = (dp_batch, cp_sequence)
TP_RULES = (tp_tokens, tp_hidden, tp_weights, tp_vocabulary)
NXD_RULES = (nxd_sequence, nxd_weights, nxd_experts, nxd_heads, nxd_loss)
