"""Data sets and tokenizers of a hub, and every way in which it can refuse: a server on loopback stands for it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autoshard.runtime.data.documents import is_hub_id
from autoshard.runtime.data.opened import NAME, read_manifest
from tests.runtime.cases import environment
from tests.runtime.data.hub_server import REVISION, Hub, serving
from tests.runtime.data.small_tokenizer import write_tokenizer

LINES = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(200)).encode()
DATA = "datasets/me/small/data/train.jsonl"
# Runs a command for each line of its input, with what is set in the environment for it; the libraries are loaded once.
TYPES = """
import io, json, os, sys, contextlib
from autoshard.cli import main
for line in sys.stdin:
    words, more = json.loads(line)
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        os.environ.update(more)
        code = main(["tokenize", *words])
        for name in more:
            del os.environ[name]
    print(json.dumps([code, said.getvalue()]), flush=True)
"""
Types = Callable[..., tuple[int, str]]


@contextmanager
def user(hub: Hub, folder: Path, **more: str) -> Iterator[Types]:
    """Start somebody who has never been here; return how to type a command there, and hear what it says."""
    kept = {name: value for name, value in environment().items() if not name.startswith(("HF_", "HUGGING"))}
    env = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf")} | more
    command, pipe = [sys.executable, "-c", TYPES], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        given, said = process.stdin, process.stdout
        assert given and said

        def types(*words: str, **settings: str) -> tuple[int, str]:
            words = (*words, "--out", str(folder / "out"), "--workers", "1")
            given.write(json.dumps([words, settings]) + "\n")
            given.flush()
            code, text = json.loads(said.readline())
            return code, text

        yield types
        given.close()


def refusal(types: Types, *words: str, **settings: str) -> str:
    code, text = types(*words, **settings)
    assert code == 2 and "Traceback" not in text, text
    (said,) = [line for line in text.splitlines() if line.startswith("autoshard: ")]
    return said


@pytest.mark.slow
def test_a_set_and_a_tokenizer_of_a_hub_are_downloaded(tmp_path: Path) -> None:
    files = {f"me/tok/{path.name}": path.read_bytes() for path in write_tokenizer(tmp_path / "tokenizer").iterdir()}
    with serving(Hub(files=files | {DATA: LINES})) as hub, user(hub, tmp_path) as types:
        code, said = types("me/small", "--tokenizer", "me/tok")
        assert code == 0, said
        manifest = read_manifest(tmp_path / "out" / NAME)
        assert (manifest.source, manifest.revision) == ("me/small/train", REVISION)
        assert (manifest.num_documents, manifest.tokenizer.name) == (200, "me/tok")
        said = refusal(types, "me/small", "--tokenizer", "bytes", "--split", "test")
        assert "me/small: Unknown split" in said and "See --subset and --split" in said


TOKEN = {"HF_TOKEN": "hf_x"}
REFUSALS = [
    ({"refuse": (401, "RepoNotFound")}, {}, "or it is private, or your token is wrong", "HF_TOKEN"),
    ({"refuse_files": (401, "GatedRepo")}, {}, "needs a token and an accepted licence", "{url}/datasets"),
    ({"refuse_files": (403, "GatedRepo")}, TOKEN, "its licence is not accepted by", "it at {url}/datasets/me/small"),
    ({"refuse": (403, "")}, TOKEN, "your token may not read it", "Ask its owner"),
    ({"refuse": (503, "")}, {}, "answers 503", "Start the same command again later"),
    ({"files": {"datasets/me/small/a.bin": b""}}, {}, "cannot be read: ", "me/small"),
]


@pytest.mark.slow
def test_a_refused_set_or_tokenizer_is_one_message_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with serving(Hub(files={DATA: LINES})) as hub, user(hub, tmp_path) as types:
        found = refusal(types, "me/none", "--tokenizer", "bytes")
        assert f"there is no {hub.url}/datasets/me/none, or it is private" in found and "hf auth login" in found
        for change, more, said, remedy in REFUSALS:
            for name, value in change.items():
                setattr(hub, name, value)
            found = refusal(types, "me/small", "--tokenizer", "bytes", **more)
            assert said in found and remedy.format(url=hub.url) in found, change
            hub.refuse = hub.refuse_files = None
        hub.files, hub.refuse_files = {"me/tok/tokenizer.json": b"{}", "me/old/vocab.json": b"{}"}, (401, "GatedRepo")
        found = refusal(types, str(tmp_path / "a.txt"), "--tokenizer", "me/tok")
        assert f"me/tok: needs a token and an accepted licence. Accept it at {hub.url}/me/tok" in found
        hub.refuse_files = None
        found = refusal(types, str(tmp_path / "a.txt"), "--tokenizer", "me/old")
        assert "me/old: has no tokenizer.json" in found


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with serving(Hub(files={})) as hub:
        pass
    with user(hub, tmp_path) as types:
        said = refusal(types, "me/small", "--tokenizer", "bytes")
    assert f"{hub.url} cannot be reached" in said and "HF_ENDPOINT" in said and "give the folder" in said


@pytest.mark.slow  # the library tries it again for 8 s
def test_a_download_that_breaks_off_is_said_and_the_next_start_ends_it(tmp_path: Path) -> None:
    with serving(Hub(files={DATA: LINES}, breaks_after=2000)) as hub, user(hub, tmp_path) as types:
        said = refusal(types, "me/small", "--tokenizer", "bytes")
        assert f"the download from {hub.url} broke off. Start the same command again" in said
        hub.breaks_after = None
        assert types("me/small", "--tokenizer", "bytes")[0] == 0


@pytest.mark.parametrize(("text", "known"), [("wikitext", True), ("a/b-c.d", True), ("a/b/c", False), ("./a", False)])
def test_ids_are_told_from_paths(text: str, known: bool) -> None:
    assert is_hub_id(text) == known
