"""The controls of a pane are options of ``autoshard plan``: they make its line, and its line is read as it reads it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from autoshard.command_line.options import Counts, options_of
from autoshard.command_line.reading import read_options
from autoshard.commands.plan import SHOWN, SearchOptions, plan, selection_checks
from autoshard.commands.writing.here import on_this_machine
from autoshard.commands.writing.target import token_total
from autoshard.errors import InputError, inside, require
from autoshard.search.ask.answers import num_searched
from autoshard.search.bound.request import Request
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.recipe import QuestionOptions

_MORE = "more options"
_ELSEWHERE = ("--extend", "--config")  # options of the command line that opened the page
_LONGEST = 2000  # letters of a control


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The texts in the controls of a pane; an empty one leaves out its option. ``more`` has any options."""

    model: str = ""
    cluster: str = ""
    nodes: str = ""
    seq_len: str = ""
    global_batch: str = ""
    fix: str = ""
    tokens: str = ""
    choose: str = ""
    more: str = ""

    def __post_init__(self) -> None:
        """Refuse texts that nobody has typed."""
        long = f"is longer than {_LONGEST} letters"
        texts = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        require(*((len(text) <= _LONGEST and "\0" not in text, name, long) for name, text in texts.items()))

    @property
    def words(self) -> list[str]:
        """The words that follow ``autoshard plan`` on a command line."""
        words = list[str]()
        for entry in fields(self):
            value = getattr(self, entry.name).strip()
            if not value or entry.name == "more":
                continue
            flag = f"--{entry.name.replace('_', '-')}"
            if entry.name == "model" and value in model_names():
                words.append(value)
            else:
                words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
        try:
            more = shlex.split(self.more)
        except ValueError as error:
            raise InputError.of(_MORE, f"{str(error)[0].lower()}{str(error)[1:]}. Close every quote") from None
        message = "belongs to the line that opens the page: autoshard explore --extend FILE.py"
        require(*((word.partition("=")[0] not in _ELSEWHERE, f"{_MORE}: {word}", message) for word in more))
        return words + more


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneQuestion:
    """A question, which of its answers is shown, and how its search goes on."""

    request: Request
    options: SearchOptions
    num_plans: int
    choose: str | None
    total_tokens: float | None


def _line(
    question: QuestionOptions,
    options: SearchOptions,
    nodes: Counts = (),
    choose: str | None = None,
    top: int | None = None,
    tokens: str | None = None,
) -> int:
    """Take the options of ``autoshard plan`` that are part of a question."""
    raise AssertionError("only its parameters are read")


def read_question(words: list[str]) -> PaneQuestion:
    """Read a line of ``autoshard plan``; what is wrong with it is one error with all faults."""
    of_page = {option.flag for option in options_of(_line)}
    of_command = {option.flag for option in options_of(plan)} - of_page
    flags = [word.partition("=")[0] for word in words]
    message = "has no place on this page, which asks for one plan. Type it to autoshard plan"
    require(*((flag not in of_command, flag, message) for flag in flags))
    values = read_options("plan", _line, words)
    question, options, nodes = values["question"], values["options"], values["nodes"]
    choose, top, tokens = values["choose"], values["top"], values["tokens"]
    several = "names several clusters; a pane asks about one. Compare two in two panes"
    require(
        (question.model is not None, "--model", "missing. Choose a model"),
        ("," not in (question.cluster or ""), "--cluster", several),
        *selection_checks(nodes, choose, top),
    )
    with inside(""):
        total = token_total(tokens) if tokens is not None else None
    (request,) = options.requests(on_this_machine(question), nodes)
    count = num_searched(choose, top or SHOWN)
    return PaneQuestion(request=request, options=options, num_plans=count, choose=choose, total_tokens=total)


def controls_of(question: QuestionOptions, nodes: Counts, tokens: str | None, choose: str | None) -> Controls:
    """Return the controls that ask a question of a command line; what has no control stands in ``more``."""
    names = {entry.name for entry in fields(Controls)}
    texts = {name: str(value) for name, value in question.given.items() if name in names}
    controls = Controls(
        **texts,
        nodes=",".join(map(str, nodes)),
        tokens=tokens or "",
        choose=choose or "",
        more=shlex.join(_rest(question)),
    )
    return controls if controls.model else replace(controls, model="llama3-70b", nodes=controls.nodes or "16")


def _rest(question: QuestionOptions) -> Iterator[str]:
    names = {entry.name for entry in fields(Controls)}
    for name, value in question.given.items():
        if isinstance(value, Mapping):  # tensor -> layout
            for tensor, layout in question.pins.items():
                yield from ("--pin", f"{tensor}={layout}")
        elif name not in names:
            yield from (f"--{name.replace('_', '-')}", str(value))
