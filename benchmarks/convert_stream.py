"""How fast weights are converted, beside a plain copy of the same bytes, and in how much memory."""

# pyright: basic
# torch's own signatures are only partly typed.

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autoshard.engine.hf_names import HfNames
from autoshard.errors import RunFailed
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump
from autoshard.runtime.checkpoint.files import header_of
from autoshard.runtime.convert.hf import hf_outputs, hf_source
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_config, load_model
from autoshard.spec.workload import Precision, Workload
from benchmarks.measure import forget_pages, plain_copy, yardstick_s
from benchmarks.result import Result

CARD, LAYOUT = "llama3-8b", "tp=8,pp=4,dp=1"
FEW_LAYERS = 4  # where the disk is short: 3.9 GB, half of them embeddings
BAR, MEMORY_BAR_MIB = 2.0, 1536
ROUNDS = 1
_LOOK_S = 0.02  # between two looks at a process's memory
_BLOCK_BYTES = 2**26
_SHARE = 4  # of the disk's room: source, copy, conversion, and as much again for others


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A conversion, and a copy of what it reads just before, both until all is on the disk."""

    direction: str
    num_bytes: int
    copy_s: float
    convert_s: float
    cpu_s: float  # of the conversion, with the start of Python
    peak_bytes: int  # RssAnon of the process

    @property
    def ratio(self) -> float:
        """How many times as long as the copy."""
        return self.convert_s / self.copy_s


def run() -> Result:
    """Measure the whole model where the disk has room for it, or one of few layers."""
    whole = load_model(CARD)
    free_bytes = shutil.disk_usage(Path.cwd()).free
    model = whole if free_bytes > _SHARE * 2 * whole.num_parameters else replace(whole, num_layers=FEW_LAYERS)
    return judge(measured(model, ROUNDS))


def measured(model: ModelSpec, rounds: int, layout: str = LAYOUT) -> tuple[Round, ...]:
    """Convert to NxD's files and to a checkpoint of autoshard, and back; each result equals what it was made of."""
    with tempfile.TemporaryDirectory(prefix="convert-stream-", dir=Path.cwd()) as name:
        folder = Path(name)
        source = write_source(folder / "source", model)
        plan = folder / "plan.json"
        plan.write_text(dump(_plan(load_model(source), layout)), encoding="utf-8")
        return tuple(
            one for _ in range(rounds) for form in ("nxd", "autoshard") for one in _there_and_back(source, plan, form)
        )


