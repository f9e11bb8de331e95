"""Runs that go on: bit for bit under the same plan, along the same curve under any other, and past damage."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from autoshard.errors import InputError, NotFinite
from autoshard.runtime.checkpoint.files import load_index
from autoshard.spec.training import DataSpec
from tests.runtime.training_cases import Double, before_steps, plan_of, trained
from tests.slower import rest_is_slow

SAME = (
    "tp=1,pp=1,dp=2,zero=3", "tp=1,pp=1,dp=2", "tp=1,pp=1,dp=2,zero=0", "tp=2,pp=1,dp=1,mbs=2", "tp=1,pp=2,dp=1",
    "tp=1,pp=1,dp=4,zero=3,weight_group=2",
)  # fmt: skip
OTHERS = (
    "tp=1,pp=1,dp=2,zero=3", "tp=1,pp=1,dp=2,zero=0", "tp=1,pp=1,dp=4,zero=3,weight_group=2", "tp=1,pp=1,cp=2,dp=1",
    "tp=2,pp=2,dp=1", "tp=1,pp=2,dp=1,vp=1,schedule=zb_h1", "tp=1,pp=1,dp=4,zero=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of 8 steps on one rank, undisturbed, in double precision."""
    return trained(plan_of("tp=1,pp=1,dp=1"), tmp_path_factory.mktemp("whole"), 8, build=Double, to="none").curve


@pytest.mark.ranks
@pytest.mark.parametrize("text", rest_is_slow(SAME, 0))
def test_the_second_resume_is_as_exact_as_the_first(text: str, tmp_path: Path) -> None:
    plan = plan_of(text)
    whole = trained(plan, tmp_path / "whole", 5)
    parts = [trained(plan, tmp_path / "parts", steps) for steps in (2, 3, 5)]
    assert [part.started.step for part in parts] == [0, 2, 3]
    assert parts[0].curve | parts[1].curve | parts[2].curve == whole.curve, "to the last bit"
    assert [one.norm for one in whole.steps] == [one.norm for part in parts for one in part.steps]
    assert saved(tmp_path / "whole", 5) == saved(tmp_path / "parts", 5)


@pytest.mark.ranks
@pytest.mark.parametrize("texts", rest_is_slow([(OTHERS,), (OTHERS[::2],)], 0))
def test_any_other_plan_follows_the_same_curve(texts: Sequence[str], exact: dict[int, float], tmp_path: Path) -> None:
    found: dict[int, float] = {}
    for number, text in enumerate(texts, 1):
        found |= trained(plan_of(text), tmp_path, number, build=Double).curve
    np.testing.assert_allclose(list(found.values()), list(exact.values())[: len(found)], rtol=1e-9)


