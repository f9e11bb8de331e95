"""Two plans compared in words: which is faster, why, and whether that is known; apart from tables, for JSON as well."""

from autoshard.plan.diff import Breakdown, Diff, Figures, Term
from autoshard.units import GIB, format_count, format_seconds

TIME_WORDS = {
    "compute": "compute",
    "waiting": "waiting for kernels to start",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "sends between stages",
    "bubble": "waiting in the pipeline",
    "dp": "gradients and weights over dp",
    "update": "optimizer update",
    "fixed": "fixed time of every step",
}
_PLURAL = frozenset(("pp", "dp"))  # parts of the time that are named in the plural
_MOST_REASONS = 2
_LEAST_REASON = 0.1  # of the difference that it explains; what is less does not explain much
_TIMES = 2.0  # from twice as much on, percentages of time mislead


def sentences(diff: Diff) -> list[str]:
    """Return what a person wants to know first, the most important sentence first; ``misfits`` is about memory."""
    a_s, b_s = format_seconds(diff.a.step_time_s), format_seconds(diff.b.step_time_s)
    if diff.is_nothing:
        return [f"nothing differs: the plans are the same, {a_s} a step"]
    if diff.asked:
        lines = _different_questions(diff)
    elif diff.slower_by == 0:
        return [f"b takes as long as a, {a_s} a step"]
    else:
        lines = [f"b {_faster(diff)} ({b_s} against {a_s} a step){_because(diff.time)}"]
    if diff.is_within_intervals and diff.slower_by:
        widths = f"{diff.a.half_width:.0%} either way for a, {diff.b.half_width:.0%} for b"
        lines.append(f"each lies within the other's interval ({widths}): which is faster is not known")
    if diff.a.basis != diff.b.basis:
        lines.append("the predictions rest on different grounds (see the end), which may be part of the difference")
    return lines


def misfits(diff: Diff) -> list[str]:
    """Return which of the plans needs more memory than a rank has."""
    return [
        f"{name} does not fit in memory: {side.peak_bytes / GIB:.2f} of {side.capacity_bytes / GIB:.2f} GiB"
        for name, side in (("a", diff.a), ("b", diff.b))
        if not side.fits
    ]


def _percent(share: float) -> str:
    """Print a share without its sign; what is too small to be seen is not printed as nothing.

    >>> _percent(-0.0316), _percent(0.0001)
    ('3.2%', 'less than 0.1%')
    """
    return f"{abs(share):.1%}" if abs(share) >= 0.0005 else "less than 0.1%"


def _faster(diff: Diff) -> str:
    """Say how much faster or slower b is; shares are of the time of a, which is printed beside them."""
    ratio = diff.b.step_time_s / diff.a.step_time_s
    if ratio >= _TIMES:
        return f"takes {ratio:.1f} times as long"
    if ratio <= 1 / _TIMES:
        return f"is {1 / ratio:.1f} times as fast"
    return f"is {_percent(diff.slower_by)} {'slower' if diff.slower_by > 0 else 'faster'}"


def _because(time: Breakdown) -> str:
    """Name the parts that make the difference, then those that work against it."""
    total = time.total.difference
    large = [part for part in time.parts if abs(part.difference) > _LEAST_REASON * abs(total)]
    causes = [part for part in large if part.difference * total > 0][:_MOST_REASONS]
    against = [part for part in large if part.difference * total < 0][:_MOST_REASONS]
    because = f", mostly because {_list(causes)}" if causes else ""
    return because + (f"; {_list(against)}" if against else "")


def _list(parts: list[Term]) -> str:
    verb = "take" if parts[0].name in _PLURAL else "takes"
    texts: list[str] = []
    for part in parts:
        more = f"{format_seconds(abs(part.difference))} {'more' if part.difference > 0 else 'less'}"
        texts.append(f"{TIME_WORDS.get(part.name, part.name)} {'' if texts else f'{verb} '}{more}")
    return " and ".join(texts)


def _different_questions(diff: Diff) -> list[str]:
    """Compare what can be compared of plans for other models, batches or clusters: tokens, per rank and per dollar."""
    parts = sorted({change.name.partition(".")[0] for change in diff.asked})
    rates = [_rate("tokens/s", diff.a.tokens_per_s, diff.b.tokens_per_s)]
    if diff.a.num_ranks != diff.b.num_ranks:
        rates.append(_rate("tokens/s per rank", *(side.tokens_per_s / side.num_ranks for side in (diff.a, diff.b))))
    a_dollar, b_dollar = _tokens_per_dollar(diff.a), _tokens_per_dollar(diff.b)
    if a_dollar and b_dollar:
        rates.append(_rate("tokens per dollar", a_dollar, b_dollar))
    verb = "differs" if len(parts) == 1 else "differ"
    lines = [f"the plans answer different questions: {' and '.join(parts)} {verb}", f"b has {'; '.join(rates)}"]
    if "model" in parts:
        lines.append("a token of another model is other work: MFU says how well either plan uses its ranks")
    return lines


def _tokens_per_dollar(side: Figures) -> float | None:
    return 1e9 / side.dollars.usd_per_billion_tokens if side.dollars else None


def _rate(unit: str, a: float, b: float) -> str:
    share = round(b / a - 1, 9)
    if share == 0:
        return f"as many {unit}, {format_count(b)}"
    if share >= _TIMES - 1:
        return f"{b / a:.1f} times the {unit} ({format_count(b)} against {format_count(a)})"
    return f"{_percent(share)} {'more' if share > 0 else 'fewer'} {unit} ({format_count(b)} against {format_count(a)})"
