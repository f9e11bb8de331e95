"""The rule that no number about hardware stands without saying where it comes from."""

from collections.abc import Iterable, Mapping

EVERYTHING = "default"


def source_checks(numbers: Iterable[str], sources: Mapping[str, str]) -> list[tuple[bool, str, str]]:
    """Make the checks (for ``errors.require``) that each number is covered by a source.

    The number ``matrix_flops_per_s.bf16`` is covered by a source of that name, of the whole field
    ``matrix_flops_per_s``, or by ``default``, which covers everything.

    >>> source_checks(["latency_s"], {"latency_s": "data sheet"})
    [(True, 'sources', "no source for latency_s: add the key 'latency_s' or 'default'")]
    """
    return [
        (
            _covered(number, sources),
            "sources",
            f"no source for {number}: add the key {number!r} or {EVERYTHING!r}",
        )
        for number in numbers
    ]


def _covered(number: str, sources: Mapping[str, str]) -> bool:
    whole_field = number.partition(".")[0]
    return any(sources.get(key, "").strip() for key in (number, whole_field, EVERYTHING))
