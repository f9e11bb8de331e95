"""From a file with a module to a plan, a run, checkpoints, another plan, and back into the module."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

from autoshard.layout.shards import Executor
from tests.conftest import Typed
from tests.modules.training.own_decoders import Gpt, first_dense
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SOURCE = """
import torch
import autoshard
from torch.nn import functional
from tests.modules.training.own_decoders import Encoder, Gpt, Llama, Experts, Smoothed, Told, Typed, first_dense

def gpt():
    return Gpt(layers=2)

def placed():
    model = Gpt(layers=2)
    model.places.weight.requires_grad_(False)
    return model

class Centred(Gpt):
    def forward(self, tokens):
        x = self.words(tokens)
        x = x - x.mean(0, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))

def centred():
    return Centred(layers=2)

class Counted(Gpt):
    def __init__(self):
        super().__init__(layers=2)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, tokens):
        self.seen += 1
        return super().forward(tokens)

def counted():
    return Counted()

def smoothed():
    return Smoothed(layers=2)

def told():
    return Told(layers=2)

class Hiding(Encoder):
    def forward(self, tokens):
        hidden = torch.rand(tokens.shape, device=tokens.device) < 0.3
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(torch.where(hidden, 0, tokens)) + self.places(where)
        for layer in self.layers:
            x = layer(x)
        logits = self.out(self.norm(self.turn(x))) + self.bias
        return functional.cross_entropy(logits.flatten(0, 1), torch.where(hidden, tokens, -100).flatten())

def hiding():
    return Hiding()

class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 64) / 64
    @staticmethod
    def backward(ctx, gradient):
        return gradient

@autoshard.local("batch seq hidden -> batch seq hidden")
def bent(x):
    return Bent.apply(x)

class Bending(Gpt):
    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = bent(layer(x))
        return self.out(self.norm(x))

def bending():
    return Bending(layers=2)
