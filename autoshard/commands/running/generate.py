"""``autoshard generate``: let the weights of a run, or of a Hugging Face folder, go on with a text."""

import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.commands.output import print_answer
from autoshard.commands.progress import StatusLine
from autoshard.commands.tokenize import named_tokenizer
from autoshard.errors import Fault, InputError, RunFailed, require
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.run.folder import CHECKPOINTS, PLAN, folder_of
from autoshard.runtime.launch import Placing, given_rank, launch
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, read_config
from autoshard.spec.workload import DTYPE_BYTES, Precision, Workload
from autoshard.units import format_bytes

if TYPE_CHECKING:
    from autoshard.runtime.convert.stored import WeightSource
    from autoshard.runtime.data.opened import TokenizerRecord
    from autoshard.runtime.data.tokenizers import Tokenizer

_CONFIG, _FAMILY = "config.json", "model_type"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Weights in a folder: of which model, and which tokenizer made its tokens, as far as the folder says."""

    folder: Path
    model: ModelSpec
    tokenizer: str | None
    read: "TokenizerRecord | None" = None  # the tokenizer of the tokens that a run has read


def generate(
    source: Path,
    prompt: str,
    tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    step: Literal["newest", "best"] | int = "newest",
    tokenizer: str | None = None,
    form: Literal["text", "chat"] | None = None,
    chat_template: Path | None = None,
    ranks: int | None = None,
    json: bool = False,
) -> int:
    """Let the weights of a run, or of a Hugging Face folder, go on with a text.

    It reads the model in FP32, cut over ranks if need be, and computes every token anew: to hear what a run learned.

    Args:
        source: The folder of a run, one of its checkpoints, or a folder with a config.json and safetensors.
        prompt: The text to go on with, or what a user says in a chat.
        tokens: How many tokens to add at most.
        temperature: At 0 the likeliest token comes next; above, one is drawn, the more freely the higher it is.
        top_k: Draw among so many of the likeliest tokens only.
        seed: Of the draws.
        step: Of a run: the newest checkpoint, the best one by its evaluations, or that of a step.
        tokenizer: bytes, a folder with a tokenizer.json, or a hub's name. Default: that of the run's data.
        form: Whether the prompt is a text, or a chat to be answered. Default: chat where a run read only conversations.
        chat_template: A file with the chat template, in Jinja. Default: that of the tokenizer.
        ranks: Over how many ranks of this machine the model is cut. Default: 1, or as many as torchrun or srun starts.
        json: Print one JSON object instead of the text.
    """
    sampled = temperature > 0
    require(
        (tokens >= 1, "--tokens", f"must be at least 1, not {tokens}"),
        (0 <= temperature < math.inf, "--temperature", f"must be at least 0, not {temperature:g}"),
        (top_k is None or (top_k >= 1 and sampled), "--top-k", "must be at least 1, and needs a --temperature above 0"),
        (bool(prompt), "--prompt", "must not be empty"),
        (ranks is None or ranks >= 1, "--ranks", f"must be at least 1, not {ranks}"),
    )
    try:
        from autoshard.runtime.convert.ours import naming_removed
    except ModuleNotFoundError as error:
        raise InputError.of("autoshard generate", f"needs {error.name}: pip install 'autoshard[torch]'") from None
    with naming_removed(source):
        weights = _weights_in(source, step)
        words = _opened(weights, tokenizer, chat_template, source)
        first, closing = _said(words, prompt, weights, form)
        start_s = time.monotonic()
        ends = [closing or (), () if words.record.eos is None else (words.record.eos,)]
        ask = _Ask(weights=weights, prompt=first, num_tokens=tokens, ends=ends, draw=(temperature, top_k, seed))
        added = ask.on_ranks(ranks)
    if added is None:  # on another rank than the first
        return 0
    text, time_s = words.text(_unclosed(added, closing or ())), time.monotonic() - start_s
    if json:
        print_answer({"source": str(weights.folder), "prompt": prompt, "text": text, "tokens": added, "time_s": time_s})
    else:
        print(text if closing is not None else f"{prompt}{text}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What goes on with a text, and how."""

    weights: _Weights
    prompt: list[int]
    num_tokens: int
    ends: Sequence[tuple[int, ...]]  # after which nothing follows, or ()
    draw: tuple[float, int | None, int]

    def on_ranks(self, stated: int | None) -> list[int] | None:
        """Return the tokens that follow; None in the process of another rank than the first."""
        import_module("autoshard.runtime.generating")  # forks of a process that has it start at once
        launched = given_rank()
        if launched is not None and stated is not None:
            launched.refuse_other_size(stated, "--ranks")
        num_ranks = launched.num_ranks if launched else stated or 1
        plan = plan_of_text(self.weights.model, len(self.prompt) + self.num_tokens, num_ranks)
        _refuse_large(self.weights, num_ranks if launched else 1)  # before any rank has taken memory for its part
        if num_ranks == 1:
            return self._added(plan)
        folder, failed = Path(tempfile.mkdtemp(prefix="autoshard-generate-")), False
        placing = Placing(folder=folder)
        try:
            return launch(launched, num_ranks, lambda _: self._added(plan), show=lambda _: None, placing=placing)
        except RunFailed:  # whose message names the logs
            failed = True
            raise
        finally:
            if not failed:
                shutil.rmtree(folder)

    def _added(self, plan: Plan) -> list[int]:
        """Return the tokens that follow, as every rank computes them."""
        from autoshard.engine.torch.formats import Formats
        from autoshard.runtime.generating import SpeakingModel, chooser, continued

        model = SpeakingModel.of(plan, _source_of(self.weights), Formats())
        line, added = StatusLine(silent=given_rank() is not None), list[int]()
        for token in continued(model, self.prompt, self.num_tokens, chooser(*self.draw), self.ends):
            added.append(token)
            line.show(f"{len(added)} of {self.num_tokens} tokens")
        line.clear()
        return added


