"""Names stand for nouns: the share of placeholders among all bound names may only fall."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import ROOT, nodes_of

PACKAGE = ROOT / "autoshard"
PLACEHOLDERS = frozenset((
    "found", "one", "own", "some", "given", "made", "taken", "each", "mine", "kept", "wanted", "other", "others",
    "every", "known", "asked", "begun", "apart", "alike", "left",
))  # fmt: skip
MIRRORS = frozenset((
    # a command, what it calls, and the function of Python
    *("compare", "convert", "explain", "export", "import_", "launch", "load", "plan", "report"),
    *("run", "tokenize", "validate", "verify"),
    *("build", "keeps", "philox"),  # both engines; a kernel in torch, and the same in numpy
    *("local", "cp_heads"),  # what users write, and how it is read; a Rule of candidates, and of Strategies
    "main",
))  # fmt: skip
MOST = 0.0028  # of all bound names; lower it with every name that gets its noun


def bound(path: Path) -> Iterator[str]:
    """Every name of a file that is assigned, looped over, imported under a name or a parameter."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def counts() -> Counter[str]:
    return Counter(name for path in sorted(PACKAGE.rglob("*.py")) for name in bound(path))


def test_fewer_names_are_placeholders_than_before() -> None:
    names = counts()
    placeholders = {name: names[name] for name in PLACEHOLDERS if names[name]}
    share = sum(placeholders.values()) / names.total()
    most = ", ".join(f"{name} {count}" for name, count in Counter(placeholders).most_common(5))
    assert share <= MOST, f"{share:.2%} of {names.total()} names are placeholders ({most}); give them nouns"


def test_a_public_name_of_a_module_means_one_thing() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = nodes_of(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(PACKAGE)))
    repeated = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert repeated.keys() == MIRRORS, {name: repeated.get(name) for name in repeated.keys() ^ MIRRORS}
