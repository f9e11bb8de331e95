"""Runs begin with what was converted, and go on with a state that was cut anew."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.plan.codec import dump
from tests.runtime.convert.cases import converted, cut
from tests.runtime.training_cases import plan_of, trained

pytestmark = pytest.mark.ranks
MODEL = "tiny-llama"


def test_a_state_that_was_cut_for_another_plan_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan, other = plan_of("tp=1,pp=1,dp=2"), plan_of("tp=2,pp=2,dp=1")
    whole = trained(plan, tmp_path / "whole", 4)
    trained(plan, tmp_path / "first", 2)
    converted(tmp_path / "first" / "checkpoints", tmp_path / "second" / "checkpoints", form="autoshard", plan=other)
    files = list((tmp_path / "second" / "checkpoints" / "step-00000002").glob("rank-*.safetensors"))
    assert len(files) == 4
    assert trained(plan, tmp_path / "second", 4).curve == {number: whole.curve[number] for number in (3, 4)}


def test_weights_of_every_form_begin_a_run_alike(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=2,dp=1", precision="fp32")
    trained(plan, tmp_path / "first", 2)
    at = tmp_path / "first" / "checkpoints"
    model = tmp_path / "config.json"
    model.write_text((Path(__file__).parents[3] / "models" / f"{MODEL}.json").read_text())
    converted(at, tmp_path / "hf", model=str(model))
    converted(tmp_path / "hf", tmp_path / "ours", form="autoshard", plan=plan)
    converted(tmp_path / "hf", tmp_path / "nxd", form="nxd", plan=cut("tp=2,pp=2,dp=1", plan.model))
    losses = {
        where: trained(plan, tmp_path / f"from {where}", 1, init_weights=str(path)).steps[0].loss
        for where, path in {"run": at, **{name: tmp_path / name for name in ("hf", "ours", "nxd")}}.items()
    }
    assert len(set(losses.values())) == 1, losses


def test_a_run_of_a_model_without_a_card_says_that_its_configuration_is_needed(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=1,dp=1")
    mine = replace(plan, model=replace(plan.model, name="mine"))
    trained(mine, tmp_path, 1)
    (tmp_path / "plan.json").write_text(dump(mine))
    with pytest.raises(InputError, match=r"its model, mine, has no card\. Type --model with the config\.json"):
        converted(tmp_path, tmp_path / "out")
