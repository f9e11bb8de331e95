"""Checkpoints that a Trainer of transformers writes of sharded modules: a stopped run goes on, on other meshes too."""

# pyright: reportMissingImports=false

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.errors import InputError
from autoshard.modules.running.wholes import sharded_trainer
from tests.modules.test_loops_of_others import as_torchrun, decoder, import_accelerate, joined, samples, sharded
from tests.ranks.spawn import each_rank, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of three libraries

STOP, STEPS, ROWS = 3, 5, 4
Curve = list[tuple[float, float]]


class Stopped(Exception):
    """The end of a run that is killed."""


def trained(mesh: str, folder: str, last: int, resumes: bool) -> Curve:
    """Train until a step, after which nothing more is written; return losses and norms of all steps."""
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback, TrainingArguments

    as_torchrun()
    model = sharded(decoder(), mesh, batch="local:dp.tp" if "dp" in mesh else "local:tp")

    class Killed(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if last < STEPS and state.global_step == last:
                raise Stopped

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=ROWS // dist.get_world_size(), use_cpu=True, max_grad_norm=0.5,
        max_steps=STEPS, gradient_accumulation_steps=1, learning_rate=1e-2, warmup_steps=2, logging_steps=1,
        report_to=[], seed=3, save_strategy="steps", save_steps=2, disable_tqdm=True,
    )  # fmt: skip
    kind: Any = sharded_trainer(Trainer) if mesh else Trainer
    trainer: Any = kind(model, arguments, train_dataset=samples(), callbacks=[Killed()])
    trainer.model_accepts_loss_kwargs = False
    try:
        trainer.train(resume_from_checkpoint=resumes or None)
    except Stopped:
        return []
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("others", ["tp=2", ""])
def test_a_killed_trainer_resumes_on_any_mesh(tmp_path: Path, others: str):
    whole, stopped = str(tmp_path / "a"), str(tmp_path / "b")
    (wanted,) = on_ranks(1, trained, "", whole, STEPS, False, prepare=import_accelerate, timeout_s=300)
    on_ranks(4, trained, "dp=2,tp=2", stopped, STOP, False, prepare=import_accelerate, timeout_s=300)
    found = on_ranks(
        2 if others else 1, trained, others, stopped, STEPS, True, prepare=import_accelerate, timeout_s=300
    )
    assert len(wanted) == STEPS
    for curve in found:
        assert [number for entry in curve for number in entry] == pytest.approx(
            [number for entry in wanted for number in entry], rel=1e-5
        )


@each_rank(2)
def test_a_rank_alone_neither_saves_its_parts_as_the_whole_nor_makes_other_parameters():
    model: Any = autoshard.shard(decoder(), joined(samples()[:2]), "tp=2", results=["loss"])
    for name, value, says in (
        ("save_pretrained", "nowhere", "would write the parts of one rank; use autoshard.sharded_trainer"),
        ("push_to_hub", "me/mine", "would write the parts of one rank; use autoshard.sharded_trainer"),
        ("resize_token_embeddings", 300, "makes other parameters than the sharded module has; call"),
    ):
        with pytest.raises(InputError, match=f"^{name}: {re.escape(says)}"):
            getattr(model, name)(value)


@each_rank(2)
def test_a_plain_state_loads_into_a_sharded_module():
    for assign in (False, True):
        model: Any = autoshard.shard(decoder(), joined(samples()[:2]), "tp=2", results=["loss"])
        other = decoder()
        for weight in other.parameters():
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(weight.numel()))
        model.load_state_dict(other.state_dict(), assign=assign)
        inputs = joined(samples()[:2])
        assert float((model(**inputs).loss - other(**inputs).loss).abs()) < 1e-5
