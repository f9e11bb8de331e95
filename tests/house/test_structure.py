"""The shape of the package: no folder too full, no class name twice, no cycle of imports, not even a lazy one."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "autoshard"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_FILES = 20

# A kind of operation and the module that mirrors it share a name.
KINDS, MIRRORS = PACKAGE / "graph" / "kinds", PACKAGE / "engine" / "decoder"


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, at its top or later, but for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_folder_is_too_full() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in MODULES.values()}}
    assert not {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MOST_FILES}


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    mirrored = {name for name, paths in twice.items() if {path.parent for path in paths} == {KINDS, MIRRORS}}
    assert not {name: [path.stem for path in paths] for name, paths in twice.items() if name not in mirrored}


def test_imports_go_round_nowhere() -> None:
    graph = {name: {one for one in imported(path) if one in MODULES} - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a cycle of imports: {' <- '.join(error.args[1])}") from None
