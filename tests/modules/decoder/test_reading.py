"""Decoders of users' functions, planned by the command: answers, plan files, and what is wrong with functions."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.errors import InputError
from autoshard.modules.decoder.reading import decoder_of
from autoshard.spec.model_catalogue import load_config
from tests.conftest import Typed
from tests.modules.decoder.decoders import FAMILIES
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SOURCE = f"""
import torch, transformers
from torch import nn
from tests.modules.decoder.decoders import FAMILIES, OwnLayer, Own

CARD = {load_config("tiny-llama")!r}

def of_a_card():
    config = transformers.AutoConfig.for_model(**CARD)
    return transformers.AutoModelForCausalLM.from_config(config)

def cohere():
    return FAMILIES["Cohere"]()

def phi():
    return FAMILIES["Phi-3"]()

def of_gpt_oss():
    config = transformers.AutoConfig.for_model(**{load_config("tiny-gpt-oss")!r})
    return transformers.AutoModelForCausalLM.from_config(config)

class SummedLayer(OwnLayer):
    def forward(self, x):
        return super().forward(x + x.cumsum(1))

def summed():
    model = Own(layers=4)
    model.blocks = nn.ModuleList(SummedLayer() for _ in range(4))
    return model

def own():
    return Own()

def with_inputs():
    return Own(), {{"tokens": torch.zeros(2, 16, dtype=torch.int64)}}

def looks_at_numbers():
    model = Own()
    assert float(model.norm.weight.sum()) == 64
    return model

def number():
    return 3

def broken():
    raise KeyError("no such size")

class Short(Own):
    def forward(self, tokens):
        assert tokens.shape[1] <= 64, "too long"
        return super().forward(tokens)

def short():
    return Short()

class Placed(Own):
    def forward(self, tokens):
        return self.out(self.words(tokens) + self.places.weight[: tokens.shape[1]])

def placed():
    return Placed()

class Branches(Own):
    def forward(self, tokens):
        x = self.words(tokens)
        return self.out(x) if x.sum() > 0 else super().forward(tokens)

def branches():
    return Branches()
