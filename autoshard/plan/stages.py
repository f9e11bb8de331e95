"""How layers fall on stages when nobody says otherwise."""

from autoshard.plan.candidate import Candidate


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Give the layers of each stage: as even as can be, what is left over goes to the middle.

    The first stage also holds the embedding and the last the head, so the ends get fewer layers; with only
    one stage to spare it is the last, because the head costs more time than the embedding.

    >>> even_stages(80, 8), even_stages(10, 4), even_stages(7, 4)
    ((10, 10, 10, 10, 10, 10, 10, 10), (2, 3, 3, 2), (2, 2, 2, 1))
    """
    least, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest) // 2
    return tuple(least + (first <= stage < first + rest) for stage in range(num_stages))


def layers_of(candidate: Candidate, num_layers: int) -> tuple[int, ...]:
    """Give the layers of each stage of a candidate for a model of ``num_layers``."""
    return candidate.stages or even_stages(num_layers, candidate.num_stages)
