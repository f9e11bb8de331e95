"""What a recipe says becomes a source, or one error that names every broken file."""

import json
import os
import re
from pathlib import Path

import pytest

from autoshard.errors import InputError, RunFailed
from autoshard.runtime.checkpoint.storage import StorageError
from autoshard.runtime.data.batches import SyntheticTokens
from autoshard.runtime.data.contents import SetContents, refuse_other_contents
from autoshard.runtime.data.indexed import IndexedWriter
from autoshard.runtime.data.mixture import DataMixture
from autoshard.runtime.data.opened import (
    NAME,
    Manifest,
    TokenizerRecord,
    described,
    open_source,
    write_record,
)
from autoshard.spec import record
from autoshard.spec.training import DataSpec, Evaluating, Training
from tests.runtime.data.cases import counting, write_set


def opened(sets, *, seq_len: int = 6, vocab: int = 512, separate: bool = False, **more) -> DataMixture:
    spec = DataSpec(sets={str(name): weight for name, weight in sets.items()}, **more)
    source = open_source(spec, seq_len=seq_len, vocab=vocab, seed=0, separate=separate)
    assert isinstance(source, DataMixture)
    return source


def faults_of(*args, **kwargs) -> list[str]:
    with pytest.raises(InputError) as caught:
        opened(*args, **kwargs)
    return [str(fault) for fault in caught.value.faults]


def write_folder(folder: Path, kind: str = "text", documents=((1, 2, 3, 4), (5, 6, 7)), vocab: int = 257) -> Path:
    """A folder as `autoshard tokenize` leaves it; of a conversation all but the first token is an answer."""
    folder.mkdir()
    files = []
    for part in range(2):
        writer = IndexedWriter(folder / f"part-0000{part}", vocab, masked=kind == "chat")
        for document in documents:
            writer.add(document, [place > 0 for place in range(len(document))])
        files += map(described, writer.close())
    tokenizer = TokenizerRecord(name="small", vocab=vocab, eos=0)
    numbers = {"num_tokens": 2 * sum(map(len, documents)), "num_documents": 2 * len(documents), "num_empty": 0}
    manifest = {"schema": 1, "source": "x", "revision": None, "kind": kind, "dtype": "uint16", **numbers}
    encoded = {"tokenizer": record.encode(tokenizer), "files": [record.encode(file) for file in files]}
    write_record(record.decode(Manifest, manifest | encoded), folder / NAME)
    return folder


def test_without_sets_tokens_are_synthetic() -> None:
    source = open_source(DataSpec(), seq_len=6, vocab=512, seed=3, separate=False)
    assert source == SyntheticTokens(seq_len=6, vocab=512, seed=3)


def test_sets_whose_copies_elsewhere_stand_in_another_order_are_named(tmp_path: Path) -> None:
    texts = {"home/z/a.txt": 30, "data/b.txt": 20, "moved/home/z/a.txt": 30, "moved/data/b.txt": 20, "a/a.txt": 30}
    for name, size in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x" * size)

    def contents(*names: str) -> SetContents:
        return SetContents.of(opened({tmp_path / name: 1.0 for name in names}))

    before = contents("home/z/a.txt", "data/b.txt")
    assert before.notes(contents("moved/home/z/a.txt", "moved/data/b.txt")) == []
    (note,) = before.notes(contents("a/a.txt", "data/b.txt"))
    assert note.startswith("changed since the last start: the sets are others, or their paths have another order. Its")
    assert SetContents().notes(before) == []
    (tmp_path / "moved/data/b.txt").write_text("y" * 20)
    (note,) = before.notes(contents("moved/home/z/a.txt", "moved/data/b.txt"))
    assert "holds other tokens, though as many" in note


def test_a_set_with_other_tokens_of_the_same_size_is_told_by_spots_and_by_its_manifest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", documents=[range(1, 250)] * 20)
    whole = SetContents.of(opened({folder: 1.0}))
    assert whole.notes(SetContents.of(opened({folder: 1.0}))) == []
    tokens = folder / "part-00001.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    other = SetContents.of(opened({folder: 1.0}))
    assert whole.differing(other) == [str(folder)]
    tokens.write_bytes(content)
    listed = folder / "manifest.json"
    listed.write_text(re.sub('"sha256": "[0-9a-f]{4}', '"sha256": "0123', listed.read_text()))
    assert whole.differing(SetContents.of(opened({folder: 1.0}))) == [str(folder)]
    with pytest.raises(StorageError, match=f"{folder} holds other tokens on .* than on the node of rank 0. Copy it"):
        refuse_other_contents(other, whole, StorageError)


@pytest.mark.parametrize("given", ["set", "set.bin", "set.idx"])
def test_a_set_of_others_is_given_by_its_prefix(tmp_path: Path, given: str) -> None:
    write_set(tmp_path / "set", counting(100, [7]))
    assert sorted(opened({tmp_path / given: 1}).samples(0, 17).tokens[:, 1].tolist())[:2] == [1, 7]


def test_a_folder_is_what_its_manifest_lists_or_all_its_pairs(tmp_path: Path) -> None:
    for number in range(3):
        write_set(tmp_path / "pairs" / f"{number}", counting(10, [10]))
    (one,) = opened({tmp_path / "pairs": 1}).sets
    assert one.stream.num_tokens == 30 and len(one.cut) == 5
    folder = write_folder(tmp_path / "web")
    write_set(folder / "another", counting(10, [10]))
    assert opened({folder: 1}).sets[0].stream.num_tokens == 14


