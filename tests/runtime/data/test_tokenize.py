"""``autoshard tokenize``: forms of text, processes, kills, and what is said when something is wrong."""

import errno
import fcntl
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.runtime.data import documents
from autoshard.runtime.data.indexed import IndexedWriter
from autoshard.runtime.data.opened import NAME, open_source, read_manifest
from autoshard.spec.training import DataSpec
from tests.runtime.cases import children_of, environment, is_alive, wait_until
from tests.runtime.data.small_tokenizer import write_tokenizer

TEXTS = ["the first document", "größer 🙂", "", "the last\nof them"]
EXPECTED = [token for text in TEXTS if text for token in (*text.encode(), 256)]
TALKS = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(9)]


def write_jsonl(path: Path, texts: Sequence[object] = TEXTS, field: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)), encoding="utf-8"
    )
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [*TEXTS, None]}), path, row_group_size=2)
    return path


def write_gz(path: Path) -> Path:
    plain = write_jsonl(path.with_suffix(""))
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "notes.md").write_text("is not read")
    return folder


def tokens_of(folder: Path) -> list[int]:
    spec = DataSpec(sets={str(folder): 1})
    samples = open_source(spec, seq_len=10_000, vocab=512, seed=0, separate=False).samples(0, 1)
    return samples.tokens[0, : 1 + samples.counted[0].sum()].tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet"), (write_gz, "a.jsonl.gz"), (write_texts, "texts")],
)
def test_every_form_of_text_gives_the_same_tokens(tmp_path: Path, write, name: str, capsys) -> None:
    assert tokens_of(tokenized(write(tmp_path / name), tmp_path / "out")) == EXPECTED
    assert "3 documents, 50 tokens" in (said := capsys.readouterr().out) and " without text w" in said
    manifest = read_manifest(tmp_path / "out" / NAME)
    assert (manifest.tokenizer.name, manifest.tokenizer.vocab, manifest.tokenizer.eos) == ("bytes", 257, 256)
    assert manifest.dtype == "uint16" and manifest.num_tokens == len(EXPECTED)
    assert {file.name for file in manifest.files} | {NAME} == set(contents(tmp_path / "out")), "nothing else is left"


def tokenized(source: Path | str, out: Path, *words: str, tokenizer: str = "bytes") -> Path:
    assert main(["tokenize", str(source), "--tokenizer", tokenizer, "--out", str(out), *words]) == 0
    return out


def test_a_pattern_and_a_field_choose_what_is_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, ["x"], field="body")
    out = tokenized(f"{tmp_path}/*.jsonl", tmp_path / "out", "--field", "body")
    assert tokens_of(out) == [*b"x", 256, *b"x", 256]


def test_conversations_get_a_mask(tmp_path: Path, capsys) -> None:
    source = write_jsonl(tmp_path / "chat.jsonl", TALKS, field="messages")
    out = tokenized(source, tmp_path / "out", "--chat", "--json")
    assert json.loads(capsys.readouterr().out)["kind"] == "chat"
    spec = DataSpec(sets={str(out): 1}, loss_on="answers")
    samples = open_source(spec, seq_len=80, vocab=512, seed=0, separate=True).samples(0, 9)
    counted = bytes(samples.tokens[:, 1:][samples.counted].tolist()).decode()
    assert sorted(counted.split("<|im_end|>\n")) == ["", *(f"{n}!" for n in range(9))]
    assert read_manifest(out / NAME).num_answers == samples.counted.sum()


def test_conversations_without_an_answer_train_nothing(tmp_path: Path, capsys) -> None:
    source = write_jsonl(tmp_path / "chat.jsonl", [[{"role": "user", "content": "?"}]] * 3, field="messages")
    out = tokenized(source, tmp_path / "out", "--chat")
    assert ", 0 of them tokens of answers, tokens of bytes" in capsys.readouterr().out
    for loss_on in ("all", "answers"):
        spec = DataSpec(sets={str(out): 1}, loss_on=loss_on)
        with nullcontext() if loss_on == "all" else pytest.raises(InputError, match="no token of its conversations"):
            open_source(spec, seq_len=80, vocab=512, seed=0, separate=True)


