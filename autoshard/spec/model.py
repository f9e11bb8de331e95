"""The architecture numbers of one decoder-only transformer."""

from dataclasses import dataclass
from typing import Literal

from autoshard.errors import require

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# Far above every published model, and low enough that a slip of the keyboard cannot make a plan take days.
# Dims stop where the 32-bit indices of the accelerators' libraries do.
MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000
MAX_DIM = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched for contexts longer than the one first trained on.

    ``linear`` divides all of them by ``factor``. ``llama3`` divides those that turn fewer than
    ``low_frequency_factor`` times in ``original_positions``, keeps those that turn more than
    ``high_frequency_factor`` times, and blends in between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 0

    def __post_init__(self) -> None:
        low, high, blends = self.low_frequency_factor, self.high_frequency_factor, self.kind == "llama3"
        require(
            (self.factor >= 1, "factor", f"must be at least 1, not {self.factor}"),
            (low > 0, "low_frequency_factor", f"must be positive, not {low}"),
            (not blends or high > low, "high_frequency_factor", f"must be above the low one, {low}, not {high}"),
            (
                not blends or self.original_positions >= 1,
                "original_positions",
                f"must be at least 1, not {self.original_positions}",
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model card states: everything that decides parameters, FLOPs and how the model can be cut."""

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    positions: Literal["rotary", "learned"]
    rotary_fraction: float = 1.0
    rotary_theta: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    window: int | None = None
    source: str

    def __post_init__(self) -> None:
        dims = ("hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab", "max_positions")
        ranges = [_within(name, getattr(self, name), 1, MAX_DIM) for name in dims]
        require(
            _within("num_layers", self.num_layers, 1, MAX_LAYERS),
            *ranges,
            (
                self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads == 0,
                "num_kv_heads",
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly",
            ),
            (0 < self.rotary_fraction <= 1, "rotary_fraction", f"must lie in (0, 1], not {self.rotary_fraction}"),
            (self.rotary_theta >= 1, "rotary_theta", f"must be at least 1, not {self.rotary_theta}"),
            (
                self.positions == "learned" or (self.rotary_dims >= 2 and self.rotary_dims % 2 == 0),
                "head_dim",
                f"rotary positions turn pairs; {self.rotary_dims} of {self.head_dim} cannot be paired",
            ),
            (self.norm_eps > 0, "norm_eps", f"must be positive, not {self.norm_eps}"),
            (self.window is None or self.window >= 1, "window", f"must be at least 1, or null, not {self.window}"),
            (
                self.num_experts == 0 or 2 <= self.num_experts <= MAX_EXPERTS,
                "num_experts",
                f"must be 0 (dense) or between 2 and {MAX_EXPERTS}, not {self.num_experts}",
            ),
            (
                1 <= self.experts_per_token <= self.num_experts if self.num_experts else self.experts_per_token == 0,
                "experts_per_token",
                f"must lie between 1 and num_experts ({self.num_experts}); 0 for a dense model",
            ),
        )

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that read the same key/value head: the size of dim ``q_group``."""
        return self.num_heads // self.num_kv_heads

    @property
    def norm_has_bias(self) -> bool:
        """Whether each norm carries a bias beside its weight."""
        return self.norm == "layer"

    @property
    def rotary_dims(self) -> int:
        """How many numbers of each head are rotated (rounded down, as Hugging Face does); 0 if learned."""
        return int(self.head_dim * self.rotary_fraction) if self.positions == "rotary" else 0

    @property
    def num_parameters(self) -> int:
        """Every trained number once: a tied output head adds nothing to the embedding that it shares."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden
        attention += heads * self.head_dim * self.qkv_bias + self.hidden * self.out_bias
        per_norm = 2 if self.norm_has_bias else 1
        attention += 2 * per_norm * self.head_dim * self.qk_norm
        products = 2 if self.gated_mlp else 1
        mlp = (products + 1) * self.hidden * self.ffn + (products * self.ffn + self.hidden) * self.mlp_bias
        layer = attention + max(1, self.num_experts) * mlp + self.num_experts * self.hidden
        norms = (2 * self.num_layers + 1) * per_norm * self.hidden
        tables = self.vocab * (1 if self.tied_embeddings else 2)
        learned = self.max_positions if self.positions == "learned" else 0
        return self.num_layers * layer + norms + (tables + learned) * self.hidden


def _within(name: str, value: int, low: int, high: int) -> tuple[bool, str, str]:
    return low <= value <= high, name, f"must lie between {low} and {high}, not {value}"
