"""What ``autoshard list`` prints: the names that options take, each with its main properties."""

from collections.abc import Callable
from pathlib import Path

from autoshard.units import format_bytes, format_count

Cell = str | int | float | None
Entry = dict[str, Cell]
_HEADINGS = {
    "rank_memory_bytes": "rank memory",
    "rank_bf16_flops_per_s": "bf16 FLOP/s a rank",
    "price_usd_per_node_hour": "USD a node hour",
    "price_date": "on demand as of (check yours)",
    "chips_per_node": "chips a node",
    "ranks_per_node": "ranks a node",
}
_LESS_NEEDED = (  # in the order in which they are left out
    "file", "kernels", "price_date", "chips_per_node", "lnc", "rank_bf16_flops_per_s", "ranks_per_node", "engine",
    "chip", "kv_heads", "experts", "heads",
)  # fmt: skip


def entries(what: str) -> list[Entry]:
    """Return one entry per name; only the catalogue in question is read."""
    sources: dict[str, Callable[[], list[Entry]]] = {
        "models": _models, "recipes": _recipes, "sweeps": _sweeps, "clusters": _clusters, "engines": _engines,
        "schedules": _schedules, "kernels": _kernels, "rules": _rules,
    }  # fmt: skip
    return sources[what]()


def listing_text(rows: list[Entry], width: int | None = None) -> str:
    """Lay entries out as columns under their keys; where these do not fit a width, the least needed are left out.

    >>> print(listing_text([{"name": "a", "about": "first"}, {"name": "bcd", "about": "second"}]))
    name  about
    a     first
    bcd   second
    >>> print(listing_text([{"name": "a", "kernels": "nxd", "engine": "nxd"}], width=12))
    name  engine
    a     nxd
    """
    columns = {
        key: [_HEADINGS.get(key, key.replace("_", " ")), *(_text(key, row[key]) for row in rows)] for key in rows[0]
    }
    widths = {key: max(map(len, column)) for key, column in columns.items()}
    for key in _LESS_NEEDED:
        if width is not None and sum(widths.values()) + 2 * (len(widths) - 1) > width:
            widths.pop(key, None)
    widths[list(widths)[-1]] = 0  # nothing follows
    lines = zip(*(columns[key] for key in widths), strict=True)
    return "\n".join("  ".join(map(str.ljust, line, widths.values())) for line in lines)


def _text(name: str, value: Cell) -> str:
    """Print a value of an entry: large numbers with a unit."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name == "parameters" or name.endswith("_per_s"):
        return format_count(value)
    return f"{value:.2f}" if "_usd_" in name else str(value)


def _models() -> list[Entry]:
    from autoshard.spec.model_catalogue import load_model, model_names

    return [
        {
            "name": model.name,
            "parameters": model.num_parameters,
            "layers": model.num_layers,
            "hidden": model.hidden,
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "experts": model.num_experts or None,
            "context": model.max_positions,
        }
        for model in map(load_model, model_names())
    ]


def _recipes() -> list[Entry]:
    from autoshard.spec.files import shipped_files
    from autoshard.spec.recipe import DEFAULT_CLUSTER, RECIPES, about, load_recipe

    rows: list[Entry] = []
    for name, path in shipped_files(RECIPES).items():
        recipe = load_recipe(path)
        question = {"model": recipe.question.model, "cluster": recipe.question.cluster or DEFAULT_CLUSTER}
        rows.append({"name": name, **question, "nodes": recipe.nodes, "about": about(path), "file": _as_typed(path)})
    return rows


def _sweeps() -> list[Entry]:
    from autoshard.spec.files import shipped_files
    from autoshard.spec.recipe import SWEEPS, about

    return [
        {"name": name, "about": about(path), "file": _as_typed(path)} for name, path in shipped_files(SWEEPS).items()
    ]


def _as_typed(path: Path) -> str:
    """Return a path relative to the current folder, where it lies inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _clusters() -> list[Entry]:
    from autoshard.spec.cluster_catalogue import ALIASES, cluster_names, load_cluster

    aliases = {name: alias for alias, name in ALIASES.items()}

    return [
        {
            "name": cluster.name,
            "alias": aliases.get(cluster.name),
            "chips_per_node": cluster.chips_per_node,
            "chip": cluster.chip.name,
            "ranks_per_node": cluster.ranks_per_node,
            "lnc": cluster.lnc,
            "rank_memory_bytes": cluster.rank_memory_bytes,
            "rank_bf16_flops_per_s": cluster.rank_matrix_flops_per_s("bf16"),
            "engine": cluster.engine,
            "kernels": cluster.kernels,
            "price_usd_per_node_hour": cluster.price_usd_per_node_hour,
            "price_date": cluster.price_date,
        }
        for cluster in map(load_cluster, cluster_names())
    ]


def _engines() -> list[Entry]:
    nxd = "neuronx-distributed; tested against it on CPUs, not yet on Trainium"
    torch = "PyTorch: gloo on CPUs; NCCL on GPUs and TorchNeuron, not yet tried on either"
    return [
        {"name": "nxd", "runs on": "trn1, trn1n, trn2, trn2u", "through": nxd},
        {"name": "torch", "runs on": "GPUs, trn2 and trn3 (Neuron 2.33), this machine", "through": torch},
    ]


def _schedules() -> list[Entry]:
    from autoshard.schedule.builders import builders

    return [{"name": name, "meaning": builder.meaning} for name, builder in builders().items()]


def _kernels() -> list[Entry]:
    from autoshard.spec.kernels import kernels_names, library_names, load_kernels, with_libraries

    tables = [load_kernels(name) for name in kernels_names()]
    with_library = [load_kernels(with_libraries("te", library)) for library in library_names()]
    return [
        {"name": table.name, "program": table.program, "selective recompute": ", ".join(sorted(table.sets))}
        for table in (*tables, *with_library)
    ]


def _rules() -> list[Entry]:
    from autoshard.plan.rules.check import all_rules, user_rules

    return [{"name": rule.id, "judges": rule.subject, "source": rule.source} for rule in (*all_rules(), *user_rules())]
