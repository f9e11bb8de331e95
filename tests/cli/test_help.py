"""The help of every command: everyday options first, examples that are read as they stand, words that lead on."""

import shlex
from pathlib import Path

import pytest

from autoshard.command_line.help import help_of
from autoshard.command_line.options import options_of
from autoshard.command_line.reading import read_options
from autoshard.commands import COMMANDS, EVERYDAY, EXAMPLES, command_of
from autoshard.errors import InputError


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_two_examples_that_are_read_without_a_fault(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text("{}")
    assert len(EXAMPLES[name]) == 2
    for line in EXAMPLES[name]:
        program, command, *words = shlex.split(line.partition(" > ")[0])
        assert program == "autoshard"
        assert read_options(command, command_of(command), words)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_names_every_option_once_and_everyday_ones_first(name: str) -> None:
    text = help_of(name, command_of(name), EVERYDAY.get(name, ()), EXAMPLES[name])
    options = {option.name: option for option in options_of(command_of(name))}
    lines = [line.strip() for line in text.partition("\n\n")[2].splitlines()]
    for option in options.values():
        shown = option.label if option.is_positional else option.flag
        starts = [line for line in lines if line.removeprefix("-v, ").split(" ")[0] == shown]
        assert len(starts) == 1, shown
    places = [text.index(f"  {options[key].flag} ") for key in EVERYDAY.get(name, ())]
    assert places == sorted(places) and all(place < text.index("of every command:") for place in places)
    assert max(map(len, text.partition("examples:")[0].splitlines())) <= 80
    assert all(example in text for example in EXAMPLES[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8", "--gpus: unknown option. Type --nodes"),
        ("--tensor-parallel 8", "Type --fix tp=N"),
        ("--lcn 2", "Did you mean --lnc"),
        ("tiny-llama --model tiny-gpt", "--model: is typed twice"),
        ("tiny-llama --fix tp=2 pp=2", "pp=2: belongs to no option. Values of one option are joined by commas"),
        ("tiny-llama --headroom 5 %", "%: belongs to no option. --headroom has 5 alone: write values without spaces"),
        ("tiny-llama --tokens 1T --deadline 30 days", "days: belongs to no option. --deadline has 30 alone"),
        ("tiny-llama --cluster trn1 h100", "h100: belongs to no option. --cluster has trn1 alone: "),
        ("tiny-llama tiny-gpt", "tiny-gpt: belongs to no option. One line takes one of these"),
        ("tiny-llama --seq-len 8q", "--seq-len: expected a whole number, found '8q'"),
        ("plan.json", ""),
    ],
)
def test_words_that_are_wrong_lead_to_the_right_ones(words: str, message: str) -> None:
    if message:
        with pytest.raises(InputError) as raised:
            read_options("plan", command_of("plan"), shlex.split(words))
        assert message in "; ".join(map(str, raised.value.faults))
    else:
        assert read_options("plan", command_of("plan"), [words])["question"].model == words


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("tiny-llama --seq-len 8k", "seq_len", 8192),
        ("tiny-llama --headroom 5%", "headroom", 0.05),
        ("tiny-llama --global-batch 4M", "global_batch", "4M"),
        ("tiny-llama --global-batch 512", "global_batch", 512),
        ("tiny-text", "seq_len", 128),
    ],
)
def test_numbers_are_read_as_people_write_them(words: str, option: str, value: object) -> None:
    question = read_options("plan", command_of("plan"), shlex.split(words))["question"]
    assert getattr(question, option) == value
    assert question.model == "tiny-llama"


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--eval.keep-best false", "eval.keep_best", False),
        ("--eval.keep-best=false", "eval.keep_best", False),
        ("--eval.keep-best", "eval.keep_best", True),
        ("--deterministic true", "deterministic", True),
        ("--deterministic false", "deterministic", False),
        ("--watchdog.off --track.tensorboard false", "watchdog.off", True),
    ],
)
def test_what_a_recipe_or_the_start_before_says_can_be_said_otherwise(words: str, option: str, value: bool) -> None:
    """A default of true, and what a folder keeps of its last start, could not be turned off on a line."""
    for line in ([*words.split(), "tiny-text"], ["tiny-text", *words.split()]):
        assert read_options("run", command_of("run"), line)["training"].values[option] is value


def test_a_switch_takes_no_other_word_and_is_typed_once() -> None:
    for line, said in (
        ("tiny-text --deterministic=maybe", "expected true or false, found 'maybe'"),
        ("tiny-text --deterministic true --deterministic false", "is typed 2 times. Keep one"),
    ):
        with pytest.raises(InputError, match=said):
            read_options("run", command_of("run"), line.split())
