"""What is wrong is named, what is begun goes on, nothing looks whole before it is, and little memory is used."""

import fcntl
import json
import os
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch

from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.plan.codec import dump
from autoshard.runtime.convert.copying import JOURNAL, Copying
from autoshard.runtime.convert.stored import Reference
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


def for_experts(file: Path) -> None:
    shutil.copy(file, file.with_name(file.name.replace("dp_rank_00", "dp_rank_00_ep_rank_01")))


def named_outside(file: Path) -> None:
    """As torch_xla's own serialisation names the file of a tensor, by a class that is known by its name alone."""
    reference = Reference()
    reference.tid = f"{os.pardir}/x"  # pyright: ignore[reportAttributeAccessIssue]
    module, name = Reference.__module__, Reference.__qualname__
    Reference.__module__, Reference.__qualname__ = "torch_xla.utils.serialization", "TensorReference"
    modules = {path: type(sys)(path) for path in ("torch_xla", "torch_xla.utils", Reference.__module__)}
    setattr(modules[Reference.__module__], Reference.__qualname__, Reference)
    with patch.dict(sys.modules, modules):
        torch.save({UP: reference}, file)
    Reference.__module__, Reference.__qualname__ = module, name


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
        (NXD, changing(lambda s: s.update(model=s.copy())), f"{NXD}: holds weights beside model: model.embed_"),
        (NXD, changing(lambda s: s.update(model=s.copy(), module=s.copy())), f"{NXD}: holds weights beside model: "),
        (NXD, changing(lambda s: s[UP].view(-1)[7:8].fill_(float("nan"))), f"{UP}: holds numbers that are not finite"),
        (NXD, for_experts, "_ep_rank_01_tp_rank_01_pp_rank_00.pt: its experts are cut over ep"),
        (NXD, named_outside, f"names a file that is no number: {os.pardir}/x"),
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


def test_biases_of_routers_are_not_rounded_and_layers_that_predict_further_tokens_left_out(tmp_path: Path) -> None:
    """Published files have one such layer behind the last, which belongs to no part of the model that is read."""
    first = written(tmp_path / "first", reduced("tiny-glm4-moe"))
    tensors, layers = read(first), load_model(first).num_layers
    further = {f"model.layers.{layers}.{name}": torch.ones(2) for name in ("eh_proj.weight", "mlp.gate.weight")}
    safetensors.torch.save_file(tensors | further, first / "model.safetensors", {"format": "pt"})
    converted(first, tmp_path / "half", dtype="bf16")
    found = read(tmp_path / "half")
    biases = {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert len(biases) == layers - 1 and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor if name in biases else tensor.bfloat16()
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name
    assert json.loads((tmp_path / "half" / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
    safetensors.torch.save_file(
        tensors | {f"model.layers.{layers}.mlp.gate.weight": torch.ones(2)}, first / "model.safetensors"
    )
    with pytest.raises(InputError, match="is no tensor of this model"):
        converted(first, tmp_path / "other")


@pytest.mark.parametrize("form", ["hf", "pt", "nxd"])
def test_a_head_beside_a_tied_table_must_be_the_same(form: str, tmp_path: Path) -> None:
    config = {**reduced("llama3-8b"), "tie_word_embeddings": True}
    first = written(tmp_path / "first", config)
    tensors = read(first)
    head = tensors["model.embed_tokens.weight"].clone()
    options = {"form": form, "plan": cut("tp=2,pp=2,dp=1", load_model(first)) if form == "nxd" else None}
    safetensors.torch.save_file({**tensors, "lm_head.weight": head}, first / "model.safetensors")
    converted(first, tmp_path / "last", **options)
    head[0, 0] += 1
    safetensors.torch.save_file({**tensors, "lm_head.weight": head}, first / "model.safetensors")
    with pytest.raises(
        InputError, match=r"lm_head\.weight: holds the same .* they differ\. .*tie_word_embeddings.*false"
    ):
        converted(first, tmp_path / "other", **options)


@pytest.mark.parametrize("form", ["hf", "pt", "autoshard", "nxd"])
def test_numbers_that_are_not_finite_are_refused_before_anything_has_its_name(form: str, tmp_path: Path) -> None:
    first = written(tmp_path / "first", reduced("llama3-8b"))
    tensors = read(first)
    plan = cut("tp=2,pp=2,dp=1", load_model(first)) if form == "nxd" else None
    name = "model.layers.3.self_attn.k_proj.weight"
    tensors[name][3, 4] = float("inf")
    safetensors.torch.save_file(tensors, first / "model.safetensors")
    with pytest.raises(InputError, match=rf"model\.safetensors: {name}: holds numbers that are not finite"):
        converted(first, tmp_path / "last", form=form, plan=plan)
    tensors[name][3, 4] = 1e6
    safetensors.torch.save_file(tensors, first / "model.safetensors")
    with pytest.raises(InputError, match=rf"{name}: holds numbers that are too large for f16\. Take bf16 or fp32"):
        converted(first, tmp_path / "last", form=form, plan=plan, dtype="fp16")
    assert not (tmp_path / "last" / "step-00000000").exists() and not (tmp_path / "last" / "model").exists()


@pytest.mark.parametrize(("most_bytes", "form"), [(10_000, "hf"), (10_000, "nxd"), (10_000, "autoshard"), (40, "hf")])
def test_a_full_disk_is_named_with_the_file(
    most_bytes: int, form: str, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit on the size of a file stands for a disk: both fail in a write, of which Python names no file."""
    plan = tmp_path / "plan.json"
    plan.write_text(dump(plan_of("tp=2,pp=2,dp=1", load_model(first))))
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        code = main(["convert", str(first), str(tmp_path / "last"), "--to", form, "--plan", str(plan)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert code == 2 and said.startswith(f"autoshard: {tmp_path / 'last'}"), said
    assert "File too large" in said and "the output" not in said
    if most_bytes > 1000:
        assert ".part: " in said


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


@pytest.mark.thorough
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


def test_the_plan_of_a_run_says_its_model_whatever_lies_above_its_folder(
    forms: dict[str, Path], tmp_path: Path
) -> None:
    run, model = tmp_path / "run", load_model(forms["first"])
    shutil.copytree(forms["ours"], run)
    (run / "config.json").unlink(missing_ok=True)
    (run / "plan.json").write_text(dump(plan_of("tp=2,pp=2,dp=1", model)))
    (tmp_path / "config.json").write_text(json.dumps(reduced("gpt2-xl")))
    converted(run, tmp_path / "model.pt", form="pt")
    same(torch.load(tmp_path / "model.pt", weights_only=True), read(forms["first"]))


def test_the_plan_that_is_typed_says_the_model_of_a_file_whatever_plan_lies_beside_it(
    forms: dict[str, Path], tmp_path: Path
) -> None:
    typed = plan_of("tp=2,pp=2,dp=1", load_model(forms["first"]))
    converted(forms["first"], tmp_path / "model.pt", form="pt")
    (tmp_path / "plan.json").write_text(dump(plan_of("tp=1,pp=1,dp=1", load_model("tiny-gpt"))))
    converted(tmp_path / "model.pt", tmp_path / "ours", form="autoshard", plan=typed)
    converted(tmp_path / "ours", tmp_path / "again.pt", form="pt", plan=typed)
    same(torch.load(tmp_path / "again.pt", weights_only=True), read(forms["first"]))