"""
ASKED = "--cluster local --ranks 2 --seq-len 16 --global-batch 8 --precision fp32"


@pytest.fixture(autouse=True)
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def losses(folder: str) -> dict[int, float]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return {step["step"]: step["loss"] for step in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_goes_on_under_another_plan_and_ends_in_the_module(typed: Typed):
    assert typed(f"plan --module mine.py:gpt {ASKED} --fix tp=2 --out wide.json")[0] == 0
    assert typed(f"plan --module mine.py:gpt {ASKED} --fix pp=2,vp=1,mbs=2 --out long.json")[0] == 0
    steps = "--learning-rate 0.003 --schedule.warm-up-steps 0"
    for plan, number, folder in (("wide", 3, "runs/both"), ("long", 6, "runs/both"), ("long", 6, "runs/long")):
        typed.answer(f"run {plan}.json --steps {number} --out {folder} {steps}")
    both, long = losses("runs/both"), losses("runs/long")
    assert [*both] == [*long] == [1, 2, 3, 4, 5, 6]
    assert all(abs(both[step] - long[step]) < 1e-4 for step in both)
    for name in ("both", "long"):
        assert typed(f"convert runs/{name} {name}.pt")[0] == 0
    states = [torch.load(f"{name}.pt") for name in ("both", "long")]
    module = Gpt(layers=2)
    begun = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(states[0])
    # Keys have biases without a gradient, of which AdamW makes steps out of what rounding leaves.
    weights = [name for name in begun if not name.endswith("attention.bias")]
    assert all((states[0][name] - states[1][name]).abs().max() < 1e-3 for name in weights)
    assert all((states[0][name] != begun[name]).any() for name in begun)
    assert "Name a target model.pt or model.safetensors" in typed.refusal("convert runs/both folder")
    assert typed("convert runs/both both.safetensors")[0] == 0
    again = Gpt(layers=2)
    load_model(again, "both.safetensors")  # which has the tied weight once
    assert all(torch.equal(tensor, states[0][name]) for name, tensor in again.state_dict().items())


@pytest.mark.slow
@pytest.mark.ranks
def test_an_encoder_that_hides_words_is_planned_proven_trained_and_goes_on_under_another_plan(typed: Typed):
    for name, sizes in (("long", "pp=2,vp=1,mbs=2"), ("wide", "tp=2,mbs=2"), ("two", "dp=2,mbs=2")):
        code, out, err = typed(f"plan --module mine.py:hiding {ASKED} --fix {sizes} --out {name}.json")
        assert code == 0 and "cannot train" not in " ".join(out.split()), err
    for name in ("wide", "two"):  # with a small hidden size that is that of the dim between the products, and not
        code, out, err = typed(f"verify {name}.json --json")
        assert code == 0 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12, err
    assert typed("run two.json --dry-run")[0] == 0
    steps = "--learning-rate 0.003 --schedule.warm-up-steps 0"
    for plan, number, folder in (("long", 3, "runs/both"), ("wide", 6, "runs/both"), ("long", 6, "runs/long")):
        typed.answer(f"run {plan}.json --steps {number} --out {folder} {steps}")
    both, long = losses("runs/both"), losses("runs/long")
    assert [*both] == [*long] == [1, 2, 3, 4, 5, 6]
    assert all(abs(both[step] - long[step]) < 1e-4 for step in both)
    assert "read off a module's code" in typed.refusal("generate runs/long --prompt a")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["told", "bending"])
def test_targets_of_a_module_are_the_next_tokens_and_marked_functions_of_its_file_are_run(name: str, typed: Typed):
    assert typed(f"plan --module mine.py:{name} {ASKED} --fix tp=2,mbs=2")[0] == 0
    code, out, err = typed("verify plan.json --json")
    assert code == 0 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12, err
    assert typed("run plan.json --steps 6 --learning-rate 0.01 --schedule.warm-up-steps 0 --out runs/one")[0] == 0
    by_step = losses("runs/one")
    assert by_step[6] < by_step[1] - 0.05  # the tokens of a run without data follow one another


@pytest.mark.slow
def test_a_loss_of_the_code_is_no_mean_over_answers_and_needs_two_sequences(typed: Typed):
    code, out, err = typed(f"plan --module mine.py:smoothed {ASKED} --fix dp=1,tp=2,mbs=1 --out few.json")
    assert code == 0 and "is a mean over two sequences, of which a micro-batch has one" in " ".join(out.split()), err
    assert typed(f"plan --module mine.py:smoothed {ASKED} --fix tp=2,mbs=2")[0] == 0
    Path("text.txt").write_text("word " * 200)
    code, _, err = typed("run plan.json --steps 1 --data.set text.txt --data.loss-on answers")
    assert code == 2 and "data.loss_on: is answers, and code that makes its own loss" in err, err


def names_of(state: dict[str, torch.Tensor], *without: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in without}


@pytest.mark.slow
@pytest.mark.ranks
def test_the_state_of_a_module_becomes_a_checkpoint_with_which_a_run_begins(typed: Typed):
    assert typed(f"plan --module mine.py:first_dense {ASKED} --fix pp=2,vp=1,mbs=2")[0] == 0
    torch.manual_seed(3)
    module = first_dense()
    torch.save(module.state_dict(), "mine.pt")
    typed.answer("convert mine.pt weights --plan plan.json")
    assert typed("run plan.json --steps 1 --learning-rate 1e-12 --init-weights weights --out runs/begun")[0] == 0
    assert typed("convert runs/begun back.pt")[0] == 0
    back = torch.load("back.pt")
    assert all(torch.allclose(back[name], tensor, atol=1e-6) for name, tensor in module.state_dict().items())


@pytest.mark.slow
def test_the_state_of_another_module_is_no_checkpoint(typed: Typed):
    assert typed(f"plan --module mine.py:gpt {ASKED} --fix dp=2")[0] == 0
    state = Gpt(layers=2).state_dict()
    second = {"more.weight": torch.zeros(2)}
    wrong = {"names": {**names_of(state, "places.weight"), **second}, "shape": {**state, "norm.weight": torch.ones(3)}}
    said = {
        "names": "names.pt: is not the state of gpt: it lacks places.weight, and has more.weight beside it",
        "shape": "norm.weight: has shape (3,), the model asks for (32,)",
    }
    for name, tensors in wrong.items():
        torch.save(tensors, f"{name}.pt")
        assert said[name] in typed.refusal(f"convert {name}.pt weights --plan plan.json")
    code, _, err = typed("convert shape.pt weights.pt --plan plan.json")
    assert code == 2 and "only a file model.pt or model.safetensors becomes its checkpoint" in err
    torch.save(names_of(state, "out.weight"), "tied.pt")  # which is that of the words
    assert typed("convert tied.pt weights --plan plan.json")[0] == 0


@pytest.mark.parametrize(
    ("name", "why"),
    rest_is_slow(
        [
            ("centred", "joins tokens of several sequences"),
            ("counted", "seen: is a buffer that forward changes"),
        ],
        slow=1,
    ),
)
def test_what_no_run_can_train_is_said_when_it_is_planned_and_refused_when_it_is_run(name: str, why: str, typed: Typed):
    assert why in " ".join(typed.answer(f"plan --module mine.py:{name} {ASKED} --fix dp=2").split())
    code, out, _ = typed("run plan.json --steps 2")
    assert code == 1 and why in " ".join(out.split())
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.ranks
def test_code_that_changed_after_it_was_planned_or_that_no_plan_names_is_not_run(typed: Typed):
    assert typed(f"plan --module mine.py:gpt {ASKED} --fix dp=2")[0] == 0
    Path("mine.py").write_text(SOURCE.replace("Gpt(layers=2)", "Gpt(layers=3)", 1))
    code, _, err = typed("run plan.json --steps 2")
    assert code == 2 and "the code of mine.py:gpt has 3 layers now. Plan again with autoshard plan --module" in err
    Path("mine.py").write_text(
        SOURCE.replace("return Gpt(layers=2)", "m = Gpt(layers=2); m.norm.eps = 1e-3; return m", 1)
    )
    code, _, err = typed("run plan.json --steps 2 --out runs/other")
    assert code == 2 and "code.fingerprints.head: is of other code than mine.py:gpt is now, or" in err
    data = json.loads(Path("plan.json").read_text())
    del data["code"]
    Path("plan.json").write_text(json.dumps(data))
    code, out, _ = typed("run plan.json --steps 2")
    assert code == 1 and "does not say where it is. Plan it with autoshard plan --module" in " ".join(out.split())


def counting_twice(executor: Executor, collective: Any, shards: Any, dims: Any, run: Any = Executor.run) -> Any:
    total = run(executor, collective, shards, dims)
    return tuple(2 * part for part in total) if collective.kind == "all_reduce" else total


@pytest.mark.slow
@pytest.mark.ranks
def test_layouts_of_code_are_proven_a_wrong_sum_is_found_and_an_edited_line_refused_with_the_right_one(typed: Typed):
    assert typed(f"plan --module mine.py:gpt {ASKED} --fix tp=2 --out plan.json")[0] == 0
    code, out, err = typed("verify plan.json --json")
    proof = json.loads(out)["code"]
    assert code == 0 and [block["name"] for block in proof["blocks"]] == ["embed", "layer", "head"], err
    assert max(block["error"] for block in proof["blocks"]) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "run", counting_twice)
        code, out, _ = typed("verify plan.json --json")
    assert code == 1 and max(block["error"] for block in json.loads(out)["code"]["blocks"]) > 1e-3
    before = Path("plan.json").read_text()
    data = json.loads(before)
    lines = data["code"]["strategies"]["layer"]
    name = next(name for name, line in lines.items() if "reduce" in line)
    lines[name] = lines[name].partition(" | ")[0]
    Path("plan.json").write_text(json.dumps(data))
    code, _, err = typed("run plan.json --steps 2")
    assert code == 2 and f"code.strategies.layer.{name}" in err
    lines[name] = json.loads(before)["code"]["strategies"]["layer"][name]
    lines = data["code"]["strategies"]["embed"]  # the head keeps its part of the words' width
    lines["words"] = "[vocab/tp, hidden], [batch, seq] -> [batch, seq, hidden] +tp"
    changed = "F reduce_scatter hidden/tp | I all_gather hidden/tp"
    lines["words_out"] = f"[batch, seq, hidden] +tp -> [batch, seq, hidden/tp] | {changed}"
    Path("plan.json").write_text(json.dumps(data))
    for command in ("run plan.json --steps 2", "verify plan.json"):
        code, _, err = typed(command)
        assert code == 2 and "code.strategies: head.words.weight is [vocab, hidden/tp], but shares" in err


@pytest.mark.slow
def test_no_program_that_knows_models_by_name_gets_a_plan_of_code(typed: Typed):
    assert typed(f"plan --module mine.py:first_dense {ASKED} --fix dp=2")[0] == 0
    for program in ("nxdt", "megatron"):
        code, _, err = typed(f"export plan.json --to {program}")
        assert code == 2 and err.count("autoshard:") == 1 and "knows models by name. Use autoshard run" in err


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_code_that_casts_is_proven_in_double(precision: str, typed: Typed):
    asked = ASKED.replace("fp32", precision)
    assert typed(f"plan --module mine.py:Typed {asked} --fix tp=2")[0] == 0
    out = typed.answer("verify plan.json --json")
    assert max(block["error"] for block in json.loads(out)["code"]["blocks"]) < 1e-12
