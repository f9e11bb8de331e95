"""Settings that a program states for all stages together, split among stages with different numbers of layers."""

from collections.abc import Sequence

from autoshard.errors import InputError
from autoshard.imports.table import Facts
from autoshard.plan.recompute import Recompute


def recompute_of_stages(
    recompute: tuple[Recompute, ...], layers: Sequence[int], every: int | None = None
) -> tuple[Recompute, ...]:
    """Return the recompute of stages with so many layers: of every n-th layer, or of no more layers than there are.

    >>> [str(kind) for kind in recompute_of_stages((Recompute.parse("full:4"),), [4, 5])]
    ['full', 'full:4']
    """
    kind = recompute[0]
    if every:
        counts = [max(1, -(-size // every)) for size in layers]
        return tuple(Recompute(kind="full", num_layers=count) for count in counts)
    if len(recompute) > 1 or kind.num_layers is None or all(size > kind.num_layers for size in layers):
        return recompute
    full = Recompute(kind="full")
    return tuple(full if size <= (kind.num_layers or 0) else kind for size in layers)


def with_ends(layers: int, pp: int, vp: int, ends: tuple[int | None, int | None]) -> tuple[int, ...]:
    """Return stages where the first and the last rank have so many layers, and the others the same number.

    A rank's chunks share its layers evenly (megatron/core/transformer/transformer_block.py, get_num_layers_to_build).

    >>> with_ends(10, 2, 2, (4, None))
    (2, 3, 2, 3)
    """
    first, last = ends
    inner = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if inner < 0 or rest < 0 or (inner and rest % inner) or (not inner and rest):
        raise InputError.of("stages", f"{rest} layers between first and last stage do not fill {inner} stages evenly")
    of_ranks = (
        *([first] if first is not None else []),
        *([rest // inner] * inner),
        *([last] if last is not None else []),
    )
    if any(count % vp for count in of_ranks):
        raise InputError.of("stages", f"{', '.join(map(str, of_ranks))} layers of ranks do not fill {vp} chunks evenly")
    return tuple(count // vp for count in of_ranks) * vp


def chunks_of(layers: int, pp: int, facts: Facts) -> int:
    """Return how many stages a rank has where a file says how many layers one has; programs refuse an uneven number.

    Embedding and head count as so many layers as the first and the last stage have less.

    >>> chunks_of(126, 8, {"layout.layers_per_stage": 4, "layout.first_less": 1, "layout.last_less": 1})
    4
    """
    counted = layers + int(facts.get("layout.first_less", 0)) + int(facts.get("layout.last_less", 0))
    per_stage = int(facts["layout.layers_per_stage"])
    num_stages = -(-counted // per_stage)
    if num_stages % pp:
        uneven = f"{per_stage} layers each make {num_stages}, which {pp} pipeline ranks do not share evenly"
        raise InputError.of("stages", uneven)
    return num_stages // pp