def plan_of_text(model: ModelSpec, num_tokens: int, num_ranks: int) -> Plan:
    """Return a plan that cuts a model over ranks by tp, for a sequence of so many tokens, filled up for the cut.

    Nothing is dropped at random when a model speaks.
    """
    length = -(-num_tokens // num_ranks) * num_ranks
    longest = model.max_positions if model.positions == "learned" else None
    filled = f", filled up to {length} for {num_ranks} ranks" if length > num_tokens else ""
    too_long = (
        f"the prompt and its continuation have {num_tokens} tokens{filled}, and the model knows {longest} positions"
    )
    require((longest is None or length <= longest, "--tokens", too_long))
    plain = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    work = Workload(seq_len=length, global_batch=1, precision=Precision.named("fp32"))
    try:
        cluster = load_cluster("local", ranks=num_ranks)
        request = Request(model=plain, cluster=cluster, workload=work, engines=("torch",))
        return plan_at(request, Candidate(tp=num_ranks, zero=0))
    except InputError as error:
        if num_ranks == 1:
            raise
        faults = (fault.message for fault in error.faults)
        raise InputError(Fault(where=f"--ranks {num_ranks}", message=message) for message in faults) from None


def _weights_in(source: Path, step: str | int) -> _Weights:
    """Find the weights that a folder holds, and what it says of them."""
    from autoshard.runtime.convert.converting import form_of
    from autoshard.runtime.convert.ours import checkpoint_of
    from autoshard.runtime.data.opened import tokenizer_of

    form = form_of(source)
    if form == "hf":
        require((step == "newest", "--step", f"is for runs, and {source} is a Hugging Face folder. Leave it out"))
        model = _untraced(load_model(source / _CONFIG))
        return _Weights(folder=source, model=model, tokenizer=_tokenizer_in(source))
    checkpoint = checkpoint_of(source) if form == "autoshard" else None
    if checkpoint is None:
        where = "Name the folder of a run, of a checkpoint, or of weights of Hugging Face"
        require((not source.is_file(), str(source), f"is a file. {where}"))
        raise InputError.of(str(source), f"holds weights of another form ({form}). Type first: autoshard convert")
    folder, index = checkpoint
    if step != "newest":
        of_best = index.state.best_step if step == "best" else step
        if of_best is None:
            unjudged = "no evaluation has judged this run. Give its recipe eval.sets"
            why = "eval.keep_best was false in this run. Type the number of a step" if index.state.judged_by else ""
            raise InputError.of("--step best", f"{why or unjudged}, or type --step newest")
        folder = _step_in(source, int(of_best))
    places = folder, folder.parent  # convert writes the configuration and the tokenizer beside checkpoints
    models = [
        *(load(place / PLAN).model for place in places if (place / PLAN).is_file()),
        *(load_model(place / _CONFIG) for place in places if (place / _CONFIG).is_file()),
    ]
    if not models:
        raise InputError.of(str(folder), f"does not say which model it is: neither {PLAN} nor {_CONFIG} is there")
    read = tokenizer_of(folder)
    named = read.name if read else next((name for name in map(_tokenizer_in, places) if name), None)
    return _Weights(folder=folder, model=_untraced(models[0]), tokenizer=named, read=read)


def _tokenizer_in(folder: Path) -> str | None:
    return str(folder) if (folder / "tokenizer.json").is_file() else None


def _step_in(source: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    folder = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    place = folder / folder_of(step)
    require((place.is_dir(), f"--step {step}", f"there is no checkpoint {place}"))
    return place


def _untraced(model: ModelSpec) -> ModelSpec:
    message = f"{model.name} was read off a module's code. Type autoshard convert, and let the module itself generate"
    require((model.traced is None, "model", message))
    return model


def _opened(weights: _Weights, stated: str | None, template: Path | None, source: Path) -> "Tokenizer":
    """Open the tokenizer, which opens and closes documents as those were that the run has read."""
    from autoshard.runtime.data.tokenizers import open_tokenizer

    name, read = stated or weights.tokenizer, weights.read
    if name is None:
        message = (
            f"nothing in {source} says which tokenizer made its tokens. Type bytes, or a folder with a tokenizer.json"
        )
        raise InputError.of("--tokenizer", message)
    words = open_tokenizer(named_tokenizer(name, None, None, template))
    if read is None or (stated is not None and words.record.sha256 != read.sha256):
        return words
    read.refuse_other(words.record.sha256)
    return replace(words, record=replace(words.record, eos=read.eos, bos=read.bos))


def _said(
    words: "Tokenizer", prompt: str, weights: _Weights, form: str | None
) -> tuple[list[int], tuple[int, ...] | None]:
    """Return the tokens of a prompt, and those that close the answer to it in a chat; None of a text."""
    from autoshard.runtime.data.opened import conversations_of, text_checksum
    from autoshard.runtime.data.tokenizers import ChatTemplate

    talks, closing = conversations_of(weights.folder), None
    if form == "text" or (form is None and talks is None):
        first = words.opened(prompt)
    else:
        missing = f"{words.record.name} has no chat template. Give one in a file of Jinja"
        differs = f"the conversations of this run were written by another template than that of {words.record.name}"
        same = talks is None or talks.template in (None, text_checksum(words.template or ""))
        require(
            (words.template is not None, "--chat-template", missing),
            (same, "--chat-template", f"{differs}. Name its file"),
        )
        before, after = ChatTemplate(source=words.template or "", special=words.special).around_answer(prompt)
        plain = replace(words, record=replace(words.record, bos=None))  # a template writes that itself
        first, closing = plain.opened(before), tuple(plain.opened(after))
    require((bool(first), "--prompt", f"has no token of {words.record.name}. Type some text"))
    require((max(first) < weights.model.vocab, "--tokenizer", _foreign(words, weights.model)))
    return first, closing


def _unclosed(tokens: list[int], closing: tuple[int, ...]) -> list[int]:
    """Return the tokens of an answer without those that close it."""
    is_closed = bool(closing) and tuple(tokens[-len(closing) :]) == closing
    return tokens[: -len(closing)] if is_closed else tokens


def _foreign(words: "Tokenizer", model: ModelSpec) -> str:
    return f"tokens of {words.record.name} go to {words.record.vocab - 1}, those of {model.name} to {model.vocab - 1}"


def _refuse_large(weights: _Weights, num_shares: int) -> None:
    """Refuse weights of which this machine cannot hold even one of so many equal shares."""
    from autoshard.runtime.machine import available_bytes

    needed, there = weights.model.num_parameters * DTYPE_BYTES["fp32"] // num_shares, available_bytes()
    share = "" if num_shares == 1 else f"1/{num_shares} of "
    large = f"{share}its weights take {format_bytes(needed)} in FP32, and this machine has {format_bytes(there)} left"
    require((needed < there, str(weights.folder), large))


def _source_of(weights: _Weights) -> "WeightSource":
    from autoshard.runtime.convert.converting import form_of, open_weights

    config = weights.folder / _CONFIG
    form = form_of(weights.folder)
    family: Any = read_config(config)[_FAMILY] if form == "hf" else None
    return open_weights(weights.folder, form, family and str(family), weights.model)
