"""``autoshard list``: print the names that options take."""

import json as json_text
import shutil
import sys
from typing import Literal

from autoshard.errors import require
from autoshard.report.listing import entries, listing_text

Listable = Literal["models", "recipes", "clusters", "engines", "schedules", "kernels", "rules", "sweeps"]


def list(what: Listable, json: bool = False, here: bool = False) -> int:
    """List the names that options take: models, recipes, clusters, engines, schedules, kernels, rules or sweeps.

    Args:
        what: What to list.
        json: Print one JSON object instead of a table.
        here: Print this machine's accelerators as a cluster file instead: list clusters --here > here.json, then plan
            --cluster here.json. A machine without any is an error.
    """
    require((what == "clusters" or not here, "--here", f"prints a cluster, not {what}; type list clusters --here"))
    if here:
        from autoshard.runtime.here import cluster_here  # may import torch, which takes seconds

        print(json_text.dumps(cluster_here(), indent=2))
        return 0
    rows = entries(what)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(json_text.dumps({what: rows}, indent=2) if json else listing_text(rows, width))
    return 0
