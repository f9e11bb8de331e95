"""What autoshard and GSPMD send, kept in ``record.json``, which ``python -m tests.gspmd.record`` writes."""

import datetime
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoshard.graph.op import Array
from tests.gspmd.cases import CASES, LLAMA_3_8B, SMALL, Case
from tests.gspmd.hlo import sent_by_xla
from tests.gspmd.sent import Sent
from tests.gspmd.traced import TracedLayer, sent_in

PYTHON = "AUTOSHARD_GSPMD_PYTHON"  # of an environment with torch-xla: CONTRIBUTING.md says how to make it
RECORD = Path(__file__).with_name("record.json")
LAYERS: Mapping[str, Mapping[str, int]] = {"small": SMALL, "llama3-8b": LLAMA_3_8B}

Found = Mapping[str, Counter[Sent]]  # by layer and case, as in "small, dp x tp"


def sent_by_autoshard(layer: str) -> Found:
    """Return what ranks send in every case of a layer."""
    traced: dict[int | None, TracedLayer] = {}
    for case in CASES.values():
        if case.keys not in traced:
            traced[case.keys] = TracedLayer.of(case.sizes(LAYERS[layer]), "cpu" if layer == "small" else "meta")
    return {f"{layer}, {name}": sent_in(case, traced[case.keys]) for name, case in CASES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderGspmd:
    """XLA's partitioned programs by case, and the largest error of any result or gradient of those that ran."""

    texts: Mapping[str, str]
    errors: Mapping[str, float]  # relative to the largest number of the tensor


def recorded_cases() -> Mapping[str, tuple[Case, str]]:
    """Return all cases of both layers, each with its layer."""
    return {f"{layer}, {name}": (case, layer) for layer in LAYERS for name, case in CASES.items()}


def under_gspmd(python: str, cases: Mapping[str, tuple[Case, str]]) -> UnderGspmd:
    """Run the small layer and compile the large one in the other environment, in some cases."""
    given, wanted, described = dict[str, Array](), dict[str, Array](), dict[str, Any]()
    for key, (case, layer) in cases.items():
        described[key] = case.description(LAYERS[layer], compiled_only=layer != "small")
        if layer == "small":
            one, other = _run_here(TracedLayer.of(case.sizes(SMALL)))
            given |= {f"{key}/{tensor}": array for tensor, array in one.items()}
            wanted |= {f"{key}/{tensor}": array for tensor, array in other.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(described), encoding="utf-8")
        np.savez(folder / "given.npz", allow_pickle=False, **given)
        (folder / "dump").mkdir()
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=spmd.*"
        settings = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "XLA_FLAGS": dump, "PYTHONPATH": ""}
        command = [python, str(Path(__file__).with_name("on_xla.py")), name]
        subprocess.run(command, check=True, env={**os.environ, **settings})
        texts = {key: (folder / f"{number}.hlo").read_text(encoding="utf-8") for number, key in enumerate(described)}
        found = dict(np.load(folder / "found.npz"))
    assert found.keys() == wanted.keys()
    errors: dict[str, float] = {}
    for tensor, array in wanted.items():
        key = tensor.partition("/")[0]
        errors[key] = max(errors.get(key, 0.0), float(np.abs(found[tensor] - array).max() / np.abs(array).max()))
    return UnderGspmd(texts=texts, errors=errors)


def sent_under_gspmd(found: UnderGspmd) -> Found:
    """Return what ranks send in all cases."""
    return {key: sent_by_xla(text, recorded_cases()[key][0].mesh) for key, text in found.texts.items()}


def _run_here(layer: TracedLayer) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """Return what the plain module gets, and what it gives: its result and the gradients of all that wants one."""
    parameters = dict(layer.module.named_parameters())
    x = layer.inputs["x"].detach().requires_grad_()
    result = layer.module(x, *list(layer.inputs.values())[1:])
    seed = torch.randn(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(result, [x, *parameters.values()], seed)
    given = {**layer.inputs, **parameters, "seed": seed}
    found = {"result": result, **dict(zip(("x", *parameters), gradients, strict=True))}
    as_arrays = [{name: one.detach().numpy() for name, one in part.items()} for part in (given, found)]
    return as_arrays[0], as_arrays[1]


def recorded(side: str) -> Found:
    """Return what the record says of a side: autoshard, or gspmd."""
    cases = json.loads(RECORD.read_text(encoding="utf-8"))["cases"]
    return {
        key: Counter({Sent.parse(text): count for text, count in sides[side].items()}) for key, sides in cases.items()
    }


def main() -> None:
    """Run both sides and write the record."""
    theirs = sent_under_gspmd(under_gspmd(os.environ[PYTHON], recorded_cases()))
    sides = {
        "autoshard": {key: one for layer in LAYERS for key, one in sent_by_autoshard(layer).items()},
        "gspmd": theirs,
    }
    cases = {
        key: {side: {str(one): count for one, count in sorted(found[key].items())} for side, found in sides.items()}
        for key in theirs
    }
    made = {"torch_xla": "2.9.0", "date": f"{datetime.date.today()}", "cases": cases}
    RECORD.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
