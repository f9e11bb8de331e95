"""What a ``model_type`` of ``config.json`` says of a model, and the defaults that all of these share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# How the code of a mixture chooses experts: by logits, and the softmax of these (chosen); by a softmax of all
# (softmax), that may be limited to the groups with the best expert (groups); as DeepSeek-V3 (corrected); or by that
# softmax with a correction that is added for the choice (corrected softmax).
RouterCode = Literal["chosen", "softmax", "groups", "corrected", "corrected softmax"]
# Which layers attend to a window: of some and last layers those from max_window_layers on, if it is used or always.
# If it is used, "turns if used" are layers by turns before max_window_layers.
Window = Literal[
    "none", "all layers", "all layers if used", "some layers", "last layers", "pattern", "by turns", "turns if used"
]
# Which layers turn no queries and keys: those of no_rope_layers, those that attend to all tokens beside a window, or
# all where rope_theta is null.
Unrotated = Literal["none", "listed", "beyond the window", "without theta"]
# Config fields that are true or false, and the fields of ModelSpec that they set.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("qkv_bias", "out_bias"),
    "mlp_bias": ("mlp_bias",),
    "use_parallel_residual": ("parallel_residual",),
    "tie_word_embeddings": ("tied_embeddings",),
    "use_qk_norm": ("qk_norm",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """What the code of one ``model_type`` fixes in ModelSpec, and the defaults of the fields that may be left out.

    Defaults that all types share are in SHARED_DEFAULTS. A field without a default must be stated, or is not read.
    """

    architecture: str
    former: tuple[str, ...] = ()  # other names of the architecture, in files of the hub
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any]
    grouped_heads: bool = True
    window: Window = "none"
    unrotated: Unrotated = "none"
    width: str = "intermediate_size"  # the field with the width of an MLP
    router: RouterCode = "chosen"
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FLAGS)
    equal_heads: bool = False  # whether keys of linear attention are as wide as values
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")  # that are read; its code may have others

    @property
    def rotary_of_windows(self) -> bool:
        """Whether layers that attend to a window have rotary positions of their own."""
        return self.window == "pattern" and self.unrotated == "none"


SHARED_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
