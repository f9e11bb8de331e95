"""A Python file of a user's own: the Rules, cost terms and schedules that it defines hold in this process."""

import hashlib
import importlib.util
import sys
import traceback
from collections import Counter
from pathlib import Path

from autoshard.cost.terms import USER_TERMS, CostTerm
from autoshard.errors import InputError, require
from autoshard.plan.extensions import LOADED
from autoshard.plan.rules.check import USER_RULES, all_rules
from autoshard.plan.rules.rule import Rule
from autoshard.schedule.builders import BUILDERS, Builder


def load_extension(path: Path) -> None:
    """Run a file, and register its values: every Rule and CostTerm, and every Builder as the schedule of its name.

    A file that is loaded already is not run again.
    """
    where, whole = f"--extend {path}", path.resolve()
    try:
        text = whole.read_bytes()
    except OSError as error:
        raise InputError.of(where, f"cannot be read: {error.strerror or error}") from None
    digest = hashlib.sha256(text).hexdigest()[:16]
    if LOADED.get(whole) == digest:
        return
    names = [one.name for one in LOADED]
    require((whole not in LOADED and whole.name not in names, where, "a file of this name is loaded already"))
    require((whole.suffix == ".py", where, "must be a Python file, like my_module.py"))
    spec = importlib.util.spec_from_file_location(f"autoshard_extension_{whole.stem}", whole)
    assert spec and spec.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(whole)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise InputError.of(where, f"line {line}: {type(error).__name__}: {error}") from None
    values = [(name, one) for name, one in vars(module).items() if not name.startswith("_")]
    rules = [one for _, one in values if isinstance(one, Rule)]
    terms = [one for _, one in values if isinstance(one, CostTerm)]
    builders = {name: one for name, one in values if isinstance(one, Builder)}
    known = [*(one.id for one in (*all_rules(), *USER_RULES)), *(one.part for one in USER_TERMS), *BUILDERS]
    mine = [*(one.id for one in rules), *(one.part for one in terms), *builders]
    twice = [name for name, count in Counter([*set(known), *mine]).items() if count > 1]
    require((not twice, where, f"{', '.join(twice)}: this name is taken. Choose another"))
    USER_RULES.extend(rules)
    USER_TERMS.extend(terms)
    BUILDERS.update(builders)
    LOADED[whole] = digest
