"""``autoshard list``: what can be named."""

from typing import Literal

from autoshard.commands.output import print_json

Listable = Literal["models", "recipes", "clusters", "engines", "schedules", "kernels", "rules", "sweeps"]


def list(what: Listable, json: bool = False) -> int:
    """List what can be named: models, recipes, clusters, engines, schedules, kernels, rules or sweeps.

    Args:
        what: What to list.
        json: Print one JSON object instead of a table.
    """
    from autoshard.report.listing import entries, listing_text

    rows = entries(what)
    if json:
        print_json({what: rows})
    else:
        print(listing_text(rows))
    return 0
