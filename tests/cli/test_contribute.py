"""``autoshard contribute``: rows for others, which others can read, and in which nothing private stands."""

import getpass
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.calibration.rows import Occasion, row_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.runtime.here import Gpu
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.record import encode
from autoshard.spec.workload import Precision, Workload
from tests.conftest import Typed

# What an owner would not give away: host, home, data, tracker, person, command line, model, cluster, keys.
SECRETS = (
    "gpu07.acme.example", "/hom" + "e/jane", "s3://acme-corpus", "acme-corpus", "wandb-9f8e7d", "jane",
    "srun --account", "acme-7b", "acme", "10.11.12.13", "2026-11-24T15:19",
)  # fmt: skip
WORDS = " ".join(SECRETS)


def planned(layout: str = "tp=2,mbs=8", model: str = "tiny-llama") -> Plan:
    spec = load_model("tiny-llama")
    workload = Workload(seq_len=256, global_batch=32, precision=Precision.named("bf16"))
    cluster = load_cluster("local", ranks=4)
    request = Request(model=spec, cluster=cluster, workload=workload, engines=("torch",))
    plan = plan_at(request, Candidate.parse(layout if "dp" in layout else f"{layout},pp=1,dp=2"))
    return replace(plan, model=replace(spec, name=model, num_layers=3)) if model != "tiny-llama" else plan


def run_folder(folder: Path, plan: Plan, **changes: Any) -> dict[str, Any]:
    """A folder of a run whose every file names what is nobody else's business."""
    (folder / "logs").mkdir(parents=True)
    for name in ("logs/rank-0.log", "training.json", "attempts.jsonl", "tracked.json", "metrics.jsonl", "report.json"):
        (folder / name).write_text(json.dumps({"words": WORDS, "host": SECRETS[0]}), encoding="utf-8")
    (folder / "plan.json").write_text(dump(plan), encoding="utf-8")
    occasion = Occasion(
        name=f"{folder.name}: acme-7b of jane on {SECRETS[0]} 2026-11-24T15:19:04Z", step_time_s=0.5, date="2026-11-24",
        versions=f"autoshard 0.1.0, torch 2.13.0+cu130, torch-xla 2.9.0+acme.jane, {WORDS}",
    )  # fmt: skip
    row = {name: value for name, value in encode(row_of(plan, occasion)).items() if value is not None}
    source = {"plan": str(plan.candidate), "host": SECRETS[0], "data": SECRETS[2], "command": WORDS}
    row |= {"source": source, "published": {"model": WORDS}, "inferred": {"tp": WORDS}, "confidence": WORDS}
    row |= {"group": WORDS, "framework": f"autoshard, torch engine, {WORDS}", "first_seen": f"2026-11-24 {WORDS}"}
    (folder / "measured.jsonl").write_text(json.dumps(row | changes) + "\n", encoding="utf-8")
    return row


def secrets_in(text: str) -> list[str]:
    hidden = (*SECRETS, socket.gethostname(), *([getpass.getuser()] if len(getpass.getuser()) > 4 else []))
    return [secret for secret in hidden if secret in text]


@pytest.mark.slow
def test_nothing_private_comes_out_whatever_the_files_of_a_run_say(typed: Typed) -> None:
    row = run_folder(Path("runs/a"), planned())
    run_folder(Path("runs/b"), planned(layout="tp=1,mbs=8,pp=1,dp=4", model="acme-7b"))
    assert {secret for secret in SECRETS if secret in json.dumps(row)} == set(SECRETS), "the test plants all of them"
    code, out, err = typed("contribute runs --out mine.jsonl")
    text = Path("mine.jsonl").read_text(encoding="utf-8")
    assert (code, err) == (0, "") and not secrets_in(text) and not secrets_in(out)
    assert not re.search(r"/[a-z]+/|\\\\|[0-9]{1,3}(\.[0-9]{1,3}){3}\b", text), "no path, and no address"
    first, second = map(json.loads, text.splitlines())
    assert first["framework_version"] == "autoshard 0.1.0, torch 2.13.0+cu130, torch-xla 2.9.0"
    assert first["source"]["machine"].keys() >= {"processor", "cores"} and first["first_seen"] == "2026-11-24"
    assert (second["model"], second["arch"]["layers"]) == (f"decoder-3x{planned().model.hidden}", 3)
    assert all(word in out for word in ("2 measured rows", "tp=2,pp=1,dp=2,mbs=8: 500", "attach it to an issue"))


