"""Parts of a model with fields of their own: positions of heads, narrow states, routers of experts, lines of code."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import in_range, require
from autoshard.spec.record import option

MAX_DIM = 2**31 - 1  # the largest 32-bit index, which the accelerators' libraries use
MAX_EXPERTS = 10_000  # far above every published model
RouterScores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are scaled for contexts longer than that of the first training.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides those with fewer than
    ``low_frequency_factor`` turns in ``original_positions``, keeps those with more than
    ``high_frequency_factor`` turns, and interpolates between the two. ``yarn`` does the same, and interpolates
    elsewhere: along the numbers of the frequencies, which are rounded outwards to whole ones where it ``truncates``.
    It also makes scores larger: by the square of 1 + ``mscale`` / 10 times the logarithm of ``factor``.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 0
    truncate: bool = option(True)
    mscale: float = option(0.0)

    def __post_init__(self) -> None:
        low, high, blends = self.low_frequency_factor, self.high_frequency_factor, self.kind != "linear"
        plain = self.kind == "yarn" or (self.truncate and not self.mscale)
        ascend = high > low or (high == low and self.kind == "yarn")  # which rounds outwards, as Kimi-K2 has it
        require(
            *in_range(self, "factor", low=1),
            *in_range(self, "low_frequency_factor", positive=True),
            (not blends or ascend, "high_frequency_factor", f"must be above the low one, {low}, not {high}"),
            *in_range(self, "original_positions", low=1 if blends else 0),
            *in_range(self, "mscale", low=0),
            (plain, "mscale" if self.mscale else "truncate", "only yarn has it"),
        )

    @property
    def growth(self) -> float:
        """By how much queries and keys grow, each of them: scores grow by its square."""
        return 1 + 0.1 * self.mscale * math.log(self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Keys and values that are made of a narrow hidden state of their own, as in DeepSeek-V2 (arXiv:2405.04434).

    The latter has ``kv_rank`` numbers per token, and queries are made of one with ``query_rank``, or of the whole
    hidden state where it is None. The first ``rotary_dim`` numbers of a head say positions: those of a key are made of
    the hidden state, and all heads share them. A value has ``value_dim`` numbers.
    """

    query_rank: int | None
    kv_rank: int
    rotary_dim: int
    value_dim: int
    norm_eps: float = option(1e-6)  # of the norms of both narrow states

    def __post_init__(self) -> None:
        require(
            *in_range(self, "query_rank", "kv_rank", "rotary_dim", "value_dim", low=1, high=MAX_DIM),
            (self.rotary_dim % 2 == 0, "rotary_dim", f"must be even, not {self.rotary_dim}: pairs are turned"),
            *in_range(self, "norm_eps", positive=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Attention with a state of fixed size in the place of keys and values: Gated DeltaNet (arXiv:2412.06464).

    A state belongs to each value head; as many of these share the query and the key of a head. A causal convolution of
    ``taps`` tokens stands before queries, keys and values. At a token a state moves towards the value by a sigmoid
    times ``reach``, so that it may move beyond. What is read is normed with a ``norm_eps``.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    reach: float = option(1.0)
    norm_eps: float | None = option(None)  # None: that of the model

    def __post_init__(self) -> None:
        uneven = f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly"
        require(
            *in_range(self, "key_heads", "value_heads", "key_dim", "value_dim", "taps", low=1, high=MAX_DIM),
            *in_range(self, "reach", "norm_eps", positive=True),
            (self.key_heads < 1 or self.value_heads % self.key_heads == 0, "value_heads", uneven),
        )

    def num_parameters(self, hidden: int) -> int:
        """Return the number of its parameters, of which a state's decay has two and a norm one for each value."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        products = (2 * keys + 3 * values + 2 * self.value_heads) * hidden
        return products + self.taps * (2 * keys + values) + 2 * self.value_heads + self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token's experts are chosen and weighted, where it is not the softmax of the logits that are chosen.

    Experts lie in equally many ``groups``, and a token chooses within ``chosen_groups`` of them: those whose best
    expert, or whose two best ones together, score most. A ``correction`` is a number for each expert, added to its
    score for the choice alone; no gradient trains it. ``scale`` multiplies the weights.
    """

    scores: RouterScores = "softmax"  # over all experts
    normalised: bool = True  # the weights of the chosen experts, so that they sum to one before the scale
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    correction: bool = False

    def __post_init__(self) -> None:
        limited = self.groups > 1
        few = f"must lie below groups ({self.groups}), not be {self.chosen_groups}; without a limit both are 1"
        require(
            *in_range(self, "scale", positive=True),
            *in_range(self, "groups", "chosen_groups", low=1, high=MAX_EXPERTS),
            (self.chosen_groups < self.groups or self.groups == self.chosen_groups == 1, "chosen_groups", few),
            (limited or self.group_score == "best", "group_score", "is only said of several groups"),
        )

    def checks(self, num_experts: int, experts_per_token: int) -> Iterator[tuple[bool, str, str]]:
        """Yield what must hold of a model with this router."""
        size, least = num_experts // self.groups, 2 if self.group_score == "best two" else 1
        reachable = self.chosen_groups * size
        uneven = f"{num_experts} experts do not lie in {self.groups} groups of equally many, {least} or more"
        within = f"{self.chosen_groups} groups have {reachable} experts, and a token chooses {experts_per_token}"
        yield num_experts > 0, "router", "needs experts. Leave it out of a dense model"
        yield self != Router(), "router", "says what holds without it. Leave it out"
        yield num_experts % self.groups == 0 and size >= min(least, num_experts), "router.groups", uneven
        yield self.groups == 1 or reachable >= experts_per_token, "router.chosen_groups", within


PACKED_ROWS = "packed_rows"  # a dim of what goes from part to part


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDecoder:
    """A decoder as its code computes it, where the options of a card do not say it: a line per forward operation.

    The head ends where the logits are made; the loss follows. ``sizes`` are those of dims that no card has, and
    ``unlifted`` says what of the code is not in the lines, or only as work of which nothing else is known. Samples may
    be other ``data`` than tokens: then the model makes its own loss of them, and has as many positions as its sequence.
    Where more than a hidden state goes from part to part, ``sizes`` has the rows of the hidden size in which it does.
    """

    embed: tuple[str, ...]
    layer: tuple[str, ...]
    head: tuple[str, ...]
    sizes: Mapping[str, int] = field(hash=False)
    num_parameters: int
    unlifted: tuple[str, ...] = ()
    data: tuple[str, ...] = option(())  # arguments that samples bring, where these are no tokens

    @property
    def carried(self) -> tuple[str, str, str]:
        """The dims of what goes from part to part."""
        return ("batch", PACKED_ROWS if PACKED_ROWS in self.sizes else "seq", "hidden")

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of all parts."""
        return (*self.embed, *self.layer, *self.head)

    def __post_init__(self) -> None:
        empty = [name for name in ("embed", "layer", "head") if not getattr(self, name)]
        require(
            *((False, name, "must have at least one line") for name in empty),
            *((size >= 1, f"sizes.{dim}", f"must be at least 1, not {size}") for dim, size in self.sizes.items()),
            *in_range(self, "num_parameters", low=1),
        )
