"""Data sets and tokenizers of a hub, and every way in which it can refuse: a server on loopback stands for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.runtime.data.hub import is_hub_id
from autoshard.runtime.data.manifest import NAME, read_manifest
from tests.runtime.cases import environment
from tests.runtime.data.hub_server import REVISION, Hub, serving
from tests.runtime.data.small_tokenizer import write_tokenizer

LINES = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(200)).encode()
DATA = "datasets/me/small/data/train.jsonl"


def tokenize(hub: Hub, folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as a user who has never been here."""
    kept = {name: value for name, value in environment().items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-m", "autoshard.cli", "tokenize", *arguments, "--out", str(folder / "out"), "--workers", "1"],
        env=kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf")} | more,
        capture_output=True,
        text=True,
        check=False,
    )


def refusal(hub: Hub, folder: Path, *arguments: str, **more: str) -> str:
    done = tokenize(hub, folder, *arguments, **more)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("autoshard: ")]
    return said


def test_a_set_and_a_tokenizer_of_a_hub_are_downloaded(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    files = {f"me/tok/{path.name}": path.read_bytes() for path in tokenizer.iterdir()}
    with serving(Hub(files=files | {DATA: LINES})) as hub:
        done = tokenize(hub, tmp_path, "me/small", "--tokenizer", "me/tok")
        assert done.returncode == 0, done.stderr
        manifest = read_manifest(tmp_path / "out" / NAME)
        assert (manifest.source, manifest.revision) == ("me/small/train", REVISION)
        assert (manifest.num_documents, manifest.tokenizer.name) == (200, "me/tok")
        said = refusal(hub, tmp_path, "me/small", "--tokenizer", "bytes", "--split", "test")
        assert "me/small: Unknown split" in said and "See --subset and --split" in said
    assert tokenize(hub, tmp_path, "me/small", "--tokenizer", "me/tok", HF_HUB_OFFLINE="1").returncode == 2, (
        "no revision"
    )


REFUSALS = {
    "missing": ({}, "me/none", {}, "there is no {url}/datasets/me/none, or it is private", "hf auth login"),
    "no token": (
        {"refuse": (401, "RepoNotFound")},
        "me/small",
        {},
        "or it is private, or your token is wrong",
        "HF_TOKEN",
    ),
    "gated": (
        {"refuse_files": (401, "GatedRepo")},
        "me/small",
        {},
        "needs a token and an accepted licence",
        "{url}/datasets",
    ),
    "gated, not accepted": (
        {"refuse_files": (403, "GatedRepo")},
        "me/small",
        {"HF_TOKEN": "hf_x"},
        "its licence is not accepted by the account of your token",
        "Accept it at {url}/datasets/me/small",
    ),
    "forbidden": (
        {"refuse": (403, "")},
        "me/small",
        {"HF_TOKEN": "hf_x"},
        "your token may not read it",
        "Ask its owner",
    ),
    "down for now": ({"refuse": (503, "")}, "me/small", {}, "answers 503", "Start the same command again later"),
    "no data": ({"files": {"datasets/me/small/a.bin": b""}}, "me/small", {}, "cannot be read: ", "me/small"),
}


@pytest.mark.parametrize(("change", "source", "more", "said", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_set_is_one_message_with_the_remedy(tmp_path: Path, change, source, more, said, remedy) -> None:
    with serving(Hub(**({"files": {DATA: LINES}} | change))) as hub:
        found = refusal(hub, tmp_path, source, "--tokenizer", "bytes", **more)
    assert said.format(url=hub.url) in found and remedy.format(url=hub.url) in found


def test_a_gated_tokenizer_is_one_message_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with serving(Hub(files={"me/tok/tokenizer.json": b"{}"}, refuse_files=(401, "GatedRepo"))) as hub:
        said = refusal(hub, tmp_path, str(tmp_path / "a.txt"), "--tokenizer", "me/tok")
        assert f"me/tok: needs a token and an accepted licence. Accept it at {hub.url}/me/tok" in said
        hub.refuse_files = None
        assert "me/old: has no tokenizer.json" in refusal(
            hub, tmp_path, str(tmp_path / "a.txt"), "--tokenizer", "me/old"
        )


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with serving(Hub(files={})) as hub:
        pass
    said = refusal(hub, tmp_path, "me/small", "--tokenizer", "bytes")
    assert f"{hub.url} cannot be reached" in said and "HF_ENDPOINT" in said and "give the folder" in said


@pytest.mark.slow  # the library tries it again for 8 s
def test_a_download_that_breaks_off_is_said_and_the_next_start_ends_it(tmp_path: Path) -> None:
    with serving(Hub(files={DATA: LINES}, breaks_after=2000)) as hub:
        said = refusal(hub, tmp_path, "me/small", "--tokenizer", "bytes")
        assert f"the download from {hub.url} broke off. Start the same command again" in said
        hub.breaks_after = None
        assert tokenize(hub, tmp_path, "me/small", "--tokenizer", "bytes").returncode == 0


@pytest.mark.parametrize(("text", "known"), [("wikitext", True), ("a/b-c.d", True), ("a/b/c", False), ("./a", False)])
def test_ids_are_told_from_paths(text: str, known: bool) -> None:
    assert is_hub_id(text) == known
