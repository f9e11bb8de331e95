"""``metrics.jsonl``: always JSON, whole up to the last step, however a run ended and wherever it goes on."""

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st

from autoshard.run.folder import METRICS
from autoshard.run.reports import NormsReport, RouterReport, TimedStep, with_nulls
from autoshard.runtime.metrics.log import MetricsLog, record_of, scalars
from tests.runtime.cases import ROOT, environment, read_metrics

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
FULL = """
import resource, signal, sys
from pathlib import Path
from autoshard.runtime.metrics.log import MetricsLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log, refused = MetricsLog(Path(sys.argv[1]) / "metrics.jsonl", 0), []
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for step in range(1, 41):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if step < 40 else most, most))
    try:
        log.append({"step": step, "loss": 1 / step})
    except OSError as error:
        refused.append(step)
print(refused)
"""


def step(number: int = 1, **fields: Any) -> TimedStep:
    return TimedStep(**({"number": number, "loss": 2.5, "norm": 1.0, "time_s": 0.5, "num_tokens": 64} | fields))


def strict(text: str) -> dict[str, Any]:
    """Read JSON as other readers do, which know no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def written(folder: Path, numbers: range) -> Path:
    log = MetricsLog(folder / "metrics.jsonl", numbers.start - 1)
    for number in numbers:
        log.append(record_of(step(number), at=0.0))
    log.close()
    return folder / METRICS


def numbers_in(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


@given(NUMBERS, NUMBERS)
def test_any_loss_and_norm_make_json(loss: float, norm: float) -> None:
    line = strict(json.dumps(with_nulls(record_of(step(loss=loss, norm=norm), at=1.5)), allow_nan=False))
    strange = line.pop("nonfinite", {})
    for name, value in (("loss", loss), ("norm", norm)):
        assert line[name] == (value if math.isfinite(value) else None)
        assert strange.get(name, str(line[name])) == str(value)


def test_what_routers_did_goes_to_the_line_and_to_trackers_as_far_as_it_is_a_number() -> None:
    router = RouterReport(busiest=1.5, entropy=math.nan, dropped=0.0, balance_loss=2.25)
    record = record_of(step(router=router), at=1.5)
    assert strict(json.dumps(with_nulls(record), allow_nan=False))["router"] == {
        "busiest": 1.5, "dropped": 0.0, "balance_loss": 2.25,
    }  # fmt: skip
    assert dict(scalars(record))["router/busiest"] == 1.5 and "router" not in record_of(step(), at=1.5)


def test_norms_by_group_go_to_the_line_and_to_trackers_as_far_as_they_are_numbers() -> None:
    norms = NormsReport(
        gradient={"layer.up.weight": 0.5, "layer.down.weight": math.inf}, weights={"layer.up.weight": 2.0}
    )
    record = record_of(step(norms=norms), at=1.5)
    written = strict(json.dumps(with_nulls(record), allow_nan=False))["norms"]
    assert written == {"gradient": {"layer.up.weight": 0.5}, "weights": {"layer.up.weight": 2.0}}
    assert dict(scalars(record))["norms/gradient/layer.up.weight"] == 0.5 and "norms" not in record_of(step(), at=1.5)


def test_the_fields_of_a_line_are_documented() -> None:
    line = with_nulls(record_of(step(loss=math.inf), at=0.0, neuron={"num_cores": 2}))
    line |= {figure.name: 0.0 for figure in fields(RouterReport)} | {"router": {}, "norms": {}}
    page = " ".join((ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8").split())
    documented = page[page.index("Fields:") : page.index("says what it was")]
    assert not [name for name in line if f"`{name}`" not in documented]


def test_trackers_get_every_number() -> None:
    found = dict(scalars(record_of(step(loss=math.nan), at=9.0, mfu=0.5, neuron={"errors": {"numerical": 2}})))
    assert math.isnan(found["loss"]) and found["updated"] == 1.0 and found["neuron/errors/numerical"] == 2.0
    assert not {"step", "at", "phase", "memory_bytes"} & set(found)


@given(st.integers(0, 2000))
def test_a_file_cut_anywhere_is_read_to_its_last_whole_line_and_continued(size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), range(1, 6))
        path.write_bytes(path.read_bytes()[:size])
        whole = numbers_in(path)
        assert whole == list(range(1, path.read_bytes().count(b"\n") + 1))
        written(Path(name), range(6, 8))
        assert numbers_in(path) == [*whole, 6, 7]


@given(st.integers(0, 8), st.binary(max_size=30))
def test_steps_that_are_done_again_are_dropped(last: int, torn: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), range(1, 7))
        with path.open("ab") as file:
            file.write(torn.replace(b"\n", b""))
        MetricsLog(Path(name) / "metrics.jsonl", last).close()
        assert numbers_in(path) == list(range(1, min(last, 6) + 1))
        assert [one.name for one in Path(name).iterdir()] == [METRICS]


def test_a_line_that_is_no_step_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path, range(1, 3))
    path.write_text(path.read_text() + "[]\n" + "[" * 5000 + "\n" + path.read_text())
    MetricsLog(tmp_path / "metrics.jsonl", 9).close()
    assert numbers_in(path) == [1, 2, 1, 2]


def test_a_full_disk_leaves_whole_lines_and_later_steps_are_kept_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    refused, path = json.loads(done.stdout), tmp_path / METRICS
    assert refused and refused[-1] == 39
    assert numbers_in(path) == [number for number in range(1, 41) if number not in refused]
