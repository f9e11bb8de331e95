"""A sharded module where nobody has started ranks, and what people do with a module beside training it."""

import copy
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autoshard.errors import InputError
from autoshard.modules.running import loops
from autoshard.modules.running.loops import told
from autoshard.modules.sharded import shard
from tests.modules.test_loops_of_others import decoder
from tests.ranks.spawn import ROOT, each_rank, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ALONE = """
import torch, autoshard
module = torch.nn.Linear(4, 4)
wanted = module(torch.ones(2, 4))
sharded = autoshard.shard(module, [torch.ones(2, 4)], "dp=1", batch="local")
sharded(torch.ones(2, 4)).sum().backward()
assert torch.equal(sharded(torch.ones(2, 4)), wanted) and (sharded.weight.grad.full_tensor() == 2).all()
try:
    autoshard.shard(torch.nn.Linear(4, 4), [torch.ones(2, 4)], "dp=2")
except autoshard.errors.InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_that_nobody_started_as_a_rank_is_the_only_one():
    started = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    names = {name: value for name, value in os.environ.items() if name not in started} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=names, check=False)
    assert done.returncode == 0, done.stderr
    assert "mesh: 2 ranks do not run here (1 do); start as many: torchrun --nproc-per-node 2" in done.stdout


@pytest.mark.slow
@each_rank(2)
def test_a_decoder_generates_and_what_it_cannot_do_is_refused_in_a_sentence():
    words = torch.randint(3, 32, (2, 5), generator=torch.Generator().manual_seed(0))
    plain = decoder().eval()
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = plain.generate(words, **options)
    module: Any = shard(decoder().eval(), {"input_ids": words}, "tp=2", results=["logits"])
    assert torch.equal(module.generate(words, **options), wanted) and wanted.shape == (2, 7)

    def refused(says: str) -> Any:
        return pytest.raises(InputError, match=f"^{re.escape(says)}")

    with refused("module: takes or returns a cache, which programs do not have; pass use_cache=False"):
        module.generate(words, use_cache=True, **options)
    with refused("model.embed_tokens: is a part of a sharded module, which cannot run by itself; call"):
        module.get_input_embeddings()(words)
    twin = copy.deepcopy(module)
    with refused("model: is a part of a sharded module"):
        twin.model(words)
    with refused(
        "module: each rank has parts of it, so it is not pickled; save its state (torch.distributed.checkpoint"
    ):
        torch.save(module, io.BytesIO())
    with torch.no_grad():
        logits = module(words).logits
        for one in module.parameters():
            one.zero_()
        assert torch.equal(twin(words).logits, logits) and not module(words).logits.any()
        assert torch.equal(copy.copy(twin)(words).logits, logits)
        assert torch.equal(torch.compile(twin)(words).logits, logits)


def saved(folder: Path, mesh: str, starts: bool) -> tuple[list[float], bool]:
    """Train, and save or load all state; return the losses of the steps after that, and whether a weight is cut."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(0 if starts else 1)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).double()
    pins = {"0.weight": "[_/model, _]", "2.weight": "[_, _/model]"}
    module = shard(torch.nn.Sequential(*layers).double(), [x], mesh, pins=pins)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)

    def step() -> float:
        loss = (module(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    if starts:
        step()
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    (dcp.save if starts else dcp.load)(states, checkpoint_id=folder)  # pyright: ignore
    if not starts:
        set_state_dict(module, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return [step(), step()], any(one.to_local().numel() < one.numel() for one in module.parameters())  # pyright: ignore


def test_a_checkpoint_of_four_ranks_goes_on_on_two(tmp_path: Path):
    wanted, is_cut = on_ranks(4, saved, tmp_path, "data=2,model=2", True, timeout_s=300)[0]
    assert is_cut and wanted[1] < wanted[0]
    for losses, _ in on_ranks(2, saved, tmp_path, "model=2", False, timeout_s=300):
        assert losses == pytest.approx(wanted, rel=1e-12)


def test_what_takes_longer_than_a_moment_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with told("waits"):
        pass
    monkeypatch.setattr(loops, "_MOMENT_S", 0.01)
    with told("traces Net"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "autoshard: traces Net; this is done once ...\nautoshard: ... took 0 s\n"


@each_rank(1)
def test_a_refusal_prints_no_graph():
    from contextlib import redirect_stderr, redirect_stdout

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=1, vocab_size=32, use_cache=False)
    config._experts_implementation = "eager"
    words = torch.randint(3, 32, (2, 5))
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.raises(InputError, match="decides by numbers that only a run knows"),
    ):
        shard(Qwen3MoeForCausalLM(config), {"input_ids": words}, "dp=1", results=["logits"])
    lines = [line for line in (out.getvalue() + err.getvalue()).splitlines() if not line.startswith("autoshard:")]
    assert not lines
