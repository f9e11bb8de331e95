"""What stands in the place of an MLP: a dense one, or experts with a router and what lies beside them."""

from autoshard.graph.builder import BlockBuilder
from autoshard.graph.kinds.choosing import Choose, CorrectionStep
from autoshard.graph.kinds.expert_biases import ChosenBias, ShiftRows
from autoshard.graph.kinds.experts import Combine, Dispatch, Slot, TopK
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.norm import Softmax
from autoshard.graph.kinds.pointwise import Add, ClampedGlu, Multiply, Unary
from autoshard.graph.op import Dims
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

SHARED = "ffn_shared"
_TOKENS: Dims = ("batch", "seq")


def emit_linear(b: BlockBuilder, name: str, x: str, out: Dims, contracted: Dims, *, bias: bool) -> str:
    """A product with a weight, and its bias; ``out`` replaces the ``contracted`` dims of ``x``."""
    batch_dims = tuple(dim for dim in b.tensors[x].dims if dim not in contracted)
    product = b.emit(name, Einsum(dims=(*batch_dims, *out)), x, b.weight(f"{name}.weight", *out, *contracted))
    if not bias:
        return product
    return b.emit(f"{name}_shift", Add(), product, b.weight(f"{name}_shift.bias", *out))


def mlp(b: BlockBuilder, model: ModelSpec, x: str, *, ffn: str = "ffn") -> str:
    """Write the dense MLP down; a function of this name in a file of the user's own takes its place."""
    inner = emit_linear(b, "up", x, (ffn,), ("hidden",), bias=model.mlp_bias)
    if model.gated_mlp:
        gate = emit_linear(b, "gate", x, (ffn,), ("hidden",), bias=model.mlp_bias)
        inner = _gated(b, model, gate, inner)
    else:
        inner = b.emit("act", Unary(function=model.activation), inner)
    result = emit_linear(b, "down", b.deliver_as(inner, "down_in"), ("hidden",), (ffn,), bias=model.mlp_bias)
    return b.deliver_as(result, "mlp_out")


def _gated(b: BlockBuilder, model: ModelSpec, gate: str, up: str, prefix: str = "") -> str:
    if model.glu_limit is not None:
        return b.emit(f"{prefix}act", ClampedGlu(limit=model.glu_limit, slope=model.glu_slope), gate, up)
    active = b.emit(f"{prefix}act", Unary(function=model.activation), gate)
    return b.emit(f"{prefix}product", Multiply(), active, up)


def mixture(b: BlockBuilder, model: ModelSpec, workload: Workload, x: str, *, settles: bool) -> str:
    """Write experts down, and the MLP beside them through which all tokens go."""
    logits = emit_linear(b, "router", x, ("experts",), ("hidden",), bias=model.router_bias)
    share = _shares(b, model, workload, logits)
    routed = _experts(b, model, x, share, settles=settles)
    if model.mlp_bias:
        routed = _with_last_biases(b, workload, routed, share)
    if not model.shared_ffn:
        return b.deliver_as(routed, "mlp_out")
    up = emit_linear(b, "shared_up", x, (SHARED,), ("hidden",), bias=model.mlp_bias)
    gate = emit_linear(b, "shared_gate", x, (SHARED,), ("hidden",), bias=model.mlp_bias)
    inner = b.deliver_as(_gated(b, model, gate, up, "shared_"), "shared_down_in")
    shared = emit_linear(b, "shared_down", inner, ("hidden",), (SHARED,), bias=model.mlp_bias)
    if model.shared_gated:
        logit = b.emit("shared_logit", Einsum(dims=_TOKENS), x, b.weight("shared_logit.weight", "hidden"))
        shared = b.emit("shared_scale", Multiply(), shared, b.emit("shared_share", Unary(function="sigmoid"), logit))
    return b.deliver_as(b.emit("shared_add", Add(), routed, shared), "mlp_out")


def _shares(b: BlockBuilder, model: ModelSpec, workload: Workload, logits: str) -> str:
    """Choose the experts of each token, ``choose.expert``; return the weights of what they make."""
    if model.router is None:
        return b.emit("share", Softmax(over="choices"), b.emit("choose", TopK(), logits))
    step = CorrectionStep(speed=workload.router_bias_speed)
    correction = [b.exact_weight("correction.weight", ("experts",), step)] if model.router.correction else []
    return b.emit("choose", Choose(router=model.router), logits, *correction)


def _experts(b: BlockBuilder, model: ModelSpec, x: str, share: str, *, settles: bool) -> str:
    expert = "choose.expert"
    place = b.emit("queue", Slot(), expert)
    slots = b.deliver_as(b.emit("dispatch", Dispatch(), x, expert, place), "expert_in", settles=settles)
    gate, up = (_shifted(b, model, name, _expert_linear(b, name, slots, "ffn", "hidden")) for name in ("gate", "up"))
    inner = b.deliver_as(_gated(b, model, gate, up), "down_in")
    down = b.deliver_as(_expert_linear(b, "down", inner, "hidden", "ffn"), "expert_out")
    return b.emit("combine", Combine(), down, share, expert, place)


def _expert_linear(b: BlockBuilder, name: str, x: str, out: str, contracted: str) -> str:
    weight = b.weight(f"{name}.weight", "experts", out, contracted)
    return b.emit(name, Einsum(dims=("experts", "slots", out)), x, weight)


def _shifted(b: BlockBuilder, model: ModelSpec, name: str, rows: str) -> str:
    if not model.mlp_bias:
        return rows
    return b.emit(f"{name}_shift", ShiftRows(), rows, b.weight(f"{name}_shift.bias", "experts", "ffn"))


def _with_last_biases(b: BlockBuilder, workload: Workload, routed: str, share: str) -> str:
    """Add to each token the biases that its experts add at their end."""
    places = () if workload.expert_capacity is None else ("queue",)
    bias = b.weight("down_bias.bias", "experts", "hidden")
    mixed = b.emit("down_bias", ChosenBias(), share, "choose.expert", bias, *places)
    return b.emit("routed_add", Add(), routed, mixed)
