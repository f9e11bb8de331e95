"""Every command of docs/guides/trainium.md, in its order, on a small twin: the same names, a tiny Llama."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forks import typed_on_a_fork
from tests.guide.pages import commands, fences
from tests.runtime.cases import ROOT, environment

PAGE = (ROOT / "docs" / "guides" / "trainium.md").read_text(encoding="utf-8")
LINES = [line for fence in fences(PAGE) if fence.kind == "bash" and not fence.not_run for line in commands(fence)]
WEIGHTS = "weights/Meta-Llama-3-70B"
# What differs on one machine: who downloads, who starts the job, and how much of the cluster is left.
TWINS = {
    r"hf download .*": "true",
    r"--scheduler slurm": "--scheduler torchrun",
    r"--setup '[^']*'": "",
    r"bash (\S+)/submit.sh": r"NODE_RANK=0 MASTER_ADDR=127.0.0.1 bash \1/node.sh train",
    r"--nodes 14": "--ranks 1",
    r"--rehearse 4": "--rehearse 2",
}
TWIN = {"model": f"{WEIGHTS}/config.json", "cluster": "local", "ranks": 2, "seq_len": 64, "global_batch": 8}


def write_recipes(folder: Path) -> None:
    """Write the recipes of the page with the question of the twin; what is trained, and what is fixed, stays."""
    folder.mkdir()
    for name in set(re.findall(r"recipes/(\S+\.yaml)", PAGE)):
        real = yaml.safe_load((ROOT / "recipes" / name).read_text(encoding="utf-8"))
        kept = {key: value for key, value in real.items() if key not in ("nodes", "lnc", "init_weights")}
        text = yaml.safe_dump(kept | TWIN)
        (folder / name).write_text(text, encoding="utf-8")


def write_corpus(folder: Path) -> list[str]:
    folder.mkdir()
    texts = list(filter(None, (ROOT / "recipes" / "data" / "poems.txt").read_text(encoding="utf-8").splitlines()))
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "one.jsonl").write_text("\n".join(lines[::2]), encoding="utf-8")
    (folder / "two.jsonl").write_text("\n".join(lines[1::2]), encoding="utf-8")
    return texts


def write_weights(folder: Path, texts: list[str]) -> None:
    """Write what a download would bring: a model of transformers and a tokenizer, both small."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=special))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


def twin_of(line: str) -> str:
    for pattern, other in TWINS.items():
        line = re.sub(pattern, other, line)
    return line


def test_twins_differ_in_lines_that_the_page_has() -> None:
    assert len(LINES) >= 14
    assert all(any(re.search(pattern, line) for line in LINES) for pattern in TWINS)


def test_messages_of_the_page_are_those_of_the_program() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    table = page.partition("| message | what it means, and what to do |")[2].partition("## The compiler")[0]
    named = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "autoshard").rglob("*.py"))
    assert len(named) >= 10 and [name for name in named if name not in source] == []


@pytest.mark.slow
@pytest.mark.ranks
def test_every_command_of_the_page_runs_on_a_small_twin(tmp_path: Path) -> None:
    write_recipes(tmp_path / "recipes")
    write_weights(tmp_path / WEIGHTS, write_corpus(tmp_path / "corpus"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in LINES:
        command, env = twin_of(line), environment(PATH=path)
        if re.fullmatch(r"autoshard [^|&;<>$*'\"]+", command):
            code, said = typed_on_a_fork(shlex.split(command)[1:], tmp_path, env)
            assert code == 0, f"{line}\n{said[-6000:]}"
            continue
        command = re.sub(r"^autoshard ", f"{sys.executable} -m autoshard.cli ", command)
        words = ["bash", "-c", re.sub(r"^python ", f"{sys.executable} ", command)]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    steps = [json.loads(line) for line in (tmp_path / "job" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
