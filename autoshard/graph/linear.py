"""Linear attention in the place of attention, and the gate behind either."""

from autoshard.graph.builder import BlockBuilder
from autoshard.graph.kinds.delta import CausalConv, Decay, GatedDelta
from autoshard.graph.kinds.norm import Norm
from autoshard.graph.kinds.pointwise import Function, Multiply, ScaleBy, Unary
from autoshard.graph.mlps import emit_linear
from autoshard.graph.op import Dims
from autoshard.spec.model import ModelSpec

_KEYS: Dims = ("delta_heads", "delta_key")
_STATES: Dims = ("delta_heads", "delta_group")
_VALUES: Dims = (*_STATES, "delta_value")


def linear_attention(b: BlockBuilder, model: ModelSpec, x: str) -> str:
    """Write linear attention down; ``x`` is the hidden state behind its norm."""
    linear = model.linear
    assert linear, f"{model.name} has no linear attention"

    def product(name: str, dims: Dims) -> str:
        return emit_linear(b, name, x, dims, ("hidden",), bias=False)

    heads = (("q", _KEYS), ("k", _KEYS), ("v", _VALUES))
    query, key, value = (_convolved(b, model, name, product(name, dims), dims) for name, dims in heads)
    rates = b.weight("forget.rate", *_STATES), b.weight("forget.shift", *_STATES)
    forget = b.emit("forget", Decay(), product("forget_logit", _STATES), *rates)
    move = b.emit("write", Unary(function="sigmoid"), product("write_logit", _STATES))
    if linear.reach != 1:
        move = b.emit("write_scale", ScaleBy(factor=linear.reach), move)
    read = b.emit("delta", GatedDelta(), query, key, value, forget, move)
    norm = Norm(function="rms", over="delta_value", eps=linear.norm_eps or model.norm_eps)
    normed = b.emit("delta_norm", norm, read, b.weight("delta_norm.weight", "delta_value"))
    gated = emit_gated(b, normed, x, _VALUES, function="silu")
    result = emit_linear(b, "o", b.deliver_as(gated, "o_in"), ("hidden",), _VALUES, bias=False)
    return b.deliver_as(result, "attn_out")


def _convolved(b: BlockBuilder, model: ModelSpec, name: str, x: str, channels: Dims) -> str:
    mixed = b.emit(f"{name}_conv", CausalConv(), x, b.weight(f"{name}_conv.weight", *channels, "taps"))
    return b.emit(f"{name}_act", Unary(function=model.activation), mixed)


def emit_gated(b: BlockBuilder, mixed: str, x: str, values: Dims, *, function: Function) -> str:
    """Multiply the result of attention by a function of the hidden state, number by number."""
    gate = b.emit("o_act", Unary(function=function), emit_linear(b, "o_gate", x, values, ("hidden",), bias=False))
    return b.emit("o_product", Multiply(), mixed, gate)
