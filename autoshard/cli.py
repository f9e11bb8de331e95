"""The command line: which commands there are, and what becomes of faults."""

import atexit
import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from autoshard.commands import COMMANDS, EVERYDAY, EXAMPLES, MEANT, command_of
from autoshard.errors import AutoshardError, InputError, close_names, nearest
from autoshard.units import counted
from autoshard.version import __version__

_RARELY = (1_000_000, 20, 20)  # measured: looking for cycles of objects takes a twentieth of a planning process
atexit.register(gc.freeze)  # measured: the last look for cycles takes an eighth of a long search, and frees nothing
_MOST_FAULTS = 40  # printed: a file of another kind has one in every line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every fault the user can mend is one clear message, never a traceback."""
    gc.set_threshold(*_RARELY)
    encoding = "ascii" if _asks_for_ascii() else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="replace")  # an odd character must not stop the command
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except InputError as error:
        for fault in error.faults[:_MOST_FAULTS]:
            _complain(" ".join(str(fault).split()))
        if len(error.faults) > _MOST_FAULTS:
            _complain(f"and {counted(len(error.faults) - _MOST_FAULTS, 'fault')} more")
        return error.exit_code
    except AutoshardError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted")
        return 130
    except Exception as error:
        return _exit_code_of(error) if isinstance(error, OSError) else _exit_code_of_extension(error)


def _exit_code_of(error: OSError) -> int:
    """Name the file that cannot be read or written; if it is our output, and its reader has gone, all is well."""
    has_gone = isinstance(error, BrokenPipeError)
    if not has_gone:
        _complain(f"{error.filename or 'the output'}: {error.strerror or error}")
    if error.filename is None:
        _drop(sys.stdout)
    return 0 if has_gone else 2


def _exit_code_of_extension(error: Exception) -> int:
    """Name the line of a user's file from which an error comes; any other is ours, and told with its traceback."""
    from autoshard.extensions import fault_of

    fault = fault_of(error)
    if fault is None:
        raise error
    _complain(" ".join(str(fault).split()))
    return InputError.exit_code


def _drop(stream: TextIO) -> None:
    """Let a stream lead nowhere: what is still buffered cannot be written, and Python would try it again at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _asks_for_ascii() -> bool:
    """Say whether the locale is plain C, which Python takes for UTF-8, unless the user chose an encoding for Python."""
    locale = next((value for name in ("LC_ALL", "LANG") if (value := os.environ.get(name))), "")
    return locale in ("C", "POSIX") and not {"PYTHONIOENCODING", "PYTHONUTF8"} & os.environ.keys()


def _complain(text: str) -> None:
    try:
        print(f"autoshard: {text}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that is gone: the exit code tells as well
        _drop(sys.stderr)


def _run(arguments: list[str]) -> int:
    first, *rest = arguments or [""]
    if first in ("-V", "--version", "version"):
        print(f"autoshard {__version__}")
        return 0
    if first == "help" and rest:
        first, *rest = rest[0], "--help"
    if first in ("", "-h", "--help", "help"):
        title = "autoshard: the fastest way to cut a training run over a cluster that fits in memory."
        usage = "usage: autoshard COMMAND ...      (autoshard help COMMAND says more; autoshard --version)"
        rows = (f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
        print(title, "", usage, "", *rows, sep="\n", file=sys.stdout if first else sys.stderr)
        return 0 if first else 2
    if first.startswith("-"):
        raise InputError.of(first, f"options follow a command. Type: autoshard plan MODEL {first}")
    if first not in COMMANDS:
        raise InputError.of(first, f"not a command. {_meant(first)}")
    command = command_of(first)
    if {"-h", "--help"} & set(rest):
        from autoshard.command_line.help import help_of

        print(help_of(first, command, EVERYDAY.get(first, ()), EXAMPLES.get(first, ())), end="")
        return 0
    from autoshard.command_line.reading import read_options  # takes longer than all of --help

    return command(**read_options(first, command, rest, EXAMPLES.get(first, ())))


def _meant(word: str) -> str:
    """Say what may have been meant by a word that is no command: a word of other programs, or a model to plan."""
    if word in MEANT:
        return f"Type: autoshard {MEANT[word]}"
    from autoshard.spec.model_catalogue import model_names

    models = close_names(word, model_names()) if not close_names(word, tuple(COMMANDS)) else []
    return f"Type: autoshard plan {models[0]}" if models else nearest(word, tuple(COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