@pytest.mark.ranks
@pytest.mark.parametrize("damage", rest_is_slow(["flip", "no index", "cut", "missing file", "cut index"], 0, 2))
def test_a_damaged_checkpoint_is_passed_over(damage: str, exact: dict[int, float], tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=1,dp=2")
    trained(plan, tmp_path, 4, build=Double, every_steps=2)
    newest = tmp_path / "checkpoints" / "step-00000004"
    file, index = newest / "rank-00001.safetensors", newest / "index.json"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-5] ^= 4
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "cut index":
        index.write_bytes(index.read_bytes()[:-9])
    else:
        (file if damage == "missing file" else index).unlink()
    found = trained(plan, tmp_path, 5, build=Double)
    assert found.started.step == 2 and "step-00000004" in found.notes
    wanted = [exact[step] for step in (3, 4, 5)]
    np.testing.assert_allclose([found.curve[step] for step in (3, 4, 5)], wanted, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_goes_back_to_a_step_that_is_named_and_on_from_there(tmp_path: Path) -> None:
    """Steps beside those that are kept for good are removed, of the course that the run has left too."""
    plan, folder = plan_of("tp=1,pp=1,dp=1"), tmp_path / "checkpoints"

    def steps_on_disk() -> list[int]:
        names = [one.name for one in folder.iterdir()] if folder.exists() else []
        return sorted(int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit())

    def wait_for_the_save(step: int) -> None:
        """Wait, but not for long: a save begins where none is under way, and on a busy machine few would."""
        until_s = time.monotonic() + 2.0
        while step > 1 and step - 1 not in steps_on_disk() and time.monotonic() < until_s:
            time.sleep(0.02)

    build = before_steps(wait_for_the_save)
    first = trained(plan, tmp_path, 9, every_steps=1, keep_last=2, keep_every=4, build=build)
    *rest, before, last = steps_on_disk()
    assert last == 9 and before < 9, "the newest two"
    kept = next(step for step in (*rest, before) if step >= 4)
    assert kept < 8 and {step // 4 for step in rest} <= {1, 2}, "and the first at or after step 4 and step 8"
    with pytest.raises(InputError, match="step-00000003: there is no checkpoint of step 3; those of steps "):
        trained(plan, tmp_path, 9, resume=3)
    again = trained(plan, tmp_path, kept + 1, resume=kept)
    assert again.started.step == kept and again.curve == {kept + 1: first.curve[kept + 1]}
    assert "9) are removed when the first new one is saved" in again.notes
    assert sorted(one.name for one in folder.iterdir()) == [f"step-{step:08}" for step in (kept, kept + 1)]


@pytest.mark.slow
@pytest.mark.ranks
def test_other_models_and_places_without_a_whole_checkpoint_are_refused(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=1,dp=1")
    trained(plan, tmp_path, 1)
    with pytest.raises(InputError, match=r"has shape \[.*the model \["):
        trained(plan_of("tp=1,pp=1,dp=1", ffn=24), tmp_path, 2)
    (tmp_path / "checkpoints" / "step-00000001" / "index.json").unlink()
    with pytest.raises(InputError, match=r"none of its checkpoints can be used.*type another --out"):
        trained(plan, tmp_path, 2)


class Overflowing(Double):
    """An engine whose gradients become infinite in a step."""

    def step(self, micro_batches, learning_rate, allows=None):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 3:
            bad = dict(micro_batches[0])
            bad["token_weight"] = bad["token_weight"] + np.inf
            micro_batches = [bad, *micro_batches[1:]]
        return super().step(micro_batches, learning_rate, allows)


@pytest.mark.slow
@pytest.mark.ranks
def test_numbers_that_are_not_finite_end_the_run_before_they_are_in_the_weights(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=1,dp=2")
    with pytest.raises(
        NotFinite, match=r"step 3: loss inf, gradient norm nan.*rank [01]: loss of micro-batch 0.*samples are 8 to 11"
    ):
        trained(plan, tmp_path, 5, build=Overflowing)
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    again = trained(plan, tmp_path, 5, build=Double)
    assert again.started.step == 2 and np.isfinite(list(again.curve.values())).all()


@pytest.mark.slow
@pytest.mark.ranks
def test_or_their_step_is_skipped_while_some_may_be(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=1,dp=2")
    found = trained(plan, tmp_path, 5, build=Overflowing, on_nonfinite="skip", skip_budget=1)
    assert [step.updated for step in found.steps] == [True, True, False, True, True]
    assert "The update was skipped, 1 of at most 1" in found.notes
    index = load_index((tmp_path / "checkpoints" / "step-00000005" / "index.json").read_bytes(), "")
    assert (index.state.num_updates, index.state.step, index.state.next_sample) == (4, 5, 20)
    with pytest.raises(NotFinite, match="0 steps had been skipped"):
        trained(plan, tmp_path / "other", 5, build=Overflowing, on_nonfinite="skip", skip_budget=0)


def saved(folder: Path, step: int) -> dict[str, list[tuple[int, ...]]]:
    """The checksums of everything in a checkpoint."""
    index = load_index((folder / "checkpoints" / f"step-{step:08}" / "index.json").read_bytes(), "")
    return {name: [(*box.offsets, box.crc32) for box in tensor.boxes] for name, tensor in index.tensors.items()}


@pytest.mark.ranks
def test_a_set_that_has_another_size_than_at_the_last_start_is_named(tmp_path: Path) -> None:
    plan, text, run = plan_of("tp=1,pp=1,dp=1"), tmp_path / "a.txt", tmp_path / "run"
    data = DataSpec(sets={str(text): 1.0})
    text.write_text("abcd" * 100)
    assert "tokens or samples" not in trained(plan, run, 1, data=data).notes
    text.write_text("abcd" * 200)
    grown = f"changed since the last start: {text} had 401 tokens or samples, now 801. Its samples come in another"
    assert grown in trained(plan, run, 2, data=data).notes
    assert "tokens or samples" not in trained(plan, run, 3, data=data).notes, "the checkpoint of step 2 knows it"
    text.write_text("dcba" * 200)
    assert f"{text} holds other tokens, though as many" in trained(plan, run, 4, data=data).notes
    assert "holds other tokens" not in trained(plan, run, 5, data=data).notes
