"""``autoshard list``: print the names that options take."""

import json as json_text
import shutil
import sys
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
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(json_text.dumps({what: rows}, indent=2) if json else listing_text(rows, width))
    return 0