"""


@pytest.fixture(autouse=True)
def a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "card"), rest_is_slow([("of_a_card", "tiny-llama"), ("of_gpt_oss", "tiny-gpt-oss")], 0)
)
def test_code_that_a_card_says_is_planned_as_the_card_is(name: str, card: str, typed: Typed):
    sizes = "--cluster local --ranks 4 --seq-len 64 --json --fix pp=1,mbs=1"
    code, of_code, _ = typed(f"plan --module mine.py:{name} {sizes} --out code.json")
    again, of_card, _ = typed(f"plan --model {card} {sizes} --out card.json")
    assert code == again == 0
    answers = [json.loads(text) for text in (of_code, of_card)]
    plans = [answer["plan"] for answer in answers]
    assert {**plans[0], **of_its_own(plans[1])} == plans[1]
    assert plans[0]["prediction"] == {**plans[1]["prediction"], "of": plans[0]["prediction"]["of"]}
    assert typed("run code.json --dry-run")[0] == 0


def of_its_own(plan: Any) -> dict[str, Any]:
    """What two plans of one model by two names do not share."""
    return {key: plan[key] for key in ("model", "prediction", "provenance")}


@pytest.mark.parametrize("name", rest_is_slow(["own", "phi", "cohere", "summed"], 0, 2))
def test_code_that_no_card_says_is_searched_explained_and_proven(name: str, typed: Typed):
    asked = "--cluster local --ranks 8 --seq-len 32 --global-batch 16 --fix tp=2,pp=2,dp=2 --out plan.json"
    out = typed.answer(f"plan --module mine.py:{name} {asked}")
    assert "pipeline 2" in out and ("not as in the code: head: mul_own" in out) == (name == "cohere")
    code, out, _ = typed("verify plan.json")
    assert code == 0 and "may run on" in out and "equal   layer" in out and "DIFFERS" not in out.upper()
    assert "layer, " in typed.answer("explain plan.json -v")
    assert "weights" in typed.answer("run plan.json --dry-run --dry-ranks 0")


@pytest.mark.slow
def test_code_that_changes_after_it_was_planned_is_told(typed: Typed):
    typed("plan --module mine.py:own --cluster local --ranks 2 --seq-len 32 --fix tp=2 --out plan.json")
    assert typed("verify plan.json --module mine.py:own")[0] == 0
    Path("mine.py").write_text(SOURCE.replace("return Own()", "return Own(layers=3)", 1))
    code, out, _ = typed("verify plan.json --module mine.py:own")
    words = " ".join(out.split())
    assert code == 1 and "the code of mine.py:own has changed: num_layers was 2 and is 3. Plan again" in words


@pytest.mark.slow
def test_an_edited_line_of_a_model_shows(typed: Typed):
    typed("plan --module mine.py:own --cluster local --ranks 2 --seq-len 32 --fix tp=2 --out plan.json")
    text = Path("plan.json").read_text()
    Path("plan.json").write_text(
        text.replace("mlp_add = Add of attn_add, down_shift", "mlp_add = Add of attn_add, downs")
    )
    code, out, _ = typed("verify plan.json")
    assert code == 1 and "refused model.traced.mlp_add: reads downs, which no line before gives" in out


def test_a_function_may_give_inputs_and_look_at_numbers():
    assert decoder_of("mine.py:with_inputs").num_layers == decoder_of("mine.py:looks_at_numbers", 32).num_layers == 2


@pytest.mark.slow
def test_a_module_at_hand_is_read_and_planned_and_stays_as_it_is():
    module: Any = FAMILIES["StableLM"]()
    module.config.use_cache = True
    model = autoshard.read_decoder(module.train(), seq_len=32)
    assert (
        model.traced
        and model.name == "StableLmForCausalLM"
        and (module.training, module.config.use_cache) == (True, True)
    )
    result = autoshard.plan(model, "local", seq_len=32, global_batch=8, fix={"tp": 2, "pp": 1, "mbs": 1})
    assert result.plan.mesh.size("tp") == 2 and result.plan.model == model


def test_a_module_that_can_be_imported_is_read():
    assert decoder_of("tests.modules.decoder.decoders:own", 32).num_layers == 2


WRONG = {
    "mine.py": "--module: mine.py names no function. Write FILE.py:FUNCTION or package.module:FUNCTION",
    "mine.py:nobody": "--module: mine.py has no function nobody",
    "nowhere.py:make": "--module: there is no file nowhere.py",
    "no.such.package:make": "--module: no.such.package cannot be imported",
    "mine.py:number": "--module: mine.py:number must return a torch.nn.Module, or a module and its inputs by name",
    "mine.py:broken": "--module mine.py:broken: raised KeyError: 'no such size'",
    "mine.py:short": 'in forward assert tokens.shape[1] <= 64, "too long": cannot be traced: AssertionError: too long',
}


@pytest.mark.parametrize("where", WRONG)
def test_what_is_wrong_with_a_function_is_told(where: str):
    with pytest.raises(InputError) as refused:
        decoder_of(where)
    assert str(refused.value).startswith("--module") and WRONG[where] in str(refused.value)


def test_a_sequence_longer_than_the_table_of_positions_is_told_without_a_stack_of_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # to what the test reads
    with pytest.raises(InputError, match="cannot be traced: RuntimeError: Attempting to broadcast"):
        decoder_of("mine.py:placed", 128)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_branch_on_numbers_is_told_with_its_line():
    with pytest.raises(InputError, match="decides by numbers that only a run knows") as refused:
        decoder_of("mine.py:branches", 32)
    assert "if x.sum() > 0" in str(refused.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("plan --module mine.py:own --model llama3-8b", "--module: is the model; leave out --model"),
        (
            "plan --cluster local",
            "--model: missing. Type a name of autoshard list models, as in autoshard plan",
        ),
        ("plan --module mine.py:own --like plan.json", "--module: has no effect beside --like"),
        (
            "plan --module mine.py:own --cluster trn1 --engine nxd --seq-len 32",
            "NxD has no layers for it",
        ),
    ],
)
def test_contradictions_are_told(line: str, told: str, typed: Typed):
    code, _, err = typed(line)
    assert code in (1, 2) and told in err
