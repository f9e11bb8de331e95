"""Sharded modules in the loops of accelerate, transformers and Lightning: they train as plain ones on one process."""

# pyright: reportMissingImports=false

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.modules.sharded import shard
from tests.ranks.spawn import each_rank, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of three libraries

ROWS, STEPS = 4, 5
Trained = tuple[list[float], dict[str, torch.Tensor]]


def decoder() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, use_cache=False))


def samples() -> list[dict[str, torch.Tensor]]:
    """Lines of words, of which some are padding of another length, so that a mean of means is none of all."""
    words = torch.randint(1, 32, (ROWS * STEPS, 6), generator=torch.Generator().manual_seed(2))
    return [
        {"input_ids": line, "labels": torch.where(torch.arange(6) < 3 + number % 4, line, -100)}
        for number, line in enumerate(words)
    ]


def joined(lines: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([line[name] for line in lines]) for name in lines[0]}


def as_torchrun() -> None:
    """Let libraries see what torchrun says to a rank."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update(names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "1"})


def sharded(model: Any, mesh: str, **options: Any) -> Any:
    """Shard a model for parts of a batch, unless a test runs it plain."""
    if not mesh:
        return model
    count = ROWS // dist.get_world_size()
    return shard(model, joined(samples()[:count]), mesh, results=["loss", "logits"], **options)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: one.detach().clone() for name, one in state.items()}


def compare(found: list[Trained], wanted: Trained, count: int) -> None:
    """Hold losses of all ranks, and the weights that the first one gets, against those of one process."""
    assert len(wanted[0]) == count
    for losses, _ in found:
        assert losses == pytest.approx(wanted[0], rel=2e-6)
    assert found[0][1].keys() == wanted[1].keys()
    for name, one in wanted[1].items():
        assert float((found[0][1][name] - one).abs().max()) < 2e-6, name


def import_accelerate() -> None:
    import accelerate
    import transformers

    assert accelerate.Accelerator and transformers.Trainer


def with_accelerate(mesh: str, batches: str) -> Trained:
    """A loop as accelerate's pages show it, with two micro-batches for each update."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    as_torchrun()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = sharded(decoder(), mesh, batch=batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lines, size = samples(), ROWS // dist.get_world_size()
    loaders = [DataLoader(part, size) for part in (lines[: ROWS * STEPS], lines[: ROWS + 2])]  # pyright: ignore
    model, optimizer, loader, rest = accelerator.prepare(model, optimizer, *loaders)
    assert not mesh or type(model).__name__ == "ShardedLlamaForCausalLM"
    losses = list[float]()
    for lines in loader:
        with accelerator.accumulate(model):
            result = model(**lines)
            accelerator.backward(result.loss)
            losses.append(result.loss.item())
            if accelerator.sync_gradients:
                norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                losses.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        logits: list[Any] = [accelerator.gather_for_metrics(model(**lines).logits) for lines in rest]
    assert [len(one) for one in logits] == [ROWS, 2], "of the last batch accelerate repeats rows, and drops them again"
    return losses, state_of(model) | {"logits": torch.cat(logits)}


def test_accelerate_trains_a_sharded_module():
    (wanted,) = on_ranks(1, with_accelerate, "", "", prepare=import_accelerate, timeout_s=300)
    found = on_ranks(2, with_accelerate, "dp=2", "local", prepare=import_accelerate, timeout_s=300)
    compare(found, wanted, STEPS + 3)


