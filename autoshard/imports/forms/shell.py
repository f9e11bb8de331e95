"""Arguments in a shell script: variables, lists and simple conditions are followed; nothing runs.

A line of arguments without a script is read as well.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import InputError

_ASSIGNMENT = re.compile(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d+)(?:\[@\]|\[\*\])?(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*|\d+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_NAME = re.compile(r"(?<![$\w{])[A-Za-z_]\w*")
_OPERATION = re.compile(r"(\d+)\s*([*/+-])\s*(\d+)")
_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]\]?$", re.DOTALL)
_DOUBLE = re.compile(r"\[\[\s+((?:(?!\]\]).)*)\s+\]\]", re.DOTALL)
_QUOTED_LIST = re.compile(r'"(\$\{\w+\[@\]\}|\$@)"')
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_SIZES = re.compile(r"--(num-layers|[\w-]*parallel-size)")  # without these, a script hands its arguments to another
_READ_IN = re.compile(r"(?:\.|source)\s+\S*?([\w.-]+)\s*$")
_SLURM_NODES = re.compile(r"^#SBATCH\s+(?:--nodes(?:=|\s+)|-N\s*)(\d{1,6})\s*(?:#.*)?$", re.MULTILINE)
_NODES_OF_SLURM = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")  # sbatch(1), output environment variables
_UNKNOWN = re.compile(r"[$`]")
_MORE_OPTIONS = re.compile(r"\$\{?\w*(?:options?|args?|arguments|opts|flags|extras?)(?:\[[@*]\])?\}?", re.IGNORECASE)
_NO_VALUES = ("\\", "&&", "|", "&", ">", "$@", "$*")
_STARTED = (".py", ".sh", "torchrun", "python", "bash")
_MOST_LETTERS = 2**20


def _nothing(name: str) -> str | None:
    """Read no other script."""


@dataclass(slots=True)
class _Script:
    """Variables as they stand at a line, the words of commands, and the conditions that could not be decided."""

    variables: dict[str, str] = field(default_factory=dict[str, str])
    commands: list[str] = field(default_factory=list[str])
    undecided: list[str] = field(default_factory=list[str])
    doubt: str = ""  # the condition under which lines are left out
    beside: Callable[[str], str | None] = _nothing  # the text of a script that this one reads in

    def expanded(self, text: str) -> str:
        """Put values in the place of variables; those without one stay."""
        for _ in range(8):
            before = text
            text = _VARIABLE.sub(self._value, text)
            text = _ARITHMETIC.sub(lambda match: _computed(_NAME.sub(self._bare, match[1])), text)
            if text == before or len(text) > _MOST_LETTERS:
                break
        return text

    def _bare(self, match: re.Match[str]) -> str:
        return self.variables.get(match[0], match[0])

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        value = self.variables.get(name)
        return value if value is not None else default.strip("\"'") if default is not None else match[0]

    def assign(self, name: str, value: str, *, appends: bool) -> None:
        """Set a variable; a list is kept as the text of its words."""
        text = value.strip()
        text = _QUOTED_LIST.sub(r"\1", text[1:-1].strip()) if text[:1] == "(" else _unquoted(text)
        text = self.expanded(text)
        self.variables[name] = f"{self.variables.get(name, '')} {text}" if appends else text

    def holds(self, test: str) -> bool | None:
        """Say whether a condition holds, of several joined by || or &&; None where the script does not say."""
        for joint, decides in (("||", True), ("&&", False)):
            whole = _DOUBLE.fullmatch(test.strip())
            parts = [f"[ {part} ]" for part in whole[1].split(joint)] if whole else test.split(joint)
            if len(parts) > 1:
                results = [self.holds(part) for part in parts]
                return decides if decides in results else None if None in results else not decides
        return self._single(test)

    def _single(self, test: str) -> bool | None:
        match = _TEST.match(self.expanded(test).strip())
        try:
            parts = shlex.split(match[1]) if match else []
        except ValueError:
            return None
        parts = parts[1:] if (negated := parts[:1] == ["!"]) else parts
        if len(parts) == 2 and parts[0] in ("-n", "-z") and not _UNKNOWN.search(parts[1]):
            result = bool(parts[1]) == (parts[0] == "-n")
        elif len(parts) == 3 and not _UNKNOWN.search(parts[0] + parts[2]):
            result = _compared(*parts)
        else:
            return None
        return None if result is None else result != negated


def _compared(a: str, operator: str, b: str) -> bool | None:
    if operator in ("==", "=", "-eq"):
        return a == b
    if operator in ("!=", "-ne"):
        return a != b
    if operator in ("-gt", "-lt", "-ge", "-le") and a.isdecimal() and b.isdecimal():
        x, y = int(a), int(b)
        return {"-gt": x > y, "-lt": x < y, "-ge": x >= y, "-le": x <= y}[operator]
    return None


def _computed(text: str) -> str:
    """Compute products, quotients, sums and differences of whole numbers, from the left.

    >>> _computed("8*2"), _computed("$A*2")
    ('16', '$((A*2))')
    """
    reduced = text.strip()
    for operators in ("*/", "+-"):
        while (match := _OPERATION.search(reduced)) and match[2] in operators:
            x, y = int(match[1][:18]), int(match[3][:18])
            if match[2] == "/" and y == 0:
                break
            result = {"*": x * y, "+": x + y, "-": x - y}.get(match[2], x // y if y else 0)
            reduced = f"{reduced[: match.start()]}{result}{reduced[match.end() :]}"
    bare = reduced.replace("(", "").replace(")", "").strip()
    return bare if bare.isdecimal() else f"$(({text.replace('$', '').strip()}))"


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def shell_arguments(
    text: str, where: str, beside: Callable[[str], str | None] = _nothing
) -> dict[str, str | bool | list[str]]:
    """Return the options of a script's commands by name, with ``_`` for ``-``; those without a value are true.

    >>> shell_arguments('''TP=8
    ... ARGS=(--tensor-model-parallel-size $TP --bf16)
    ... torchrun --nnodes 2 pretrain_gpt.py ${ARGS[@]} --lr -1e-4''', "")
    {'tensor_model_parallel_size': '8', 'bf16': True, 'lr': '-1e-4', 'nnodes': '2'}
    """
    script, nodes = _Script(beside=beside), _SLURM_NODES.search(text)
    script.variables |= dict.fromkeys(_NODES_OF_SLURM, nodes[1]) if nodes else {}
    _run(script, list(_statements(text)))
    options: dict[str, str | bool | list[str]] = {}
    stated = any(_SIZES.search(script.expanded(command)) for command in script.commands)
    unused = [] if stated else [value for value in script.variables.values() if "--" in value]
    variables = list[str]()
    for command in (*unused, *script.commands):
        words = _split(script.expanded(_QUOTED_LIST.sub(r"\1", command)), where)
        options |= _options(words)
        variables += [word for word in words if _MORE_OPTIONS.fullmatch(word) and any("--" in item for item in words)]
    options |= {"variables": [*dict.fromkeys(variables)]} if variables else {}
    if nodes and options and not {"nnodes", "num_nodes"} & options.keys():
        options["nnodes"] = nodes[1]
    return options | ({"conditions": script.undecided} if script.undecided else {})


def _statements(text: str) -> Iterator[str]:
    """Yield logical lines: comments out, continued lines and lists in brackets joined."""
    pending, depth, quote = "", 0, ""
    for line in text.replace("\\\n", " ").replace(",\n", ", ").splitlines():
        kept_line = _without_comment(line, quote)
        pending = f"{pending} {kept_line}" if pending else kept_line
        depth, quote = _state(pending)
        if depth > 0 or quote:
            continue
        yield from (part.strip() for part in _cut(pending, ";") if part.strip())
        pending = ""
    if pending.strip():
        yield pending.strip()


def _cut(text: str, separators: str) -> list[str]:
    """Split text at separators that stand in no quotes and no brackets.

    >>> _cut("A=1; B='2; 3'; C=$(echo 4; echo 5)", ";")
    ['A=1', " B='2; 3'", ' C=$(echo 4; echo 5)']
    """
    parts, depth, quote, start = list[str](), 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'`":
            quote = letter
        elif letter == "(" or text[place - 1 : place + 1] == "${":
            depth += 1
        elif letter in ")}":
            depth -= depth > 0
        elif letter in separators and not depth:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _without_comment(line: str, quote: str) -> str:
    for place, letter in enumerate(line):
        if letter in "\"'" and not quote:
            quote = letter
        elif letter == quote:
            quote = ""
        elif letter == "#" and not quote and (place == 0 or line[place - 1] in " \t("):
            return line[:place]
    return line


def _state(text: str) -> tuple[int, str]:
    """Return how many brackets of lists are open at the end of a text, and which quote."""
    depth, quote = 0, ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "(":
            depth += depth > 0 or text[place - 1 : place] in ("=", "$", "(")
        elif letter == ")":
            depth -= depth > 0
    return depth, quote


def _run(script: _Script, lines: Sequence[str]) -> None:
    """Follow the lines; of conditions only the branch that holds. Undecided ones, loops and functions are left out."""
    branches: list[list[bool]] = []  # of open conditions: whether this branch is followed, whether one was
    for line in lines:
        word, _, rest = line.partition(" ")
        if word in ("if", "elif", "else", "then", "fi"):
            _branch(script, branches, word, rest.strip())
            script.doubt = script.doubt if any(not follows for follows, _ in branches) else ""
            continue
        if word in ("case", "for", "while", "until", "function"):
            script.doubt = line
            branches.append([False, True])
        elif word in ("esac", "done") and branches:
            branches.pop()
        elif all(follows for follows, _ in branches):
            _follow(script, line)
        elif "--" in line and script.doubt and script.doubt not in script.undecided:
            script.undecided.append(script.doubt)


def _branch(script: _Script, branches: list[list[bool]], word: str, rest: str) -> None:
    if word == "if" or (word == "elif" and branches):
        test = rest.partition("; then")[0].removesuffix("then").strip()
        outer = branches if word == "if" else branches[:-1]
        result = script.holds(test) if all(follows for follows, _ in outer) else False
        if result is None:
            script.doubt = f"if {test}"
        done = word == "elif" and branches[-1][1]
        state = [bool(result) and not done, bool(result) or done or result is None]
        branches[len(branches) - (word == "elif") :] = [state]
    elif word == "else" and branches:
        branches[-1] = [not branches[-1][1], True]
    elif word == "fi" and branches:
        branches.pop()
    elif word == "then" and rest and all(follows for follows, _ in branches):
        _follow(script, rest)


def _follow(script: _Script, line: str) -> None:
    reads = _READ_IN.fullmatch(line)
    text = script.beside(reads[1]) if reads else None
    if text is not None:
        before, script.beside = script.beside, _nothing  # what that script reads in is left out
        _run(script, list(_statements(text)))
        script.beside = before
        return
    match = _ASSIGNMENT.fullmatch(line)
    if not match or re.match(r"[^\"'(]*\s+\S*--", match[3]):
        script.commands.append(line)
        return
    value, *words = _cut(match[3].strip(), " \t")
    script.assign(match[1], value, appends=bool(match[2]))
    for further in filter(None, map(_ASSIGNMENT.fullmatch, words)):  # A=1 B=2
        script.assign(further[1], further[3], appends=bool(further[2]))


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text.replace("\n", " "))
    except ValueError as error:
        raise InputError.of(where, f"is no shell script that can be read: {error}") from None


def _options(items: Sequence[str]) -> Mapping[str, str | bool | list[str]]:
    """Return the options of a command line, by name; a quoted word may hold an option with its value, or a whole line.

    An option before the script that a launcher starts has only its first value.
    """
    parts = list[str]()
    for item in items:
        is_line = item.lstrip().startswith("--") or parts[-1:] == ["-c"]
        parts += _words(item) if is_line else [item]
    options: dict[str, str | bool | list[str]] = {}
    name = ""
    for part in parts:
        if _MORE_OPTIONS.fullmatch(part):  # no value of the option before
            name = ""
        elif part.startswith("--") and _OPTION.match(part):
            name, equals, value = part.lstrip("-").partition("=")
            name = name.replace("-", "_")
            options[name] = value if equals else True
        elif name and part not in _NO_VALUES:
            before = options[name]
            options[name] = part if before is True else [*(before if isinstance(before, list) else [str(before)]), part]
        else:
            name = ""
    return {key: value for key, value in options.items() if not _trailing_script(value)} | {
        key: value[0] for key, value in options.items() if isinstance(value, list) and _trailing_script(value)
    }


def _words(item: str) -> list[str]:
    """Return the words of a quoted list, which may have quotes inside."""
    try:
        return shlex.split(item)
    except ValueError:
        return item.split()


def _trailing_script(value: str | bool | list[str]) -> bool:
    """Say whether the name of the program that a launcher starts follows a value: ``--nnodes 2 pretrain_gpt.py``."""
    return isinstance(value, list) and len(value) > 1 and (value[1].endswith(_STARTED) or value[1] == "sh")
