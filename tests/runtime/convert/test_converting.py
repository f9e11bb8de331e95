"""What is wrong is named, what is begun goes on, nothing looks whole before it is, and little memory is used."""

import fcntl
import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.plan.codec import dump
from autoshard.runtime.convert.copying import JOURNAL, Copying
from autoshard.spec.model_catalogue import load_model
from benchmarks.convert_stream import measured
from tests.ranks.cases import plan_of
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return written(tmp_path / "first", reduced("llama3-8b"))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in every form; who spoils one copies it first."""
    folder = tmp_path_factory.mktemp("forms")
    first = written(folder / "first", reduced("llama3-8b"))
    model, text = load_model(first), "tp=2,pp=2,dp=1"
    converted(first, folder / "nxd", form="nxd", plan=cut(text, model))
    converted(first, folder / "ours", form="autoshard", plan=plan_of(text, model))
    return {name: folder / name for name in ("first", "nxd", "ours")}


def flipped(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def changing(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)

    return spoil


class Command:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def old_format(file: Path) -> None:
    torch.save({"x": torch.ones(2)}, file, _use_new_zipfile_serialization=False)


NXD, OURS = "model/dp_rank_00_tp_rank_01_pp_rank_00.pt", "step-00000000/rank-00001.safetensors"
UP = "model.layers.1.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("file", "spoil", "says"),
    [
        (NXD, Path.unlink, f"{NXD}: there is no such file, though others are of 2 tp and 2 pp ranks"),
        (NXD, shortened, f"{NXD}: is no whole file of torch.save"),
        (NXD, flipped, f"{NXD}: archive/data/"),
        (NXD, changing(lambda s: s.pop(UP)), f"{NXD}: {UP}: missing"),
        (NXD, changing(lambda s: s.update({UP: s[UP][1:]})), f"{UP}: has shape (47, 64), the model asks for (48, 64)"),
        (NXD, changing(lambda s: s.update(sth=s[UP])), f"{NXD}: sth: is no tensor of this model"),
        (NXD, changing(lambda s: s.update({UP: s[UP].to(torch.int8)})), f"{NXD}: {UP}: holds int8, and only"),
        (NXD, lambda f: torch.save({"x": Command()}, f), f"{NXD}: holds more than tensors"),
        (NXD, lambda f: torch.save([1], f), f"{NXD}: holds no state dict"),
        (NXD, old_format, f"{NXD}: is no whole file of torch.save"),
        (OURS, Path.unlink, "is damaged: rank-00001.safetensors is missing"),
        (OURS, shortened, "is damaged: rank-00001.safetensors has "),
        (OURS, flipped, "rank-00001.safetensors: weight/layer."),
    ],
)
def test_what_is_wrong_with_files_is_named(
    file: str, spoil: Callable[[Path], object], says: str, forms: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(forms["nxd" if file == NXD else "ours"], tmp_path / "copy")
    spoil(folder / file)
    with pytest.raises(InputError) as caught:
        converted(folder, tmp_path / "last")
    assert says in str(caught.value)
    assert not (tmp_path / "last").exists() and not (tmp_path / "was-run").exists()


def test_keys_whose_copies_differ_are_refused(forms: dict[str, Path], tmp_path: Path) -> None:
    plan = cut("tp=8,pp=1,dp=1", load_model(forms["first"]))
    converted(forms["first"], tmp_path / "nxd", form="nxd", plan=plan, qkv="split")
    for number, file in enumerate(sorted((tmp_path / "nxd" / "model").iterdir())):
        changing(lambda state, n=number: [one.add_(n) for name, one in state.items() if "weight_k" in name])(file)
    with pytest.raises(InputError, match=r"weight_k: its ranks hold copies of keys and values, which differ in trn1's"):
        converted(tmp_path / "nxd", tmp_path / "last")


def test_another_model_and_what_is_no_model_are_refused(forms: dict[str, Path], tmp_path: Path) -> None:
    first, other, gpt2 = forms["first"], plan_of("tp=1,pp=1,dp=1", load_model("tiny-llama")), tmp_path / "gpt2"
    nxd_plan = cut("tp=2,pp=1,dp=1", load_model(written(gpt2, reduced("gpt2-xl"))))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (first, {"plan": other, "form": "autoshard"}, "hidden: is 64 there and 128 in the plan's tiny-llama"),
        (first, {"form": "nxd"}, "--to nxd: needs --plan"),
        (forms["ours"], {"model": "tiny-llama"}, "has shape"),
        (forms["nxd"] / "model", {"form": "hf"}, "holds no weights that are known"),
        (tmp_path / "nowhere", {}, "there is no such file or folder"),
        (gpt2, {"form": "nxd", "plan": nxd_plan}, "NxD has no layout for gpt2"),
    ]
    for source, options, word in cases:
        with pytest.raises(InputError) as caught:
            converted(source, tmp_path / "last", **options)
        assert word in str(caught.value), source
    with pytest.raises(InputError, match="exists already"):
        converted(first, first)


def test_what_is_tied_padded_or_kept_elsewhere(tmp_path: Path) -> None:
    """A tied head is in NxD's files and not in ours; a run's own dtype can be asked for."""
    config = {**reduced("llama3-8b"), "tie_word_embeddings": True, "torch_dtype": "float32"}
    first = written(tmp_path / "first", config)
    converted(first, tmp_path / "nxd", form="nxd", plan=cut("tp=2,pp=2,dp=1", load_model(first)))
    state = torch.load(tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_01_pp_rank_01.pt", weights_only=True)
    table = read(first)["model.embed_tokens.weight"]
    assert torch.equal(state["lm_head.weight"][:18], table[19:]) and not state["lm_head.weight"][18:].any()
    converted(tmp_path / "nxd", tmp_path / "last", dtype="bf16")
    last = read(tmp_path / "last")
    assert "lm_head.weight" not in last and {one.dtype for one in last.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "last" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_was_written_before_a_kill_is_kept(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, real, count = cut("tp=2,pp=2,dp=1", load_model(first)), Copying._write, [0]

    def dies(self: Copying, output: Any, journal: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # so that nothing is flushed or closed
        return real(self, output, journal)

    monkeypatch.setattr(Copying, "_write", dies)
    child = os.fork()
    if child == 0:
        converted(first, tmp_path / "nxd", form="nxd", plan=plan, workers=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "nxd").exists()
    (tmp_path / "nxd.partial" / "model" / "strange.part").write_text("left by a kill")
    monkeypatch.undo()
    done = converted(first, tmp_path / "nxd", form="nxd", plan=plan)
    assert 0.3 < done.kept_bytes / done.num_bytes < 0.9
    converted(tmp_path / "nxd", tmp_path / "last")
    same(read(first), read(tmp_path / "last"))


def test_what_was_begun_from_another_source_is_not_kept_and_another_process_refused(
    first: Path, tmp_path: Path
) -> None:
    aside = tmp_path / "last.partial"
    aside.mkdir()
    with (aside / JOURNAL).open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process converts into it"):
            converted(first, tmp_path / "last")
        journal.write(json.dumps("of another") + "\n")
    (aside / "model.safetensors").write_text("of another")
    assert converted(first, tmp_path / "last").kept_bytes == 0
    same(read(first), read(tmp_path / "last"))
    assert not (tmp_path / "last" / JOURNAL).exists() and not aside.exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 630 MB, a table of 205 MB in it, in files of 39 to 316 MB, in both directions."""
    small = {"hidden": 2048, "ffn": 5632, "num_heads": 16, "num_kv_heads": 4, "num_layers": 2, "vocab": 50_000}
    small["head_dim"] = 128
    found = measured(replace(load_model("llama3-8b"), **small), 1, "tp=4,pp=2,dp=1")
    assert max(one.peak_bytes for one in found) < 400 * 2**20, found


def test_the_command_says_what_it_did_and_what_is_wrong(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(dump(plan_of("tp=2,pp=2,dp=1", load_model(first))))
    assert main(["convert", str(first), str(tmp_path / "ours"), "--plan", str(plan)]) == 0
    assert f"{tmp_path / 'ours'} (autoshard): " in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "last.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "pt"
    assert main(["convert", str(first), str(tmp_path / "ours")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(first), str(tmp_path / "x"), "--qkv", "split"]) == 2
    assert "--qkv: is for NxD files only" in capsys.readouterr().err
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    same(state, read(first))
    header = (first / "model.safetensors").read_bytes()
    (first / "model.safetensors").write_bytes(header[: 8 + struct.unpack("<Q", header[:8])[0] + 1000])
    assert main(["convert", str(first), str(tmp_path / "y")]) == 2
    assert "is no whole file of tensors" in capsys.readouterr().err
