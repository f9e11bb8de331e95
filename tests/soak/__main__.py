"""Run hunts by name: ``python -m tests.soak layouts --cases 40``; ``all`` runs each with its usual number of cases."""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.hunt import Hunt, record

# The usual number of cases of every hunt; each is a function ``hunt`` in a module of its name.
USUAL: dict[str, int] = {
    "layouts": 40, "families": 48, "conversions": 300, "kills": 100, "stalls": 12, "randomness": 20, "dropout": 20,
}  # fmt: skip


def main() -> int:
    """Run the hunts that are named; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("name", choices=[*USUAL, "all"])
    parser.add_argument("--cases", type=int, help="how many; default: as many as the hunt usually tries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the results into docs/developers/soak.md")
    options = parser.parse_args()
    broken = False
    for name in USUAL if options.name == "all" else [options.name]:
        hunt: Hunt = importlib.import_module(f"tests.soak.{name}").hunt
        cases, begun_s = options.cases or USUAL[name], time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"soak-{name}-") as folder:
            result = hunt(cases, options.seed, Path(folder))
        print(f"{name}: {result.held} held, {result.refused} refused, {len(result.failures)} broken "
              f"in {time.monotonic() - begun_s:.0f} s. {result.remark}")  # fmt: skip
        for failure in result.failures:
            print(f"  {failure}")
        broken |= bool(result.failures)
        if options.record:
            record(name, f"python -m tests.soak {name} --cases {cases} --seed {options.seed}", result)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
