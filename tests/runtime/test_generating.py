"""Text from weights: token by token what transformers chooses, and what the command finds in folders and refuses."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.cli import main
from autoshard.commands.running import generate
from autoshard.commands.running.generate import plan_of_text
from autoshard.engine.torch.formats import Formats
from autoshard.errors import RunFailed
from autoshard.plan.codec import load
from autoshard.run.folder import TRAINING, folder_of
from autoshard.runtime import machine
from autoshard.runtime.convert.converting import open_weights
from autoshard.runtime.data.opened import (
    NAME,
    FileRecord,
    Kind,
    Manifest,
    TokenizerRecord,
    text_checksum,
    write_record,
)
from autoshard.runtime.data.tokenizers import CHATML, ChatTemplate, LibraryTokenizer, TokenizerSpec, open_tokenizer
from autoshard.runtime.generating import SpeakingModel, chooser, continued
from autoshard.spec.model_catalogue import load_model, read_config
from autoshard.spec.training import DataSpec, Training
from tests.kit import SMALL_FAMILIES
from tests.ranks.spawn import on_ranks
from tests.runtime.cases import environment, write_tiny
from tests.runtime.convert.test_opening import module_of
from tests.runtime.data.small_tokenizer import write_tokenizer
from tests.runtime.data.test_tokenizers import LLAMA3
from tests.slower import rest_is_slow

PROMPT, NUM_TOKENS = (3, 1, 4, 1), 5


def model_of(folder: Path, length: int, num_ranks: int = 1) -> SpeakingModel:
    model = load_model(folder)
    source = open_weights(folder, "hf", str(read_config(folder / "config.json")["model_type"]), model)
    return SpeakingModel.of(plan_of_text(model, length, num_ranks), source, Formats())


@pytest.mark.parametrize("family", rest_is_slow(SMALL_FAMILIES, 3, 3))
def test_tokens_are_those_that_transformers_chooses(family: str, tmp_path: Path) -> None:
    module = module_of(family)
    module.save_pretrained(tmp_path)
    length = len(PROMPT) + NUM_TOKENS
    model, tokens, expected = model_of(tmp_path, length), list(PROMPT), list[int]()
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = module(torch.tensor([tokens])).logits[0, -1]
        padded = np.array([[*tokens, *[0] * (length - len(tokens))]])
        torch.testing.assert_close(model.logits(padded, len(tokens) - 1), logits, rtol=0, atol=2e-5)
        expected.append(int(logits.argmax()))
        tokens.append(expected[-1])
    assert [*continued(model, PROMPT, NUM_TOKENS, chooser(0.0, None, 0))] == expected
    stopped = [*continued(model, PROMPT, NUM_TOKENS, chooser(0.0, None, 0), ends=[(expected[1],)])]
    assert stopped == expected[: expected.index(expected[1]) + 1], "what closes a document ends it"
    closing = [(7, expected[0]), tuple(expected[2:4])]
    closed = [*continued(model, PROMPT, NUM_TOKENS, chooser(0.0, None, 0), ends=closing)]
    pairs = [*pairwise(expected)]
    assert closed == expected[: pairs.index(closing[1]) + 2], "all tokens that close an answer, and none of the prompt"


def spoken(folder: Path, num_ranks: int) -> tuple[torch.Tensor, list[int], list[int]]:
    model = model_of(folder, len(PROMPT) + NUM_TOKENS, num_ranks)
    padded = np.array([[*PROMPT, *[0] * (model.length - len(PROMPT))]])
    rows = torch.stack([model.logits(padded, place) for place in range(len(PROMPT))])
    likeliest = [*continued(model, PROMPT, NUM_TOKENS, chooser(0.0, None, 0))]
    return rows, likeliest, [*continued(model, PROMPT, NUM_TOKENS, chooser(1.5, 20, 5))]


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "num_ranks"), rest_is_slow([*product(SMALL_FAMILIES, (2,)), ("llama", 4)], 2, 2))
def test_ranks_that_share_a_model_choose_what_one_chooses(family: str, num_ranks: int, tmp_path: Path) -> None:
    module_of(family).save_pretrained(tmp_path)
    rows, *expected = spoken(tmp_path, 1)
    for answer in on_ranks(num_ranks, spoken, tmp_path, num_ranks):
        torch.testing.assert_close(answer[0], rows, rtol=0, atol=2e-5)
        assert [*answer[1:]] == expected


def test_draws_follow_the_softmax_of_the_likeliest_and_the_seed() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    choose, again = chooser(0.5, 3, 7), chooser(0.5, 3, 7)
    drawn = [choose(logits) for _ in range(6000)]
    assert drawn == [again(logits) for _ in range(6000)]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    weights = np.exp(np.array([4.0, 0.0, 2.0, -np.inf]))
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.02)
    assert {chooser(0.0, None, seed)(logits) for seed in range(3)} == {0}


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has learned a few letters, judged meanwhile."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("ab" * 400, encoding="utf-8")
    seq_len = load(write_tiny(tmp_path, "tp=1,pp=1,dp=2")).workload.seq_len
    Path("letters.yaml").write_text(
        f"model: tiny-llama\ncluster: local\nranks: 2\nseq_len: {seq_len}\nglobal_batch: 8\nsteps: 24\n"
        "learning_rate: 0.01\ncheckpoint: {every_steps: 8, keep_last: 9}\n"
        "data: {sets: {text.txt: 1.0}}\neval: {sets: {text.txt: 1.0}, every_steps: 8, samples: 8}\n",
        encoding="utf-8",
    )
    assert main(["run", "letters.yaml", "--fix", "mbs=4,zero=3"]) == 0
    return Path("runs/letters")


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["generate", *words]) == code
    out = capsys.readouterr()
    return out.err if code else out.out


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_says_what_it_has_learned(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (str(run_folder), "--prompt", "abab", "--tokens", "6")
    assert said(capsys, *asked) == "abababababab"[:10] + "\n"
    answer = json.loads(said(capsys, *asked, "--json"))
    assert answer["text"] == "ababab" and answer["tokens"] == [*b"ababab"]
    assert answer["source"].endswith(folder_of(24))
    lines = (run_folder / "evaluations.jsonl").read_text().splitlines()
    best = min((json.loads(line) for line in lines), key=lambda line: line["loss"])
    assert json.loads(said(capsys, *asked, "--json", "--step", "best"))["source"].endswith(folder_of(best["step"]))
    assert json.loads(said(capsys, *asked, "--json", "--step", "8"))["source"].endswith(folder_of(8))
    place = str(run_folder / "checkpoints" / folder_of(16))
    assert json.loads(said(capsys, place, *asked[1:], "--json"))["source"] == place
    drawn = (*asked, "--temperature", "1.5", "--seed", "3")
    assert said(capsys, *drawn) == said(capsys, *drawn) == said(capsys, *drawn, "--ranks", "2")
    assert "there is no checkpoint" in said(capsys, *asked, "--step", "5", code=2)
    kept = ("--out", "runs/kept", "--eval.keep-best", "false", "--steps", "8")
    assert main(["run", "letters.yaml", "--fix", "mbs=4,zero=3", *kept]) == 0
    unkept = said(capsys, "runs/kept", "--prompt", "a", "--step", "best", code=2)
    assert "eval.keep_best was false in this run. Type the number of a step, or type --step newest" in unkept
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "autoshard.cli", "generate", *asked]
    run = subprocess.run([*torchrun, *words], check=True, env=environment(), stdout=subprocess.PIPE, text=True)
    assert run.stdout == "abababababab"[:10] + "\n", "one rank of them prints"
    assert main(["convert", str(run_folder), "exported"]) == 0
    assert read_config(Path("exported/config.json"))["eos_token_id"] == 256
    assert said(capsys, "exported", *asked[1:]) == "ababababab\n", "with the tokenizer that came along"
    for line in run_folder.glob("checkpoints/*/training.json"):
        line.unlink()
    assert "says which tokenizer made its tokens. Type bytes" in said(capsys, *asked, code=2)
    assert said(capsys, *asked, "--tokenizer", "bytes") == "ababababab\n"


def read_by(folder: Path, tokenizer: TokenizerRecord, kind: Kind = "text", template: str | None = None) -> None:
    """Let a checkpoint say that its run has read a set of this tokenizer."""
    data_set = folder.parent / "set"
    data_set.mkdir(exist_ok=True)
    file = FileRecord(name="part-00000.bin", bytes=0, sha256="")
    manifest = Manifest(
        schema=1, source="x", revision=None, kind=kind, tokenizer=tokenizer, dtype="uint16", files=(file,),
        template=template, num_tokens=1, num_documents=1, num_empty=0,
    )  # fmt: skip
    write_record(manifest, data_set / NAME)
    write_record(Training(data=DataSpec(sets={str(data_set): 1.0})), folder / TRAINING)


def test_a_run_opens_and_closes_documents_as_those_that_it_has_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set was made with a token that opens documents, and closed them by another one than the tokenizer's own."""
    folder, words = tmp_path / "hf", write_tokenizer(tmp_path / "words")
    module_of("llama", vocab_size=300).save_pretrained(folder)
    assert main(["convert", str(folder), str(tmp_path / "run"), "--to", "autoshard", "--tokenizer", str(words)]) == 0
    asked = (str(tmp_path / "run"), "--prompt", "the", "--json")
    assert json.loads(said(capsys, *asked))["tokens"], "configuration and tokenizer lie beside the checkpoint"
    tokenizer = open_tokenizer(TokenizerSpec(name=str(words), folder=words, bos="<s>"))
    opened = tokenizer.opened("the")
    assert opened[0] == 1
    likeliest = [*continued(model_of(folder, 100 + len(opened)), opened, 5, chooser(0.0, None, 0))]
    end = next(token for token in likeliest[1:] if token != likeliest[0])
    read_by(tmp_path / "run" / folder_of(0), replace(tokenizer.record, eos=end))
    monkeypatch.chdir(words)  # the folder has a name that leads there from everywhere
    assert json.loads(said(capsys, *asked))["tokens"] == likeliest[: likeliest.index(end) + 1]
    words.joinpath("special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}, "x": 1}))
    words.joinpath("generation_config.json").write_text(json.dumps({"eos_token_id": [7, end]}))
    assert main(["convert", asked[0], str(tmp_path / "with words")]) == 0
    files = {path.name: json.loads(path.read_text()) for path in (tmp_path / "with words").glob("*.json")}
    assert isinstance(tokenizer, LibraryTokenizer)
    token = tokenizer.library.id_to_token(end)
    ends = {"eos_token": token, "bos_token": "<s>"}
    assert files["tokenizer_config.json"] == ends, "what closed and opened the run's documents"
    assert files["special_tokens_map.json"] == {"eos_token": token, "x": 1}
    assert files["config.json"]["eos_token_id"] == end and files["generation_config.json"]["eos_token_id"] == [7, end]
    words.joinpath("tokenizer.json").write_text(words.joinpath("tokenizer.json").read_text() + " ")
    assert "is not the one that made the tokens of this run" in said(capsys, *asked, code=2)
    assert main(["convert", asked[0], str(tmp_path / "exported")]) == 2
    assert "is not the one that made the tokens of this run" in capsys.readouterr().err


def test_a_run_on_conversations_answers_a_prompt_as_its_template_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = tmp_path / "hf", write_tokenizer(tmp_path / "words", chat_template=LLAMA3, bos_token="<s>")
    module_of("llama", vocab_size=300).save_pretrained(folder)
    assert main(["convert", str(folder), str(tmp_path / "run"), "--to", "autoshard"]) == 0
    tokenizer = open_tokenizer(TokenizerSpec(name=str(words), folder=words))
    template = ChatTemplate(source=LLAMA3, special=tokenizer.special)
    assert template.around_answer("Hi?") == (
        "<s><|start|>user<|end|>\n\nHi?<|eot|><|start|>assistant<|end|>\n\n", "<|eot|>"
    )  # fmt: skip
    before = tokenizer.opened(template.around_answer("Hi?")[0])
    likeliest = [*continued(model_of(folder, 100 + len(before)), before, 6, chooser(0.0, None, 0))]
    asked = (str(tmp_path / "run"), "--prompt", "Hi?", "--tokens", "6", "--json")
    read_by(tmp_path / "run" / folder_of(0), tokenizer.record, "chat", text_checksum(LLAMA3))
    answer = json.loads(said(capsys, *asked))
    assert answer["tokens"] == likeliest and answer["text"] == tokenizer.text(likeliest)
    assert said(capsys, *asked[:-1]) == answer["text"] + "\n", "the answer alone"
    text = said(capsys, *asked[:-1], "--form", "text")
    assert text.startswith("Hi?") and text != f"Hi?{answer['text']}\n"
    read_by(tmp_path / "run" / folder_of(0), tokenizer.record, "chat", text_checksum(CHATML))
    assert "were written by another template than that of" in said(capsys, *asked, code=2)
    (tmp_path / "chatml").write_text(CHATML, encoding="utf-8")
    assert json.loads(said(capsys, *asked, "--chat-template", str(tmp_path / "chatml")))["tokens"] != likeliest


def test_what_cannot_go_on_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module_of("gpt2").save_pretrained(tmp_path / "hf")
    folder, bytes_ = str(tmp_path / "hf"), ("--tokenizer", "bytes")
    assert "there is no such file or folder" in said(capsys, "nothing", "--prompt", "a", code=2)
    assert "tokens of bytes go to 256" in said(capsys, folder, "--prompt", "a", *bytes_, code=2)
    assert "must be at least 1" in said(capsys, folder, "--prompt", "a", "--tokens", "0", code=2)
    assert "needs a --temperature above 0" in said(capsys, folder, "--prompt", "a", "--top-k", "3", code=2)
    assert "is for runs, and" in said(capsys, folder, "--prompt", "a", "--step", "best", code=2)
    assert "must not be empty" in said(capsys, folder, "--prompt", "", code=2)
    small = "\x01\x02\x03"  # tokens that the model has
    far = said(capsys, folder, "--prompt", small, "--tokens", "999", *bytes_, code=2)
    assert "have 1002 tokens, and the model knows" in far
    assert said(capsys, folder, "--prompt", small, "--tokens", "2", *bytes_).startswith(small)
    shared = said(capsys, folder, "--prompt", small, "--tokens", "2", *bytes_, "--ranks", "3", code=2)
    assert "--ranks 3: tp=3: " in shared and "do not divide by 3" in shared
    assert "must be at least 1" in said(capsys, folder, "--prompt", small, *bytes_, "--ranks", "0", code=2)
    odd = said(capsys, folder, "--prompt", small, "--tokens", "998", *bytes_, "--ranks", "2", code=2)
    assert "have 1001 tokens, filled up to 1002 for 2 ranks, and" in odd
    monkeypatch.setattr(machine, "available_bytes", lambda: 10)
    for ranks in ("1", "2"):  # which are all on this machine
        full = said(capsys, folder, "--prompt", small, *bytes_, "--tokens", "2", "--ranks", ranks, code=2)
        assert f"{folder}: its weights take" in full and "10 B left" in full


@pytest.mark.parametrize(("ends", "code", "num_folders"), [(KeyboardInterrupt, 130, 0), (RunFailed, 3, 1)])
def test_logs_of_ranks_that_generate_stay_where_a_message_names_them(
    ends: type[BaseException], code: int, num_folders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise ends

    module_of("gpt2").save_pretrained(tmp_path / "hf")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(generate, "launch", interrupted)
    words = ["--prompt", "\x01\x02", "--tokens", "2", "--tokenizer", "bytes", "--ranks", "2"]
    assert main(["generate", str(tmp_path / "hf"), *words]) == code
    assert len(list((tmp_path / "temporary").iterdir())) == num_folders