@pytest.mark.slow
def test_what_comes_out_is_read_as_the_same_run(typed: Typed) -> None:
    for number, layout in enumerate(("tp=2,mbs=8", "tp=1,mbs=8,pp=1,dp=4", "tp=2,mbs=4")):
        run_folder(Path(f"runs/{number}"), planned(layout), step_time_s=0.5 + number / 10)
    assert typed("contribute runs --json")[0] == 0
    own, theirs = (json.loads(typed(f"validate {path} --json")[1]) for path in ("runs", "contribution.jsonl"))
    told = ("predicted_step_time_s", "predicted_peak_memory_gib", "parts")
    assert [[one[name] for name in told] for one in own["rows"]] == [
        [one[name] for name in told] for one in theirs["rows"]
    ]
    code, _, complaint = typed("calibrate contribution.jsonl --cluster local --out c.json")
    assert code in (0, 2) and "holds no measured row" not in complaint  # the times are made up
    assert typed("contribute contribution.jsonl --out again.jsonl")[0] == 0


def on_own_file(name: str) -> Plan:
    """A plan on a machine that the catalogue does not have, whose file says more than others need to know."""
    file = {
        "name": name, "chip": "h100-80", "chips_per_node": 4, "variants": [{"ranks_per_chip": 1}], "engine": "torch",
        "kernels": "torch_engine_gpu", "links": [{
            "name": "pcie of acme", "kind": "switch", "domain": "node", "bandwidth_bytes_per_s": 3e10,
            "chips_per_port": 1, "latency_s": 1e-5, "sources": {"default": WORDS},
        }], "sources": {"default": WORDS},
    }  # fmt: skip
    Path("own.json").write_text(json.dumps(file), encoding="utf-8")
    workload = Workload(seq_len=256, global_batch=32, precision=Precision.named("bf16"))
    cluster = load_cluster("own.json")
    request = Request(model=load_model("tiny-llama"), cluster=cluster, workload=workload, engines=("torch",))
    return plan_at(request, Candidate.parse("tp=2,pp=1,dp=2,mbs=8"))


@pytest.mark.slow
def test_runs_on_the_file_of_this_machine_come_with_it_and_nothing_of_the_owners(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = on_own_file("nvidia-l40s")
    run_folder(Path("runs/a"), plan, platform="nvidia-l40s")
    row = encode(
        row_of(plan, Occasion(name="a", step_time_s=0.5, date="2026-11-24", versions="", platform="nvidia-l40s"))
    )
    Path("runs/a/measured.jsonl").write_text(json.dumps(row), encoding="utf-8")
    Path("runs/a/cluster.json").write_text(Path("own.json").read_text("utf-8"), encoding="utf-8")
    assert typed("validate runs/a")[::2] == (0, ""), "rows beside their cluster file can be read"
    assert "is a cluster of your own" in typed("contribute runs/a")[2]
    l40s = Gpu(
        name="NVIDIA L40S", memory_bytes=47_000_000_000, capability=(8, 9), multiprocessors=142, clock_hz=2.52e9,
        memory_bytes_per_s=864e9,
    )  # fmt: skip
    monkeypatch.setattr("autoshard.runtime.here._gpus", lambda: [l40s] * 4)
    code, out, err = typed("contribute runs/a")
    text = Path("contribution.jsonl").read_text(encoding="utf-8")
    assert (code, err) == (0, "") and not secrets_in(text + out)
    assert json.loads(text)["cluster"]["chip"]["memory_bytes"] == 47_000_000_000
    (one,) = json.loads(typed("validate contribution.jsonl --json")[1])["rows"]
    assert one["predicted_step_time_s"] > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "rehearsal"}, "is of a rehearsal"),
        ({"platform": "acme-lab"}, "platform: is a cluster of your own"),
        ({"candidate": "tp=2,pp=1,dp=2,mbs=8,kernels=acme"}, "candidate: there is no table 'acme'"),
        ({"step_time_s": None}, "step_time_s: is missing"),
    ],
)
def test_a_run_without_rows_for_others_says_why(changes: dict[str, Any], says: str, typed: Typed) -> None:
    run_folder(Path("run"), planned(), **changes)
    code, out, err = typed("contribute run")
    assert (code, out) == (2, "") and "holds no measured row that can be used" in err and says in err
    assert not Path("contribution.jsonl").exists()


def test_one_bad_row_of_many_is_left_out_and_the_code_says_so(typed: Typed) -> None:
    run_folder(Path("runs/a"), planned())
    run_folder(Path("runs/b"), planned(), platform="acme-lab")
    code, _, err = typed("contribute runs")
    assert code == 1 and "left out runs/b/measured.jsonl line 1: platform" in err
    assert len(Path("contribution.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert "unended" not in typed("contribute runs/none")[2] and typed("contribute runs/none")[0] == 2
