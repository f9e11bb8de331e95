"""A stack whose samples are no tokens, by command: planned, proven, trained on a data set of a function, and back."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import Typed
from tests.modules.training.own_samples import Diffusion, Vision
from tests.modules.training.own_translators import Translator, whisper
from tests.modules.training.test_code_commands import losses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SOURCE = """
import torch
from tests.modules.training.own_samples import diffusion, pooled, vision
from tests.modules.training.own_translators import translator, whisper

class Stripes:
    def __len__(self):
        return 12
    def __getitem__(self, number):
        image = torch.zeros(3, 16, 16)
        image[:, :: number % 3 + 1] = 1.0
        return {"images": image, "labels": number % 3}

def stripes():
    return Stripes()

def pairs():
    return [(sample["images"], sample["labels"]) for sample in map(Stripes().__getitem__, range(12))]

def narrow():
    return [(torch.zeros(3, 8, 16), 0)]

def unnamed():
    return [{"images": torch.zeros(3, 16, 16)}]

class Copies:
    def __len__(self):
        return 12
    def __getitem__(self, number):
        words = (torch.arange(12) * (number % 3 + 1)) % 48
        return {"source": words, "target": words[:9]}

def copies():
    return Copies()

def broken():
    return 5
"""
ASKED = "--cluster local --ranks 2 --global-batch 8 --precision fp32"
STEPS = "--learning-rate 0.003 --schedule.warm-up-steps 0"


@pytest.fixture(autouse=True)
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_vision_transformer_learns_from_a_data_set_goes_on_under_another_plan_and_ends_in_the_module(typed: Typed):
    for name, sizes in (("long", "pp=2,vp=1,mbs=4"), ("two", "dp=2,mbs=4")):
        code, out, err = typed(f"plan --module mine.py:vision {ASKED} --fix {sizes} --out {name}.json")
        assert code == 0 and "cannot train" not in " ".join(out.split()), err
        assert json.loads(Path(f"{name}.json").read_text())["workload"]["seq_len"] == 17
        code, out, err = typed(f"verify {name}.json --json")
        assert code == 0 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12, err
    data = "--data.set mine.py:stripes"
    for plan, number, folder in (("long", 6, "runs/both"), ("two", 12, "runs/both"), ("two", 12, "runs/two")):
        typed.answer(f"run {plan}.json --steps {number} --out {folder} {STEPS} {data}")
    both, two = losses("runs/both"), losses("runs/two")
    assert [*both] == [*two] == [*range(1, 13)]
    assert all(abs(both[step] - two[step]) < 1e-4 for step in both)
    assert two[12] < 0.7 * two[1]
    assert typed("convert runs/two two.pt")[0] == 0
    Vision().load_state_dict(torch.load("two.pt"))
    assert typed(f"run two.json --steps 12 --out runs/pairs {STEPS} --data.set mine.py:pairs")[0] == 0
    assert losses("runs/pairs") == two  # a tuple has the tensors in the order of the arguments


@pytest.mark.slow
@pytest.mark.ranks
def test_a_diffusion_transformer_hands_its_condition_on(typed: Typed):
    code, out, err = typed(f"plan --module mine.py:diffusion {ASKED} --fix pp=2,vp=1,mbs=4")
    assert code == 0 and "goes along beside the hidden state, and is planned as an input" in " ".join(out.split()), err
    code, out, err = typed("verify plan.json --json")
    assert code == 0 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12, err
    assert "saved" in typed.answer("run plan.json --dry-run")
    code, out, err = typed(f"run plan.json --steps 3 --out runs/made {STEPS}")
    assert code == 0 and "next: autoshard convert runs/made model.pt" in out and "validate" not in out, err
    assert typed("convert runs/made made.safetensors")[0] == 0
    assert len(Diffusion().state_dict())


@pytest.mark.slow
@pytest.mark.ranks
def test_an_encoder_with_a_decoder_learns_goes_on_under_another_plan_and_ends_in_the_module(typed: Typed):
    for name, sizes in (("long", "pp=2,vp=1,mbs=4"), ("wide", "tp=2,mbs=4"), ("two", "dp=2,mbs=4")):
        code, out, err = typed(f"plan --module mine.py:translator {ASKED} --fix {sizes} --out {name}.json")
        assert code == 0 and "cannot train" not in " ".join(out.split()), err
        code, out, err = typed(f"verify {name}.json --json")
        assert code == 0 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12, err
    assert typed("run long.json --dry-run")[0] == 0
    data = "--data.set mine.py:copies"
    for plan, number, folder in (("long", 4, "runs/all"), ("wide", 8, "runs/all"), ("two", 12, "runs/all")):
        typed.answer(f"run {plan}.json --steps {number} --out {folder} {STEPS} {data}")
    assert typed(f"run two.json --steps 12 --out runs/two {STEPS} {data}")[0] == 0
    parts, two = losses("runs/all"), losses("runs/two")
    assert [*parts] == [*two] == [*range(1, 13)] and two[12] < 0.5 * two[1]
    assert all(abs(parts[step] - two[step]) < 1e-4 * two[1] for step in parts)
    assert typed("convert runs/all all.pt")[0] == 0
    Translator().load_state_dict(torch.load("all.pt"))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_frozen_table_of_positions_is_what_the_code_makes_of_it(typed: Typed):
    assert typed(f"plan --module mine.py:whisper {ASKED.replace('fp32', 'bf16')} --fix pp=2,vp=1,mbs=4")[0] == 0
    code, out, err = typed("verify plan.json --json")
    assert code == 0 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12, err
    typed.answer(f"run plan.json --steps 2 --out runs/heard {STEPS}")
    assert typed("convert runs/heard heard.pt")[0] == 0
    heard, begun = torch.load("heard.pt"), whisper()[0].state_dict()
    changed = {name for name, tensor in begun.items() if (heard[name] != tensor).any()}
    assert "model.encoder.embed_positions.weight" not in changed and "model.encoder.conv1.weight" in changed


@pytest.mark.slow
def test_a_data_set_that_does_not_fit_is_refused_with_its_sample(typed: Typed):
    assert typed(f"plan --module mine.py:vision {ASKED} --fix dp=2,mbs=4")[0] == 0
    Path("text.txt").write_text("word " * 200)
    said = {
        "mine.py:narrow": "images is [3, 8, 16] of float32, and the plan has [3, 16, 16] of float32",
        "mine.py:unnamed": "sample 0 must be a mapping with images, labels, or a tuple of 2",
        "mine.py:broken": "raised TypeError: object of type 'int' has no len()",
        "mine.py:nothing": "has no function nothing",
        "text.txt": "samples bring tensors: write FILE.py:FUNCTION",
    }
    for name, why in said.items():
        assert why in " ".join(typed.refusal(f"run plan.json --steps 1 --data.set {name} --out runs/none").split())
    code, _, err = typed(f"plan --module mine.py:vision {ASKED} --seq-len 16 --out other.json")
    assert code != 0 and "a sample of vision has 17 positions. Leave --seq-len out" in " ".join(err.split()), err
