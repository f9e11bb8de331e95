"""The layout of the hidden state between blocks, in which stages hand it on as well."""

from autoshard.errors import InputError
from autoshard.layout.layout import Cuts, Layout

_BATCH, _TOKENS = ("edp", "ep"), (("cp",), ("kv", "rep"), ("cp", "kv", "rep"), ())


def boundary_cuts(boundary: str | None, *, sequence_parallel: bool) -> Cuts:
    """Return how the hidden state is cut between blocks: as somebody wants it, or else along its tokens.

    >>> boundary_cuts(None, sequence_parallel=True)["seq"]
    ('cp', 'kv', 'rep')
    >>> boundary_cuts("[batch/dp, seq/cp, hidden/tp]", sequence_parallel=True)["hidden"]
    ('kv', 'rep')
    """
    if boundary is None:
        return {"batch": _BATCH, "seq": ("cp", *(("kv", "rep") if sequence_parallel else ()))}
    return {dim: cut for dim, cut in Layout.parse(boundary).dims if cut}


def boundary_fault(boundary: str | None) -> str:
    """Say why blocks cannot hand the hidden state on in such a layout.

    >>> boundary_fault("[batch/dp, seq, hidden/tp.cp]")
    'hidden is cut over cp, tp or cp.tp, or whole'
    """
    if boundary is None:
        return ""
    try:
        layout = Layout.parse(boundary)
    except InputError as error:
        return str(error)
    if tuple(dim for dim, _ in layout.dims) != ("batch", "seq", "hidden") or layout.sums or layout.maxima:
        return "the hidden state is [batch, seq, hidden], with nothing pending"
    (_, batch), *others = layout.dims
    if batch != _BATCH:
        return "dp cuts the batch, between blocks as well. Write batch/dp"
    wrong = [dim for dim, cut in others if cut not in _TOKENS]
    return f"{wrong[0]} is cut over cp, tp or cp.tp, or whole" if wrong else ""
