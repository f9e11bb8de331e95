"""Reads the fields of a ``config.json`` one by one, and collects all faults."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from autoshard.errors import Fault, Faults, InputError, inside, nearest, require
from autoshard.spec.hf.fields import ALIASES, NAMED_FIELDS
from autoshard.spec.record import decode, show_value

T = TypeVar("T")
PACKED = "quantization_config"  # says how files hold weights; in which format they are trained, a plan says
# cited: deepseek-ai/DeepSeek-V3 config.json; transformers takes the same where none is stated
_FP8_BLOCK = (128, 128)
_IN_BF16 = "Save the model in BF16 first"
# By field of ModelSpec or RotaryScaling: the config fields that its check depends on, the most likely cause first.
_BLAMED: Mapping[str, tuple[str, ...]] = {
    **{field.name: (name,) for name, field in NAMED_FIELDS.items()},
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size", "moe_intermediate_size", "hidden_size"),
    "num_heads": ("num_attention_heads", "num_key_value_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim", "qk_rope_head_dim", "partial_rotary_factor", "hidden_size", "num_attention_heads"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "rotary_theta": ("rope_theta", "rope_scaling", "rope_parameters"),
    "query_scalar": ("query_pre_attn_scalar", "attention_multiplier"),
    "rotary_fraction": ("partial_rotary_factor", "rope_scaling", "rope_parameters"),
    "num_experts": ("num_local_experts",),
    "experts_per_token": ("num_experts_per_tok", "num_local_experts"),
    "shared_ffn": ("n_shared_experts", "shared_expert_intermediate_size"),
    "scale": ("routed_scaling_factor",),
    **dict.fromkeys(("groups", "router.groups"), ("n_group", "num_local_experts")),
    **dict.fromkeys(("chosen_groups", "router.chosen_groups"), ("topk_group", "n_group", "num_local_experts")),
    "window": ("sliding_window",),
    "glu_limit": ("swiglu_limit", "hidden_act"),
    "glu_slope": ("swiglu_alpha",),
    "dense_ffn": ("intermediate_size",),
    "low_frequency_factor": ("low_freq_factor", "beta_slow"),
    "high_frequency_factor": ("high_freq_factor", "low_freq_factor", "beta_fast", "beta_slow"),
    "original_positions": ("original_max_position_embeddings",),
    "mscale": ("attention_factor", "mscale"),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rotary_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim", "linear_value_head_dim"),
    "key_heads": ("linear_num_key_heads",),
    "value_heads": ("linear_num_value_heads", "linear_num_key_heads"),
}


class ConfigReader:
    """Reads fields one by one; after a fault it continues with a valid value, so that all faults are found at once.

    A field may have any of the names in its ALIASES; messages use the name in the data.
    """

    def __init__(self, data: Mapping[str, object], defaults: Mapping[str, Any]) -> None:
        self.data, self.defaults = data, defaults
        self.faults = Faults()

    def refuse(self, field: str, message: str) -> None:
        """Report a fault of a field."""
        self.faults.append(Fault(where=field, message=message))

    def check(self, holds: Callable[[], bool], fields: tuple[str, ...], message: str) -> None:
        """Refuse the first of these fields that is present unless the rule holds; skip it if one is faulty already."""
        spelled = [self._spelled(field) for field in fields]
        if not {fault.where for fault in self.faults}.intersection(spelled) and not holds():
            self.refuse(next((field for field in spelled if field in self.data), spelled[0]), message)

    def made(self, build: Callable[[], T]) -> T | None:
        """Build a value; report each fault that its class finds at the config fields that cause it."""
        try:
            return build()
        except InputError as error:
            for fault in error.faults:
                self.check(lambda: False, _BLAMED.get(fault.where, (fault.where,)), fault.message)
        return None

    def only(self, field: str, allowed: tuple[object, ...], reason: str) -> None:
        """Refuse a field that is present with a value that is not allowed."""
        if field in self.data and self.data[field] not in allowed:
            allowed_text = " or ".join(show_value(value) for value in allowed)
            self.refuse(field, f"must be {allowed_text}, not {show_value(self.data[field])}: {reason}")

    def read(self, kind: type[T], name: str) -> T:
        """Read a field of a type; a field without a default must be present."""
        field, harmless = self._spelled(name), cast(T, self.defaults.get(name) or 1)
        if field not in self.data:
            if name not in self.defaults:
                self.refuse(field, "missing, and it has no default")
            return self.defaults.get(name, harmless)
        for alias in ALIASES.get(name, ()):
            if alias in self.data and self.data[alias] != self.data[field]:
                theirs, ours = show_value(self.data[alias]), show_value(self.data[field])
                self.refuse(alias, f"{theirs} contradicts {field}, {ours}")
        with self.faults.of():
            return decode(kind, self.data[field], field)
        return harmless

    def whole(self, name: str, low: int = 1) -> int:
        """Read a whole number."""
        number = self.read(int, name)
        if number < low:
            self.refuse(self._spelled(name), f"must be at least {low}, not {number}")
        return max(number, low)

    def whole_or_null(self, name: str) -> int | None:
        """Read a whole number of at least 1 that may also be null."""
        is_null = self.data.get(self._spelled(name), self.defaults[name]) is None
        return None if is_null else self.whole(name)

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """Read a list of whole numbers that may also be null."""
        with self.faults.of():
            return decode(tuple[int, ...], self.data.get(name) or [], name)
        return ()

    def choice(self, name: str, words: Mapping[str, T]) -> T:
        """Read a word, and return what it means; refuse unknown words."""
        word = self.read(str, name)
        if word not in words:
            self.refuse(self._spelled(name), f"{show_value(word)} is not known. {nearest(word, sorted(words))}")
        return words.get(word, words[self.defaults[name]])

    def _spelled(self, name: str) -> str:
        return next((field for field in (name, *ALIASES.get(name, ())) if field in self.data), name)


def fp8_block(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the rows and columns of an FP8 weight that share a scale; refuse quantization formats that cannot be read.

    >>> fp8_block({}), fp8_block({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}})
    ((128, 128), (64, 32))
    """
    stated = config.get(PACKED)
    if stated is None:
        return _FP8_BLOCK
    with inside(PACKED):
        fields = decode(dict[str, object], stated)
        method, block = fields.get("quant_method"), fields.get("weight_block_size", list[object](_FP8_BLOCK))
        unread = f"weights in {show_value(method)} are not read, only in 'mxfp4' and 'fp8'. {_IN_BF16}"
        require((method in ("mxfp4", "fp8"), "quant_method", unread))
        if method == "mxfp4":
            return _FP8_BLOCK
        kind = fields.get("fmt", "e4m3")
        require((kind == "e4m3", "fmt", f"FP8 of the kind {show_value(kind)} is not read, only 'e4m3'. {_IN_BF16}"))
        sides = cast(list[object], block) if isinstance(block, list) else []
        whole = [side for side in sides if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        message = (
            f"must say how many rows and columns have one scale, not {show_value(cast(object, block))}. {_IN_BF16}"
        )
        require((len(sides) == len(whole) == 2, "weight_block_size", message))
        return whole[0], whole[1]