def with_trainer(mesh: str, folder: str) -> Trained:
    """The Trainer of transformers, which is given the sharded model as it is."""
    from transformers import Trainer, TrainingArguments

    as_torchrun()
    model = sharded(decoder(), mesh, batch="local:dp.tp" if "tp" in mesh else "local")
    lines, size = samples(), ROWS // dist.get_world_size()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=size, per_device_eval_batch_size=size, use_cpu=True, max_grad_norm=0.5,
        max_steps=4, gradient_accumulation_steps=1, learning_rate=1e-2, logging_steps=1, report_to=[], seed=3,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer: Any = Trainer(model, arguments, train_dataset=lines, eval_dataset=lines[: 2 * ROWS])  # pyright: ignore
    trainer.model_accepts_loss_kwargs = False  # as of a sharded module: each loss is the mean over its batch
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    measured = [trainer.evaluate()["eval_loss"], *(entry[key] for entry in steps for key in ("loss", "grad_norm"))]
    assert not mesh or type(trainer.model_wrapped).__name__ == "ShardedLlamaForCausalLM"
    predicted = trainer.predict(lines[: ROWS + 2]).predictions
    return [float(one) for one in measured], state_of(model) | {"logits": torch.as_tensor(predicted)}


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_a_sharded_module(tmp_path: Any):
    (wanted,) = on_ranks(1, with_trainer, "", str(tmp_path / "a"), prepare=import_accelerate, timeout_s=300)
    found = on_ranks(2, with_trainer, "dp=2", str(tmp_path / "b"), prepare=import_accelerate, timeout_s=300)
    compare(found, wanted, 9)


@pytest.mark.slow
def test_loops_of_others_bring_a_part_to_each_rank_of_a_mesh_with_two_axes(tmp_path: Any):
    (wanted,) = on_ranks(1, with_trainer, "", str(tmp_path / "a"), prepare=import_accelerate, timeout_s=300)
    found = on_ranks(4, with_trainer, "dp=2,tp=2", str(tmp_path / "b"), prepare=import_accelerate, timeout_s=300)
    compare(found, wanted, 9)


def import_lightning() -> None:
    import_accelerate()
    from lightning.pytorch.strategies import ModelParallelStrategy

    assert ModelParallelStrategy


def of_page(name: str) -> str:
    """The block of the page's code that has this name."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "my-model.md").read_text(encoding="utf-8")
    return next(block for block in re.findall(r"```python.*?\n(.*?)```", text, re.DOTALL) if name in block)


def with_lightning(mesh: str) -> Trained:
    """The class of the page about own models, with Lightning's own strategy for DTensors."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader, DistributedSampler

    as_torchrun()
    os.environ["TORCHELASTIC_RUN_ID"] = "0"
    space: dict[str, Any] = {"autoshard": autoshard}
    exec(of_page("def configure_model"), space)
    losses, lines = list[float](), samples()
    dp, tp = (int(axis[-1]) for axis in mesh.split(",")) if mesh else (1, 1)

    class Decoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.example = decoder(), joined(lines[: ROWS // dp])

        def training_step(self, inputs: Any, _: Any) -> Any:
            losses.append((loss := self.model(**inputs).loss).item())
            return loss

        def configure_model(self) -> None:
            if mesh:
                space["configure_model"](self)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    strategy = ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp) if mesh else "auto"
    trainer: Any = lightning.Trainer(
        accelerator="cpu", devices=dp * tp, strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, gradient_clip_val=0.5, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Decoder()
    sampler: Any = DistributedSampler(lines, dp, dist.get_rank() // tp, shuffle=False)  # pyright: ignore
    trainer.fit(module, DataLoader(lines, ROWS // dp, sampler=sampler))  # pyright: ignore[reportArgumentType]
    assert not mesh or type(module.model).__name__ == "ShardedLlamaForCausalLM"
    return losses, state_of(module.model)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightning_trains_a_sharded_module():
    (wanted,) = on_ranks(1, with_lightning, "", prepare=import_lightning, timeout_s=300)
    found = on_ranks(4, with_lightning, "dp=2,tp=2", prepare=import_lightning, timeout_s=300)
    compare(found, wanted, STEPS)


@pytest.mark.slow
@each_rank(1, prepare=import_accelerate)
def test_a_sharded_module_computes_in_the_format_that_accelerate_was_asked_for():
    from accelerate import Accelerator

    as_torchrun()
    plain, inputs = decoder(), joined(samples()[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = plain(**inputs).logits
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(shard(decoder(), inputs, "dp=1"))
    logits = model(**inputs).logits
    assert wanted.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, wanted.float())
