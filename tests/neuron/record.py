"""What a run with the real NxD found, for machines without it: ``python -m tests.neuron.record "v2.28.0 (22cadad)"``.

Written with it: ``record.json``, and the table of features in ``docs/developers/trainium.md``. With ``--only NAME ...``
others stay as they are recorded; ``--only`` alone runs those that are not, or lower to other layers than they did.
"""

import argparse
import datetime
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autoshard.engine.nxd.lowering import lowering_of
from tests.neuron import standins
from tests.neuron.cases import CASES, Case, errors_of

RECORD = Path(__file__).with_name("record.json")
PAGE = Path(__file__).parents[2] / "docs" / "developers" / "trainium.md"
BEGIN, END = "<!-- features: written by tests/neuron/record.py -->", "<!-- end of features -->"
NOT_VERIFIED: Mapping[str, str] = {
    "flash attention": "a kernel for NeuronCores; on a CPU torch's own attention stands in its place",
    "ring kernel": "a stand-in on CPU: exact attention over keys gathered from all of cp; all else of cp is NxD's",
    "kernels for experts that drop no token": "stand-ins on CPU: one block of tokens after another; all else is NxD's",
    "expert parallelism": "refused (`nxd-ep`)",
    "fp16": "NxD's embedding returns BF16; refused with tp above 1",
    "buckets, graphs": "collectives are gloo's, tensor by tensor; with real torch_xla: the next section",
    "stochastic rounding": "a CPU has none",
    "checkpoints of NxD's own": "not used",
}


def layers_of(case: Case) -> list[str]:
    """The layers that a case lowers to: what each replaces, and its arguments."""
    forms = lowering_of(case.plan()).forms
    return [
        f"{kind}: {' '.join(form.leaves)} -> {form.layer} {json.dumps(dict(form.arguments), sort_keys=True)}"
        for kind, block in forms.items()
        for form in block
        if form.layer != "leaf"
    ]


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The table of the docs."""
    yield f"NxD {record['nxd']}, PyTorch {record['torch']}, {record['date']}: CPU and gloo, FP32, two steps."
    yield "Distances are relative, of gradients to the model's largest, of weights to their largest change: AdamW"
    yield "divides gradients by themselves, so that small ones show noise. Ring kernel: a stand-in on CPU."
    yield ""
    yield "| feature | candidate | order of ranks | loss | every gradient | norm | weights |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, found in record["cases"].items():
        errors = " | ".join(f"{found[part]:.0e}" for part in ("loss", "gradients", "norm", "weights"))
        yield f"| {name} | `{CASES[name].text}` | {CASES[name].platform} | {errors} |"
    for name, why in NOT_VERIFIED.items():
        yield f"| {name} | | | not verified | {why} | | |"


def with_table(page: str, record: Mapping[str, Any]) -> str:
    """Put the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return "\n".join((f"{before}{BEGIN}", "", *lines(record), "", f"{END}{rest.partition(END)[2]}"))


def main(version: str, only: Sequence[str] | None = None) -> None:
    """Run cases, and write what was found."""
    missing = standins.absent()
    if missing:
        raise SystemExit(missing)
    standins.install()
    importlib.import_module("autoshard.engine.nxd.engine")
    with_torch = torch.__version__.partition("+")[0]
    before: dict[str, Any] = {} if only is None else json.loads(RECORD.read_text(encoding="utf-8"))
    if before and (before["nxd"], before["torch"]) != (version, with_torch):
        raise SystemExit(f"recorded with NxD {before['nxd']} and PyTorch {before['torch']}: leave --only out")
    cases: dict[str, Any] = before.get("cases", {})
    stale = (name for name, case in CASES.items() if cases.get(name, {}).get("layers") != layers_of(case))
    for name in CASES if only is None else only or stale:
        errors = errors_of(CASES[name])
        parts = {part: float(f"{getattr(errors, part):.0e}") for part in ("loss", "gradients", "norm", "weights")}
        cases[name] = {**parts, "layers": layers_of(CASES[name])}
        print(name, parts, flush=True)  # noqa: T201
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    ordered = {name: cases[name] for name in CASES}
    record = {"nxd": version, "torch": with_torch, "date": today, "cases": ordered}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--only", nargs="*", choices=list(CASES), metavar="NAME")
    given = parser.parse_args()
    main(given.version, given.only)
