"""What a recipe says becomes a source, or one error that names every broken file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from autoshard.errors import InputError, RunFailed
from autoshard.runtime.data.batches import SyntheticTokens
from autoshard.runtime.data.indexed import IndexedWriter
from autoshard.runtime.data.manifest import NAME, FileRecord, Manifest, TokenizerRecord, described, write_record
from autoshard.runtime.data.mixture import DataMixture
from autoshard.runtime.data.opened import open_source
from autoshard.spec import record
from autoshard.spec.training import DataSpec
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
    files: list[FileRecord] = []
    for part in range(2):
        writer = IndexedWriter(folder / f"part-0000{part}", vocab, masked=kind == "chat")
        for document in documents:
            writer.add(document, [place > 0 for place in range(len(document))])
        files += map(described, writer.close())
    manifest = {
        "schema": 1,
        "source": "x",
        "revision": None,
        "kind": kind,
        "tokenizer": record.encode(TokenizerRecord(name="small", vocab=vocab, eos=0)),
        "dtype": "uint16",
        "num_tokens": 2 * sum(map(len, documents)),
        "num_documents": 2 * len(documents),
        "num_empty": 0,
        "files": [record.encode(file) for file in files],
    }
    write_record(record.decode(Manifest, manifest), folder / NAME)
    return folder


def test_without_sets_tokens_are_synthetic() -> None:
    source = open_source(DataSpec(), seq_len=6, vocab=512, seed=3, separate=False)
    assert source == SyntheticTokens(seq_len=6, vocab=512, seed=3)


@pytest.mark.parametrize("given", ["set", "set.bin", "set.idx"])
def test_a_set_of_others_is_given_by_its_prefix(tmp_path: Path, given: str) -> None:
    write_set(tmp_path / "set", counting(100, [7]))
    assert sorted(opened({tmp_path / given: 1}).samples(0, 17).tokens[:, 1].tolist())[:2] == [1, 7]


def test_a_folder_without_a_manifest_is_all_its_pairs(tmp_path: Path) -> None:
    for number in range(3):
        write_set(tmp_path / f"{number}", counting(10, [10]))
    (one,) = opened({tmp_path: 1}).sets
    assert one.stream.num_tokens == 30 and "30 tokens, 5 samples an epoch" in str(one)


def test_a_folder_with_a_manifest_is_what_it_lists(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "web")
    write_set(folder / "another", counting(10, [10]))
    assert opened({folder: 1}).sets[0].stream.num_tokens == 14


def test_a_small_text_is_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n", encoding="utf-8")
    samples = opened({tmp_path / "a.txt": 1}).samples(0, 1)
    assert samples.tokens[0].tolist() == [*b"hello\n", 256] and samples.counted.all()
    assert "takes a model of 257 tokens" in faults_of({tmp_path / "a.txt": 1}, vocab=256)[0]


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    broken, gone, foreign = (write_folder(tmp_path / name) for name in ("broken", "gone", "foreign"))
    os.truncate(broken / "part-00000.bin", 3)
    (broken / "part-00001.idx").write_bytes((broken / "part-00001.idx").read_bytes() + b"x")
    (gone / "part-00001.bin").unlink()
    write_set(tmp_path / "others", [[[1, 999]]])
    (tmp_path / "empty").mkdir()
    names = [broken, gone, foreign, tmp_path / "others", tmp_path / "nothing", tmp_path / "empty"]
    said = "\n".join(faults_of(dict.fromkeys(names, 1), vocab=200))
    assert "broken/part-00000.bin: is truncated: copy it again" in said and "3 bytes and should have 14" in said
    assert "broken/part-00001.idx: is altered" in said
    assert "gone/part-00001.bin: cannot be read: No such file or directory. The manifest lists it" in said
    assert (
        "foreign/manifest.json: tokens of small go to 256, those of the model to 199. Tokenize with the model's" in said
    )
    assert "others.bin: holds the token 999, and the model knows 0 to 199" in said
    assert "nothing: is neither a folder nor the prefix" in said
    assert (
        "empty: is a folder without manifest.json and without .idx files. Make a set with `autoshard tokenize" in said
    )


def test_a_changed_byte_is_found_by_a_full_check(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "web")
    data = bytearray((folder / "part-00001.bin").read_bytes())
    data[0] ^= 1
    (folder / "part-00001.bin").write_bytes(data)
    opened({folder: 1})
    (fault,) = faults_of({folder: 1}, check="full")
    assert "part-00001.bin: is altered" in fault and "checksum" in fault


def test_without_a_manifest_a_full_check_reads_everything(tmp_path: Path) -> None:
    write_set(tmp_path / "s", [[[1] * 5000, [999]]])
    opened({tmp_path / "s": 1})
    (fault,) = faults_of({tmp_path / "s": 1}, check="full")
    assert "s.bin: holds the token 999" in fault


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
    assert "of whole conversations" in str(source.sets[0])
    samples = source.samples(0, 2)
    assert samples.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]] * 2
    assert samples.document_starts.tolist() == [[0, 0, 0, 0, 4, 4, 4]] * 2
    assert samples.counted.tolist() == [[True, True, True, False, True, True, False]] * 2
    joined = opened({folder: 1}, seq_len=7).samples(0, 1)
    assert joined.counted.tolist() == [[True] * 6 + [False]], "all tokens count, padding does not"


def test_a_conversation_that_is_too_long_is_cut_and_said_to_be(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sft", "chat", documents=(tuple(range(20)), (1, 2)))
    source = opened({folder: 1}, loss_on="answers")
    assert "2 longer than a sample and cut" in str(source.sets[0])
    samples = source.samples(0, len(source.sets[0].cut))
    labels = samples.tokens[:, 1:][samples.counted]
    assert sorted(labels.tolist()) == sorted([*range(1, 20), 2] * 2)


def test_answers_need_a_set_that_knows_them(tmp_path: Path) -> None:
    (fault,) = faults_of({write_folder(tmp_path / "web"): 1}, loss_on="answers")
    assert "does not know which tokens are answers. Tokenize conversations with --chat" in fault


def test_a_mask_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "s", [[[1, 2, 3]]])
    (tmp_path / "s.mask.bin").write_bytes(bytes(2))
    (fault,) = faults_of({prefix: 1})
    assert "s.mask.bin: is truncated" in fault


def test_a_set_without_a_label_is_refused(tmp_path: Path) -> None:
    assert "holds no sample" in faults_of({write_set(tmp_path / "s", [[[1]]]): 1})[0]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weights_are_positive(weight: float) -> None:
    with pytest.raises(InputError, match=r"sets\.a: must weigh more than 0"):
        DataSpec(sets={"a": weight})


def test_answers_of_synthetic_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="loss_on: answers need a set"):
        DataSpec(loss_on="answers")


def test_a_recipe_states_sets() -> None:
    spec = record.decode(DataSpec, {"sets": {"data/web": 7, "data/code": 0.3}})
    assert spec.sets == {"data/web": 7.0, "data/code": 0.3} and np.isclose(sum(spec.sets.values()), 7.3)


def test_a_recipe_names_sets_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "recipes" / "data" / "set", counting(9, [9]))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = DataSpec(sets={"data/set": 1, "here": 2, "nowhere": 3}).seen_from(Path("recipes"))
    assert spec.sets == {"recipes/data/set": 1, "here": 2, "nowhere": 3}


def test_the_text_that_comes_with_recipes_is_a_set() -> None:
    text = Path(__file__).parents[3] / "recipes" / "data" / "poems.txt"
    tokens = opened({text: 1}, seq_len=256, vocab=257).samples(0, 8).tokens
    assert tokens.max() < 128 and text.stat().st_size > 10_000, "plain ASCII"