def test_a_small_text_is_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    samples = opened({tmp_path / "a.txt": 1}).samples(0, 1)
    assert samples.tokens[0].tolist() == [*b"hello\n", 256] and samples.counted.all()
    assert "takes a model of 257 tokens" in faults_of({tmp_path / "a.txt": 1}, vocab=256)[0]
    poems = Path(__file__).parents[3] / "recipes" / "data" / "poems.txt"
    assert opened({poems: 1}, seq_len=256, vocab=257).samples(0, 8).tokens.max() < 128, "plain ASCII"


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    broken, gone, foreign = (write_folder(tmp_path / name) for name in ("broken", "gone", "foreign"))
    os.truncate(broken / "part-00000.bin", 3)
    (broken / "part-00001.idx").write_bytes((broken / "part-00001.idx").read_bytes() + b"x")
    (gone / "part-00001.bin").unlink()
    write_set(tmp_path / "others", [[[1, 999]]])
    (tmp_path / "empty").mkdir()
    write_set(tmp_path / "short", [[[1]]])
    names = [broken, gone, foreign, *(tmp_path / name for name in ("others", "nothing", "empty", "short"))]
    said = "\n".join(faults_of(dict.fromkeys(names, 1), vocab=200))
    for text in (
        "broken/part-00000.bin: is truncated: copy it again",
        "3 bytes and should have 14",
        "broken/part-00001.idx: is altered",
        "gone/part-00001.bin: cannot be read: No such file or directory. The manifest lists it",
        "foreign/manifest.json: tokens of small go to 256, those of the model to 199. Tokenize with the model's",
        "others.bin: holds the token 999, and the model knows 0 to 199",
        "nothing: is neither a folder nor the prefix",
        "empty: is a folder without manifest.json and without .idx files. Make a set with `autoshard tokenize",
        "short: holds no sample",
    ):
        assert text in said


def test_a_full_check_reads_everything(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "web")
    data = bytearray((folder / "part-00001.bin").read_bytes())
    data[0] ^= 1
    (folder / "part-00001.bin").write_bytes(data)
    write_set(tmp_path / "s", [[[1] * 5000, [999]]])
    opened({folder: 1, tmp_path / "s": 1})
    other, changed = sorted(faults_of({folder: 1, tmp_path / "s": 1}, check="full"))
    assert "s.bin: holds the token 999" in other
    assert "part-00001.bin: is altered" in changed and "checksum" in changed


def test_a_foreign_token_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_set(tmp_path / "s", [[[1] * 5000 + [999]]])
    source = opened({tmp_path / "s": 1}, seq_len=5000)
    with pytest.raises(RunFailed, match=r"s\.bin: holds the token 999"):
        source.samples(0, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema: must be 1, not 2"),
        ({"files": []}, "files: must name at least one"),
        ({"dtype": "int8"}, "dtype: expected one of uint16, int32"),
        ({"more": 1}, "unknown"),
    ],
)
def test_a_broken_manifest_is_named(tmp_path: Path, change, said: str) -> None:
    folder = write_folder(tmp_path / "web")
    manifest = json.loads((folder / NAME).read_text()) | change
    (folder / NAME).write_text(json.dumps(manifest))
    (fault,) = faults_of({folder: 1})
    assert "manifest.json" in fault and said in fault


def test_conversations_are_packed_whole_and_only_answers_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sft", "chat")
    source = opened({folder: 1}, seq_len=7, loss_on="answers", separate=True)
    samples = source.samples(0, 2)
    assert samples.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]] * 2
    assert samples.document_starts.tolist() == [[0, 0, 0, 0, 4, 4, 4]] * 2
    assert samples.counted.tolist() == [[True, True, True, False, True, True, False]] * 2
    joined = opened({folder: 1}, seq_len=7).samples(0, 1)
    assert joined.counted.tolist() == [[True] * 6 + [False]], "all tokens count, padding does not"
    (fault,) = faults_of({write_folder(tmp_path / "web"): 1}, loss_on="answers")
    assert "does not know which tokens are answers. Tokenize conversations with --chat" in fault


def test_a_conversation_that_is_too_long_is_cut(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sft", "chat", documents=(tuple(range(20)), (1, 2)))
    source = opened({folder: 1}, loss_on="answers")
    samples = source.samples(0, len(source.sets[0].cut))
    labels = samples.tokens[:, 1:][samples.counted]
    assert sorted(labels.tolist()) == sorted([*range(1, 20), 2] * 2)


@pytest.mark.parametrize("weight", [0, float("nan"), float("inf")])
def test_a_recipe_states_sets_with_weights(weight: float) -> None:
    assert record.decode(DataSpec, {"sets": {"a": 7, "b": 0.3}}).sets == {"a": 7.0, "b": 0.3}
    with pytest.raises(InputError, match=r"sets\.a: the weight must be above 0"):
        DataSpec(sets={"a": weight})
    with pytest.raises(InputError, match="loss_on: answers need a set"):
        DataSpec(loss_on="answers")


def test_a_recipe_names_sets_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("recipes", "."):
        write_set(tmp_path / folder / "data" / "set", counting(9, [9]))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    sets = {"data/set": 1.0, "here": 2.0, "nowhere": 3.0}
    seen = Training(data=DataSpec(sets=sets), eval=Evaluating(sets=sets)).seen_from(Path("recipes"))
    assert seen.data.sets == seen.eval.sets == {"recipes/data/set": 1, "here": 2, "nowhere": 3}