def write_source(folder: Path, model: ModelSpec) -> Path:
    """Write a folder of random BF16 weights; the same numbers come again after 64 MiB, elsewhere in every tensor."""
    folder.mkdir()
    config = {**load_config(CARD), "num_hidden_layers": model.num_layers, "hidden_size": model.hidden}
    config |= {"intermediate_size": model.ffn, "vocab_size": model.vocab, "head_dim": model.head_dim}
    config |= {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = HfNames.of("llama", model)
    block = torch.randint(0, 2**15, (_BLOCK_BYTES // 2,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    raw = (block & 0x3FFF).numpy().tobytes()  # no infinities
    outputs = hf_outputs("llama", model, dict.fromkeys((row.ours for row in names.rows), torch.bfloat16))
    for output in outputs:
        head, _ = header_of(((one.name, one.dtype, one.shape) for one in output.entries), {"format": "pt"})
        with (folder / output.file).open("wb") as file:
            file.write(head)
            for entry in output.entries:
                _write_repeated(file, raw, 2 * (hash_of(entry.name) % (_BLOCK_BYTES // 2)), entry.num_bytes)
            os.fsync(file.fileno())
    if len(outputs) > 1:
        weight_map = {entry.name: one.file for one in outputs for entry in one.entries}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def hash_of(name: str) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(name.encode(), "little") % (2**61 - 1)


def _write_repeated(file, raw: bytes, start: int, num_bytes: int) -> None:
    view = memoryview(raw)
    while num_bytes:
        part = view[start : start + num_bytes]
        file.write(part)
        num_bytes, start = num_bytes - len(part), 0


def _plan(model: ModelSpec, layout: str):
    candidate = Candidate.parse(layout)
    workload = Workload(seq_len=8192, global_batch=64, precision=Precision.named("bf16"))
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    return plan_at(Request(model=model, cluster=cluster, workload=workload, engines=("torch",)), candidate)


def _there_and_back(source: Path, plan: Path, form: str) -> Iterator[Round]:
    there, back = source.parent / form, source.parent / f"from-{form}"
    yield _pair(source, there, f"to {form}", "--to", form, "--plan", str(plan))
    yield _pair(there, back, f"from {form}")
    shutil.rmtree(there)
    _refuse_difference(source, back)
    shutil.rmtree(back)


def _pair(source: Path, target: Path, direction: str, *options: str) -> Round:
    files = [one for one in source.rglob("*") if one.is_file()]
    copy_s = _copied_s(files, target.with_name("copy"))
    for file in files:
        forget_pages(file)
    convert_s, cpu_s, peak_bytes = _converted(source, target, options)
    num_bytes = sum(file.stat().st_size for file in files)
    return Round(
        direction=direction, num_bytes=num_bytes, copy_s=copy_s, convert_s=convert_s, cpu_s=cpu_s, peak_bytes=peak_bytes
    )


def _copied_s(files: Sequence[Path], target: Path) -> float:
    """Copy files one after the other, each until it is on the disk."""
    target.mkdir()
    for file in files:
        forget_pages(file)
    start_s = time.perf_counter()
    for number, file in enumerate(files):
        plain_copy(file, target / str(number))
    copy_s = time.perf_counter() - start_s
    shutil.rmtree(target)
    return copy_s


def _converted(source: Path, target: Path, options: Sequence[str]) -> tuple[float, float, int]:
    """Run the command; look at its own memory while it runs."""
    command = [sys.executable, "-m", "autoshard.cli", "convert", str(source), str(target), *options, "--json"]
    start_s, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while True:
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(_LOOK_S)
        time_s = time.perf_counter() - start_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RunFailed(f"{' '.join(command)}: {output.read()}")
    return time_s, usage.ru_utime + usage.ru_stime, peak


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def _refuse_difference(first: Path, last: Path) -> None:
    left, right = (hf_source(path, "llama", load_model(path)) for path in (first, last))
    for one, other in zip(*(sorted(side.stored, key=lambda one: one.name) for side in (left, right)), strict=True):
        if one.name != other.name or not torch.equal(one.read().view(torch.int16), other.read().view(torch.int16)):
            raise RunFailed(f"{one.name} is not what it was")


def judge(found: Sequence[Round]) -> Result:
    """No conversion takes more than twice the time of a copy, nor much memory."""
    slowest = max(one.ratio for one in found)
    peak_mib = max(one.peak_bytes for one in found) / 2**20
    extras: dict[str, float | int | str | bool | None] = {}
    for one in found:
        direction = one.direction.replace(" ", "_")
        extras |= {
            f"{direction}_ratio": round(one.ratio, 3),
            f"{direction}_s": round(one.convert_s, 2),
            f"{direction}_cpu_s": round(one.cpu_s, 2),
        }
        extras |= {f"{direction}_copy_s": round(one.copy_s, 2), f"{direction}_peak_mib": round(one.peak_bytes / 2**20)}
    return Result(
        name="convert_stream",
        value=round(slowest, 3),
        unit="times as long as a plain copy, the slowest conversion",
        bar=BAR,
        holds=slowest <= BAR and peak_mib <= MEMORY_BAR_MIB and not math.isnan(slowest),
        extras={
            "peak_mib": round(peak_mib),
            **extras,
            "read_gb": round(min(one.num_bytes for one in found) / 1e9, 2),
            "yardstick_s": yardstick_s(),
        },
    )
