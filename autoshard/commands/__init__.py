"""The commands, one module each; the docstring of a command is its help."""

import importlib
from collections.abc import Callable
from keyword import iskeyword

COMMANDS = {  # each is a function of its name, in a module of its name, whose docstring is its help
    "plan": "find the fastest layout of a training run that fits in memory",
    "explain": "show where the time and the memory of a plan go, and what comes next to it",
    "report": "draw plans, and a run beside its prediction, as a page to look at",
    "compare": "say which of two plans is predicted to be faster, and why",
    "import": "predict a configuration of Megatron, torchtitan, NxD Training, ...; name a better plan",
    "export": "write a plan as a configuration of another program",
    "verify": "say why a plan cannot run, or prove that its sharding computes the same",
    "run": "train as a plan or a recipe says; put the prediction beside the measurement",
    "watch": "show how a run is doing, from any machine that sees its folder",
    "launch": "write the files that start a plan on a cluster",
    "sweep": "plan or run many questions, and put all results into one table",
    "tokenize": "turn text into tokens that runs can read",
    "convert": "convert weights between forms and layouts",
    "validate": "predict measured runs, and say how far that is off",
    "calibrate": "fit the constants of the cost model to measured runs",
    "contribute": "write the measured rows of runs into a file for others, with nothing private in it",
    "advise": "say which short runs would change the choice of a plan most; write their plans",
    "list": "list the names that options take: models, clusters, engines, schedules, ...",
    "completion": "print the script with which bash, zsh or fish completes commands and options",
}
_FOLDERS = {"import": "interchange", "export": "interchange"}  # of commands that have one


def command_of(name: str) -> Callable[..., int]:
    """Return the function of a command; only its own module is imported. Words of Python get a line at their end."""
    function = f"{name}_" if iskeyword(name) else name
    folder = f"{_FOLDERS[name]}." if name in _FOLDERS else ""
    return getattr(importlib.import_module(f"autoshard.commands.{folder}{function}"), function)
