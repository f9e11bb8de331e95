"""Calls of a submodule of a sharded module, whose parameters are parts: they are refused, but while it is traced."""

from typing import Any, NoReturn

import torch

from autoshard.errors import InputError

_CALL = "_compiled_call_impl"  # by which torch runs a module in the place of its own call; no copy keeps it


class PartCall:
    """Stands for the call of a submodule, and knows how it ran before."""

    def __init__(self, path: str, before: Any) -> None:
        self.path, self.before = path, before

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the call."""
        message = "is a part of a sharded module, which cannot run by itself; call the module, or shard this part alone"
        raise InputError.of(self.path, message)


def refuse_part_calls(module: torch.nn.Module) -> None:
    """Let every submodule refuse to be called."""
    for path, submodule in module.named_modules():
        before = vars(submodule).get(_CALL)
        if path and not isinstance(before, PartCall):
            vars(submodule)[_CALL] = PartCall(path, before)


def allow_part_calls(module: torch.nn.Module) -> None:
    """Let every submodule run as before."""
    for submodule in module.modules():
        call = vars(submodule).get(_CALL)
        if isinstance(call, PartCall):
            vars(submodule)[_CALL] = call.before
            if call.before is None:
                del vars(submodule)[_CALL]
