"""A dry run: what one process counts of a rank is what that rank counts in a world, and what was promised."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoshard.cli import main
from autoshard.cost.predict import sent_by_stage
from autoshard.engine.initial import InitialWeights, no_weights
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.fake import count_rank, fake_world
from autoshard.engine.torch.formats import NOWHERE, Formats
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.run.reports import Measured
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.dry import dry_rank, enough, telling_ranks
from autoshard.spec.training import Training
from tests.ranks.cases import gpt, llama, plan_of, without_rows
from tests.ranks.spawn import on_ranks
from tests.runtime.cases import write_tiny
from tests.slower import rest_is_slow

MIXTURE = {"num_experts": 4, "experts_per_token": 2}
CASES = [  # with their micro-batches; of some only a few are run
    ("tp=1,pp=2,dp=1,schedule=zb_h1", llama(), 12),
    ("tp=2,pp=1,dp=2,ep=2", llama(**MIXTURE), 4),
    ("tp=1,pp=2,dp=1", gpt(), 8),
    ("tp=1,pp=1,dp=1", llama(), 4),
    ("tp=2,pp=1,dp=1", llama(window=3), 4),
    ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32), 4),
    ("tp=1,pp=1,dp=2,zero=1", llama(), 4),
    ("tp=1,pp=1,dp=2,zero=0", llama(), 4),
    ("tp=1,pp=2,dp=1", llama(), 12),
    ("tp=1,pp=2,dp=2", llama(), 4),
    ("tp=1,pp=2,dp=1,schedule=gpipe", llama(), 6),
    ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4), 12),
    ("tp=1,pp=1,cp=2,dp=1", llama(), 4),
    ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama(), 4),
    ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTURE), 4),
    ("tp=2,pp=1,dp=1,recompute=full", llama(), 4),
    ("tp=2,pp=1,dp=1", gpt(vocab=32), 4),
]


def measure(plan: Plan) -> Measured:
    """What a rank itself counts, by functions made of the table: a dry run executes the table."""
    run = Run(folder=Path(), training=Training(), mode="generated")
    engine = TorchEngine(plan, InitialWeights(graph=graph_of(plan), seed=0), run=run)
    engine.step(synthetic_step(plan), learning_rate=0.0)
    return engine.measured()


@pytest.mark.ranks
@pytest.mark.parametrize(("text", "model", "global_batch"), rest_is_slow(CASES))
def test_a_dry_rank_counts_what_the_rank_itself_counts(text, model, global_batch: int) -> None:
    plan = plan_of(text, model, global_batch=global_batch)
    for rank, found in enumerate(on_ranks(plan.mesh.num_ranks, measure, plan)):
        dry = dry_rank(plan, rank, count_rank).measured
        assert without_rows(plan, dry) == without_rows(plan, found), f"rank {rank}"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dry_rank_counts_separate_documents_as_the_rank_does() -> None:
    plan = plan_of("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", llama(), documents="separate")
    for rank, found in enumerate(on_ranks(2, measure, plan)):
        assert dry_rank(plan, rank, count_rank).measured == found, f"rank {rank}"


def random_layout(seed: int) -> Plan:
    """A small plan in which every dim that is cut divides."""
    rng = random.Random(seed)
    tp, pp, cp, dp = (rng.choice(sizes) for sizes in ((1, 2, 4), (1, 2, 4), (1, 1, 2), (1, 2)))
    mbs = rng.choice((1, 2))
    text = f"tp={tp},pp={pp},cp={cp},dp={dp},mbs={mbs},recompute={rng.choice(('none', 'full'))}"
    text += f",zero={rng.choice((0, 1, 3))}" if dp * cp > 1 and pp == 1 else ""
    text += f",sp={rng.choice(('true', 'false'))}" if tp > 1 else ""
    schedules = ("1f1b", "gpipe", "zb_h1", "interleaved,vp=2", "zb_v,vp=2")
    schedule = rng.choice(schedules) if pp > 1 else ""
    text += f",schedule={schedule}" if schedule else ""
    fewest = pp * (2 if "vp" in schedule else 1)
    sizes = {"num_layers": fewest + rng.choice((0, 1, 3)), "hidden": 32, "ffn": 64, "head_dim": 8, "vocab": 64}
    sizes |= {"num_heads": 8, "num_kv_heads": rng.choice((4, 8)), "tied_embeddings": rng.choice((True, False))}
    return plan_of(text, rng.choice((llama, gpt))(**sizes), global_batch=max(2, pp) * dp * mbs, seq_len=16)


@pytest.mark.parametrize("seed", rest_is_slow(range(60), 1, 3))
def test_random_layouts_send_what_is_predicted(seed: int) -> None:
    plan = random_layout(seed)
    for place, expected in enumerate(sent_by_stage(plan)):
        found = count_rank(plan, plan.mesh.ranks_of({"pp": place})[0]).sent_bytes
        assert {axis for axis in found if found[axis]} == {axis for axis in expected if expected[axis]}
        for axis, size in found.items():  # a ratio of 1.00: flat tensors are padded, and each sends whole bytes
            assert size == pytest.approx(expected.get(axis, 0), rel=0.005), (str(plan.candidate), place, axis)


@pytest.mark.parametrize(
    ("text", "num_run"),
    [
        ("tp=1,pp=2,dp=1", 4),
        ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", 4),
        ("tp=1,pp=2,dp=1,schedule=gpipe", 16),
        ("tp=1,pp=1,dp=1", 2),
    ],
)
def test_few_micro_batches_are_run_where_more_keep_no_more(text: str, num_run: int) -> None:
    assert enough(plan_of(text, llama(num_layers=4), global_batch=16), 0) == num_run


def test_nothing_is_left_of_a_world_that_was_not_there() -> None:
    num_threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="out of luck"), fake_world(5, 64):
        assert dist.get_rank() == 5 and torch.ones(3, device=NOWHERE).is_meta
        assert int(torch.arange(3, device=NOWHERE)[2]) == 1, "numbers are made up"
        raise ValueError("out of luck")
    assert not dist.is_initialized() and not torch.ones(3).is_meta and torch.get_num_threads() == num_threads


def test_a_wrong_shape_is_found() -> None:
    plan = plan_of("tp=2,pp=1,dp=1", llama())
    weights = no_weights(graph_of(plan))
    with pytest.raises(RuntimeError, match="split_sizes"), fake_world(1, 2):
        TorchEngine(plan, lambda name: weights(name)[..., :-1], Formats(device=NOWHERE))
    assert not dist.is_initialized()


@pytest.mark.thorough
def test_a_rank_of_512_holds_and_sends_what_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", "llama3-70b", "--nodes", "16", "--fix", "tp=32,pp=8,dp=2", "--top", "1"]) == 0
    plan = load(Path("plan.json"))
    assert telling_ranks(plan)[0] == 0 and telling_ranks(plan)[-1] == 448
    capsys.readouterr()
    assert main(["run", "plan.json", "--dry-run", "--dry-ranks", "511", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (rank,) = said["ranks"]
    assert rank["stands_for"] == list(range(448, 512)) and rank["micro_batches_run"] == 16
    memory, sent = rank["memory_bytes"], rank["sent_bytes"]
    for one in (*(memory[name] for name in ("weights", "gradients", "masters", "optimizer")), *sent.values()):
        assert one["measured"] == one["predicted"], rank
    assert any(note.startswith("engine: nxd needs Neuron devices") for note in said["notes"])
    assert "not executed: ranks 0-447. Without --dry-ranks one rank of every kind is" in said["notes"]
    assert not Path("runs").exists()


def test_ranks_and_whom_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path, "tp=2,pp=2,dp=2")
    assert main(["run", "tiny.json", "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "tiny-llama: tp=2,pp=2,dp=2, dry: 2 of 8 ranks, shapes without numbers"
    assert "note: rank 0 represents 4 ranks: 0-3" in said and "note: rank 4 represents 4 ranks: 4-7" in said
    assert any(line.startswith("Memory of a rank") for line in said)
    assert main(["run", "tiny.json", "--dry-run", "--dry-ranks", "8"]) == 2
    assert capsys.readouterr().err == "autoshard: --dry-ranks: the plan has the ranks 0 to 7, not 8. Type 0,7\n"
    assert main(["run", "tiny.json", "--dry-ranks", "1"]) == 2
    assert capsys.readouterr().err.endswith("names the ranks of --dry-run. Type --dry-run as well\n")
