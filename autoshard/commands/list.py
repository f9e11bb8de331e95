"""``autoshard list``: print the names that options take."""

import json as json_text
from typing import Literal

from autoshard.report.listing import entries, listing_text

Listable = Literal["models", "recipes", "clusters", "engines", "schedules", "kernels", "rules", "sweeps"]


def list(what: Listable, json: bool = False) -> int:
    """List the names that options take: models, recipes, clusters, engines, schedules, kernels, rules or sweeps.

    Args:
        what: What to list.
        json: Print one JSON object instead of a table.
    """
    rows = entries(what)
    print(json_text.dumps({what: rows}, indent=2) if json else listing_text(rows))
    return 0
