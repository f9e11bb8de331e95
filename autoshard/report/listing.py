"""What ``autoshard list`` prints: the names that options take, each with its main properties."""

from collections.abc import Callable
from pathlib import Path

from autoshard.units import format_bytes, format_count

Entry = dict[str, str]


def entries(what: str) -> list[Entry]:
    """Return one entry per name; only the catalogue in question is read."""
    sources: dict[str, Callable[[], list[Entry]]] = {
        "models": _models, "recipes": _recipes, "sweeps": _sweeps, "clusters": _clusters, "engines": _engines,
        "schedules": _schedules, "kernels": _kernels, "rules": _rules,
    }  # fmt: skip
    return sources[what]()


def listing_text(rows: list[Entry]) -> str:
    """Lay entries out as columns under their keys; the last column has no limit.

    >>> print(listing_text([{"name": "a", "about": "first"}, {"name": "bcd", "about": "second"}]))
    name  about
    a     first
    bcd   second
    """
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [*(max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]), 0]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines)


def _models() -> list[Entry]:
    from autoshard.spec.model_catalogue import load_model, model_names

    return [
        {
            "name": model.name,
            "parameters": format_count(model.num_parameters),
            "layers": str(model.num_layers),
            "hidden": str(model.hidden),
            "heads": f"{model.num_heads}/{model.num_kv_heads}",
            "experts": str(model.num_experts or "-"),
            "context": str(model.max_positions),
        }
        for model in map(load_model, model_names())
    ]


def _recipes() -> list[Entry]:
    from autoshard.spec.recipe import about, load_recipe, recipe_files

    return [
        {
            "name": _as_typed(path),
            "model": one.model,
            "cluster": one.cluster,
            "nodes": str(one.nodes),
            "about": about(path),
        }
        for path, one in ((path, load_recipe(path)) for path in recipe_files())
    ]


def _sweeps() -> list[Entry]:
    from autoshard.spec.files import shipped
    from autoshard.spec.recipe import about

    paths = sorted(shipped("recipes").glob("sweeps/*.yaml"))
    return [{"name": _as_typed(path), "about": about(path)} for path in paths]


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
            "alias": aliases.get(cluster.name, "-"),
            "chips a node": f"{cluster.chips_per_node} x {cluster.chip.name}",
            "ranks a node": f"{cluster.ranks_per_node}{f' (lnc {cluster.lnc})' if cluster.lnc else ''}",
            "memory a rank": format_bytes(cluster.rank_memory_bytes),
            "bf16 a rank": format_count(cluster.rank_matrix_flops_per_s("bf16"), "FLOP/s"),
            "engine": cluster.engine,
            "kernels": cluster.kernels,
            "USD a node hour": f"{price:.2f}" if (price := cluster.price_usd_per_node_hour) else "-",
            "on demand as of (check yours)": cluster.price_date or "-",
        }
        for cluster in map(load_cluster, cluster_names())
    ]


def _engines() -> list[Entry]:
    nxd = "neuronx-distributed; tested against it on CPUs, not yet on Trainium"
    torch = "PyTorch: gloo on CPUs; NCCL on GPUs, not yet tried on any"
    return [
        {"name": "nxd", "runs on": "trn1, trn1n, trn2, trn2u", "through": nxd},
        {"name": "torch", "runs on": "GPUs, this machine", "through": torch},
    ]


def _schedules() -> list[Entry]:
    from autoshard.schedule.builders import builders

    return [{"name": name, "meaning": builder.meaning} for name, builder in builders().items()]


def _kernels() -> list[Entry]:
    from autoshard.spec.kernels import kernels_names, load_kernels

    sets = {name: ", ".join(sorted(load_kernels(name).selective)) for name in kernels_names()}
    return [{"name": name, "selective recompute": text} for name, text in sets.items()]


def _rules() -> list[Entry]:
    from autoshard.plan.rules.check import all_rules, user_rules

    return [{"name": rule.id, "judges": rule.subject, "source": rule.source} for rule in (*all_rules(), *user_rules())]
