"""Names that only a catalogue can judge; each function says what is wrong, or gives "" if nothing is."""

from autoshard.errors import nearest
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import kernels_names, load_kernels
from autoshard.spec.placement import Placement

_NXD = ("nxd", "nxd_core")
_PRODUCTS = frozenset(("gate", "up", "act", "product", "down"))  # of experts


def place_fault(place: Placement | None, cluster: Cluster) -> str:
    """Judge the order of a node's ranks on the mesh."""
    if place is None or len(place.local_ranks) == cluster.ranks_per_node:
        return ""
    return f"places {len(place.local_ranks)} ranks, but a node of {cluster.name} has {cluster.ranks_per_node}"


def kernels_fault(kernels: str, engine: str) -> str:
    """Judge the Kernels table."""
    if kernels not in kernels_names():
        return f"there is no such table. {nearest(kernels, kernels_names())}"
    if (kernels in _NXD) != (engine == "nxd"):
        return f"the {engine} engine does not run these kernels. Use {_kernels_of(engine)}"
    return ""


def recompute_fault(recomputes: tuple[Recompute, ...], kernels: str) -> str:
    """Judge the op names after selective; a framework's own name is right even where it computes nothing again."""
    names = sorted({name for recompute in recomputes for name in recompute.ops})
    if not names or kernels not in kernels_names():
        return ""
    known = recomputable_names(kernels)
    return " ".join(f"{name} is not known to {kernels}. {nearest(name, known)}" for name in names if name not in known)


def experts_fault(recomputes: tuple[Recompute, ...], kernels: str, *, drops: bool) -> str:
    """Judge what NxD is to compute again of experts: all products and what lies between, where tokens may be dropped.

    >>> again = Recompute.parse("selective[LlamaMLP]")
    >>> experts_fault((again,), "nxd", drops=True)
    ''
    >>> experts_fault((again,), "nxd", drops=False)
    'the kernel for experts that drop no token keeps what it needs. Use none or full'
    """
    if kernels not in _NXD:
        return ""
    found = [_PRODUCTS.intersection(load_kernels(kernels).resolve(one.ops)) for one in recomputes]
    if any(found) and not drops:
        return "the kernel for experts that drop no token keeps what it needs. Use none or full"
    if any(inside and inside != _PRODUCTS for inside in found):
        return "of experts NxD computes all again or nothing. Use selective[LlamaMLP], none or full"
    return ""


def effective_names(kernels: str) -> tuple[str, ...]:
    """List a framework's names of the sets that hold any operation.

    >>> effective_names("nxd")  # flash attention is not NxD's module CoreAttention
    ('ActivationMultiplyMLP', 'LlamaMLP', 'LlamaRMSNorm')
    """
    return tuple(sorted(name for name, ops in load_kernels(kernels).selective.items() if ops))


def recomputable_names(kernels: str) -> tuple[str, ...]:
    """List what may stand in ``selective[...]``: a framework's names of op sets, and the ops in them."""
    table = load_kernels(kernels)
    ops = (op for name in table.selective for op in table.selective[name])
    return tuple(dict.fromkeys((*table.selective, *ops)))


def _kernels_of(engine: str) -> str:
    return ", ".join(name for name in kernels_names() if (name in _NXD) == (engine == "nxd"))