def test_a_tokenizer_of_the_library_gives_the_tokens_of_its_own_batches(tmp_path: Path, monkeypatch) -> None:
    from tokenizers import Tokenizer

    folder, source = write_tokenizer(tmp_path / "tokenizer"), write_jsonl(tmp_path / "a.jsonl")
    batch = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch([text for text in TEXTS if text])
    monkeypatch.chdir(tmp_path)
    for given in (folder, Path("tokenizer", "tokenizer.json")):
        out = tokenized(source, tmp_path / f"out-{given.name}", tokenizer=str(given))
        assert tokens_of(out) == [token for one in batch for token in (*one.ids, 0)]
        assert read_manifest(out / NAME).tokenizer.name == str(folder), "it leads there from every folder"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_LEAST_BYTES", 200)


@pytest.mark.usefixtures("small_pieces")
def test_any_number_of_workers_writes_the_same_bytes_and_a_line_belongs_to_one_piece(tmp_path: Path) -> None:
    texts = ["x" * length for length in (1, 300, 7, 199, 200, 201, 0, 1000, 3)]
    texts += [f"document {n} " * (n % 7) for n in range(60)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    one, three = (tokenized(source, tmp_path / workers, "--workers", workers) for workers in ("1", "3"))
    assert contents(one) == contents(three)
    assert tokens_of(one) == [token for text in texts if text for token in (*text.encode(), 256)]
    assert len(list(one.glob("*.idx"))) > 3


@contextmanager
def started(source: Path, out: Path, pause_s: float = 0.0) -> Iterator["subprocess.Popen[str]"]:
    """Tokenize with two workers and many small pieces, in a process that can be killed; it rests after each piece."""
    code = (
        "import sys, time, autoshard.runtime.data.documents as documents; documents._LEAST_BYTES = 6000\n"
        "import autoshard.runtime.data.tokenizing as tokenizing; as_they_end = tokenizing.as_they_end\n"
        f"tokenizing.as_they_end = lambda all: (time.sleep({pause_s}) or one for one in as_they_end(all))\n"
        "from autoshard.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ["tokenize", str(source), "--tokenizer", "bytes", "--out", str(out), "--workers", "2"]
    options = {"env": environment(), "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code, *command], **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_work_that_is_killed_twice_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {n} " * 30 for n in range(4000)])
    with started(source, tmp_path / "whole") as process:
        assert process.wait(120) == 0
    out = tmp_path / "out"
    for kept, number in ((2, signal.SIGKILL), (4, signal.SIGINT)):
        with started(source, out, pause_s=0.1) as process:  # 30 s for all, so that none ends before it is killed
            wait_until(lambda kept=kept: len(list(out.glob("*.done.json"))) >= kept, f"{kept} pieces were done")
            children = children_of(process.pid)
            process.send_signal(number)
            process.wait(60)
            wait_until(lambda pids=children: not any(map(is_alive, pids)), "the workers ended with their parent")
        assert not (out / NAME).exists()
    done = [out / path.name.replace(".done.json", ".bin") for path in out.glob("*.done.json")]
    before = {path: path.stat().st_mtime_ns for path in done}
    (out / ".part-00000.done.json.1.partial").write_text("{")  # as a kill leaves it in the middle of a write
    with started(source, out) as process:
        assert process.stderr is not None and "going on:" in process.stderr.read()
        assert process.wait(120) == 0
    assert contents(out) == contents(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == then for path, then in before.items()), "nothing was done twice"


def say(*arguments: str | Path, capsys) -> str:
    assert main(["tokenize", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_finished_folder_is_left_alone_and_other_work_in_it_refused(tmp_path: Path, capsys) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    before = contents(tokenized(source, out))
    assert contents(tokenized(source, out)) == before
    other = write_jsonl(tmp_path / "b.jsonl")
    assert "holds another set (source). Give another --out" in say(
        other, "--tokenizer", "bytes", "--out", out, capsys=capsys
    )
    asked = (source, "--tokenizer", "bytes", "--out", out)
    assert "holds another set (kind, field)" in say(*asked, "--chat", capsys=capsys)
    assert "holds another set (field)" in say(*asked, "--field", "body", capsys=capsys)
    os.truncate(out / "part-00000.bin", 3)
    assert "part-00000.bin: is truncated" in say(source, "--tokenizer", "bytes", "--out", out, capsys=capsys)
    source.write_text('{"text": "more"}')
    assert "holds another set (size of the source)" in say(*asked, capsys=capsys)


def test_a_finished_folder_of_other_tokens_is_refused(tmp_path: Path, capsys) -> None:
    tokenizer, source = write_tokenizer(tmp_path / "tokenizer"), write_jsonl(tmp_path / "a.jsonl")
    out = tokenized(source, tmp_path / "out", tokenizer=str(tokenizer))
    asked = (source, "--tokenizer", tokenizer, "--out", out)
    said = say(*asked, "--bos", "<s>", "--eos", "<s>", capsys=capsys)
    assert "holds another set (eos, bos). Give another --out" in said
    talks = write_jsonl(tmp_path / "chat.jsonl", TALKS, field="messages")
    chats = (talks, "--tokenizer", "bytes", "--out", tokenized(talks, tmp_path / "chats", "--chat"), "--chat")
    (tmp_path / "lines").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    assert "(chat template)" in say(*chats, "--chat-template", tmp_path / "lines", capsys=capsys)


@pytest.mark.usefixtures("small_pieces")
def test_what_is_wrong_with_text_is_said_with_its_place(tmp_path: Path, capsys) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 100] * 9)
    lines = source.read_text().splitlines()
    lines[4], lines[7] = "{", '{"text": 3}'
    source.write_text("\n".join(lines))
    out = tmp_path / "out"
    first = say(source, "--tokenizer", "bytes", "--out", out, "--workers", "2", capsys=capsys)
    assert "a.jsonl line 5: is not JSON" in first
    for number, (line, words) in enumerate(
        ((b"[" * 5000, "is nested too deeply"), (b'{"text": "\xff"}', "is not text"))
    ):
        (broken := tmp_path / f"b{number}.jsonl").write_bytes(line + b"\n")
        assert f"line 1: {words}" in say(
            broken, "--tokenizer", "bytes", "--out", tmp_path / f"o{number}", capsys=capsys
        )
    lines[4] = lines[0]
    source.write_text("\n".join(lines))
    changed = say(source, "--tokenizer", "bytes", "--out", out, capsys=capsys)
    assert "the source has changed since. Give another --out, or remove the folder" in changed
    second = say(source, "--tokenizer", "bytes", "--out", tmp_path / "2", capsys=capsys)
    assert "'text' is no text. Name another field with --field, or give --chat" in second
    with (out / "work.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process tokenizes into it" in say(source, "--tokenizer", "bytes", "--out", out, capsys=capsys)


@pytest.mark.parametrize("library", ["pyarrow", "huggingface_hub", "tokenizers"])
def test_a_library_that_is_not_installed_is_named(tmp_path: Path, library: str, capsys, monkeypatch) -> None:
    parquet, tokenizer = write_parquet(tmp_path / "a.parquet"), write_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setitem(sys.modules, library, None)
    given = {"pyarrow": (parquet, "bytes"), "huggingface_hub": ("me/set", "bytes"), "tokenizers": (parquet, tokenizer)}
    source, name = given[library]
    said = say(source, "--tokenizer", name, "--out", tmp_path / "out", capsys=capsys)
    assert f"needs {library}: pip install 'autoshard[data]'" in said


def chat_file(folder: Path) -> Path:
    return write_jsonl(folder / "chat.jsonl", [TALKS[0], [{"role": "user"}]], field="messages")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{a}", "--field", "body"], "a.jsonl line 1: has no 'body': it has id, text. Name one with --field"),
        (["{list}"], "list.jsonl line 1: has no 'text': it is no object"),
        (["{parquet}", "--field", "body"], "a.parquet: has no column 'body': it has text. Name one"),
        (["{fake}"], "fake.parquet: is not a Parquet file"),
        (["{cut}"], "cut.jsonl.gz: cannot be read"),
        (["{latin}"], "latin.txt: is not text in UTF-8"),
        (["{empty}"], "empty.txt: holds no text"),
        (["{chat}", "--chat"], "chat.jsonl line 2: messages[0].content: expected text"),
        (["{folder}/nothing.jsonl"], "nothing.jsonl: there is no such file or folder"),
        (["{folder}/*.md"], "*.md: fits no file"),
        (["{csv}"], "a.csv: is none of .txt, .jsonl"),
        (["{dir}"], "dir: is a folder without any of .txt, .jsonl"),
        (["{a}", "--tokenizer", "{dir}"], "has no tokenizer.json. Write one with transformers"),
        (["{a}", "--tokenizer", "{folder}/no/such"], "--tokenizer: there is no"),
        (["{a}", "--tokenizer", "{tokenizer}"], "--eos: {tokenizer} does not say what ends a document. Name the token"),
        (["{chat}", "--chat", "--tokenizer", "{tokenizer}"], "has no chat template. Give one in a file of Jinja"),
        (["{a}", "--eos", "x"], "takes neither --eos nor --bos"),
        (["{a}", "--workers", "0"], "--workers: must be at least 1"),
        (["{a}", "--out", "{csv}"], "is a file. Name a folder"),
        (["{a}", "--chat-template", "{csv}"], "is for conversations. Type --chat as well"),
        (["{chat}", "--chat", "--chat-template", "{folder}/no"], "there is no file"),
    ],
)
def test_wrong_input_is_one_message_with_the_remedy(tmp_path: Path, arguments, said: str, capsys) -> None:
    (tmp_path / "dir").mkdir()
    files = {"csv": b"x", "fake.parquet": b"x", "cut.jsonl.gz": gzip.compress(b"x" * 99)[:-4], "latin.txt": b"\xff"}
    files |= {"list.jsonl": b"[1]\n", "empty.txt": b""}
    for name, data in files.items():
        (tmp_path / ("a.csv" if name == "csv" else name)).write_bytes(data)
    names = {name.partition(".")[0]: tmp_path / name for name in files} | {"csv": tmp_path / "a.csv"}
    names |= {"a": write_jsonl(tmp_path / "a.jsonl"), "folder": tmp_path, "dir": tmp_path / "dir"}
    names |= {"chat": chat_file(tmp_path), "parquet": write_parquet(tmp_path / "a.parquet")}
    names |= {"tokenizer": write_tokenizer(tmp_path / "tokenizer", eos_token=None)}
    given = [argument.format(**names) for argument in arguments]
    given += [] if "--tokenizer" in given else ["--tokenizer", "bytes"]
    given += [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert said.format(**names) in say(*given, capsys=capsys)


def test_a_full_disk_is_named_with_its_file(tmp_path: Path, capsys, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write that names no file

    source, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "set"
    monkeypatch.setattr(IndexedWriter, "add", full)
    words = ("tokenize", str(source), "--tokenizer", "bytes", "--out", str(out), "--workers", "1")
    assert main(list(words)) == 2
    assert re.search(rf"{out}/\S+\.partial\.bin: No space left on device", capsys.readouterr().err)
    monkeypatch.undo()
    assert main(list(words)) == 0 and read_manifest(out / NAME).num_documents > 0
