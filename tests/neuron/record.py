"""What a run with the real NxD found, for machines without it: ``python -m tests.neuron.record "v2.28.0 (22cadad)"``.

Written with it: ``record.json``, and the table of features in ``docs/trainium.md``.
"""

import datetime
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autoshard.engine.nxd.lowering import lowering_of
from tests.neuron import standins
from tests.neuron.features import CASES, Case

RECORD = Path(__file__).with_name("record.json")
PAGE = Path(__file__).parents[2] / "docs" / "trainium.md"
BEGIN, END = "<!-- features: written by tests/neuron/record.py -->", "<!-- end of features -->"
NOT_VERIFIED: Mapping[str, str] = {
    "flash attention": "a kernel for NeuronCores; on a CPU the decoder's own attention stands in its place",
    "context parallelism": "lowered, not executed: ring attention is a kernel for NeuronCores",
    "experts": "not lowered: what NxD's layer sends in backward is not what plans list",
    "fp16": "NxD's embedding returns BF16; refused with tp above 1",
    "buckets, graphs, stochastic rounding": "there is no XLA device; collectives are gloo's, tensor by tensor",
    "checkpoints with cp": "NxD names the files of different cp ranks alike; cp is not executed",
    "checkpoints as single tensors, asynchronous, in S3": "not used",
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


def table(record: Mapping[str, Any]) -> str:
    """The table of the docs."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"NxD {record['nxd']}, PyTorch {record['torch']}, {record['date']}: CPU and gloo, FP32, two steps."
    yield "Distances are relative, of gradients to the model's largest, of weights to their largest change: AdamW"
    yield "divides gradients by themselves, so that small ones show noise."
    yield ""
    yield "| feature | candidate | order of ranks | loss | every gradient | norm | weights |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, found in record["cases"].items():
        errors = " | ".join(f"{found[part]:.0e}" for part in ("loss", "gradients", "norm", "weights"))
        yield f"| {name} | `{CASES[name].text}` | {CASES[name].platform} | {errors} |"
    for name, why in NOT_VERIFIED.items():
        yield f"| {name} | | | not verified | {why} | | |"


def with_table(page: str, text: str) -> str:
    """Put the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}"


def main(version: str) -> None:
    """Run every case, and write what was found."""
    missing = standins.absent()
    if missing:
        raise SystemExit(missing)
    standins.install()
    importlib.import_module("autoshard.engine.nxd.engine")
    from tests.neuron.features import errors_of

    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        errors = errors_of(case)
        parts = {part: float(f"{getattr(errors, part):.0e}") for part in ("loss", "gradients", "norm", "weights")}
        cases[name] = {**parts, "layers": layers_of(case)}
        print(name, parts, flush=True)  # noqa: T201
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    record = {"nxd": version, "torch": torch.__version__.partition("+")[0], "date": today, "cases": cases}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(record)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
