"""How text of a user reaches a script: as one word, as a remark, or as a line of shell that is whole."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator


def word(text: str) -> str:
    """Return a text as one word of shell, whatever it holds.

    >>> word("runs/first"), word("a;touch<pwned")
    ('runs/first', "'a;touch<pwned'")
    """
    return shlex.quote(text)


def shell_words(texts: Iterable[str]) -> str:
    """Return texts as words of one line of shell."""
    return " ".join(map(word, texts))


def folder_word(path: str) -> str:
    """Return a folder as one word of shell; a relative one leads from where the script is.

    >>> folder_word("run"), folder_word("/fsx/my run")
    ('"$PWD"/run', "'/fsx/my run'")
    """
    return word(path) if path.startswith("/") else f'"$PWD"/{word(path)}'


def remark(text: str) -> str:
    """Return a text for a comment, which ends where its line does.

    >>> remark("llama" + chr(10) + "rm")
    'llama?rm'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def path_faults(path: str) -> Iterator[str]:
    """Yield the reasons why a node cannot find a folder by this path."""
    if not path or not path.isprintable():
        yield f"must be a path without line breaks and the like, not {path!r}"
    elif "://" in path:
        yield f"must be a folder that nodes mount, not {path!r}. Checkpoints go elsewhere: --checkpoint.to URL"
    elif re.search(r"[$`]|^~", path):
        yield f"must be a plain path, not {path!r}: no node replaces $, ` and ~ in it. Write it out"


def shell_faults(line: str) -> Iterator[str]:
    """Yield why a user's line cannot stand between the lines of a script: it must begin and end there."""
    if "\n" in line:
        yield "must be one line. Put several commands into a script, and name that"
    elif not line.replace("\t", " ").isprintable():
        yield f"must be text without control characters, not {line!r}"
    elif re.search(r"(?<!\\)(\\\\)*\\$", line):
        yield "ends in a backslash, which would join it to the next line. Leave that out"
    elif bash := shutil.which("bash"):  # also says of a here-document that it has no end
        done = subprocess.run([bash, "-n"], input=line + "\n", capture_output=True, text=True, check=False)
        if said := done.stderr.strip():
            yield f"is no whole line of shell ({said.splitlines()[0].removeprefix(f'{bash}: ')}): {line!r}"
