"""Which kernels Megatron-LM's arguments ask for: how gradients are reduced, and how tokens go to their experts."""

from autoshard.imports.table import Facts, KeyEntry, Keys, truth
from autoshard.spec.kernels import libraries_of, with_libraries

LIBRARIES = ("deepep", "hybridep")  # of the dispatcher `flex`


def _kernels(keys: Keys) -> Facts:
    """Read the table of a run; the dispatcher `flex` sends by a library, DeepEP where none is named."""
    stated = {key.rpartition(".")[2]: value for key, value in keys.items()}
    table = "mcore" if truth(stated.get("overlap_grad_reduce")) else "te"
    if str(stated.get("moe_token_dispatcher_type")) != "flex":
        return {"layout.kernels": table}
    backend = str(stated.get("moe_flex_dispatcher_backend") or LIBRARIES[0])
    if backend in LIBRARIES:
        return {"layout.kernels": with_libraries(table, backend)}
    return {"layout.kernels": table, "unread": [f"moe_flex_dispatcher_backend = {backend}"]}


def _written_kernels(facts: Facts) -> Keys:
    overlaps = {"overlap_grad_reduce": True, **({"overlap_param_gather": True} if facts.get("layout.zero") else {})}
    libraries = libraries_of(str(facts.get("layout.kernels", "")))
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "".join(libraries[:1])}
    return {**overlaps, **(flex if libraries else {})}


KERNELS = KeyEntry(
    keys=(
        "overlap_grad_reduce",
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "moe_enable_deepep",  # what older versions ask beside `flex`
    ),
    reads=_kernels,
    writes=_written_kernels,
)
