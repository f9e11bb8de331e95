"""The settings agree with each other: what is written in two places is compared here."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = SETTINGS["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

FLOORS = {
    *("errors", "files", "units", "extensions", "spec", "graph", "layout", "schedule", "plan", "run", "cost"),
    *("blocks", "search", "calibration", "imports", "exports", "report", "jobs"),
}


def names(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.lower() for text in requirements} - {"autoshard"}


def floors(paths: list[str]) -> set[str]:
    return {re.sub(r"^autoshard[./]|/\*$|\.py$", "", path) for path in paths}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name.lower(): str(requirement.specifier) for requirement in requirements}


def makefile(*targets: str) -> str:
    """What make would run, were nothing there yet."""
    command = ["make", "--dry-run", "--always-make", *targets]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_the_base_install_is_small() -> None:
    assert names(PROJECT["dependencies"]) == {"numpy", "jsonargparse", "pyyaml", "rich"}


def test_every_planner_floor_is_strict_and_covered_and_free_of_torch() -> None:
    contracts = SETTINGS["tool"]["importlinter"]["contracts"]
    without_torch = [one for one in contracts if "torch" in one.get("forbidden_modules", ())]
    assert [floors(one["source_modules"]) for one in without_torch] == [FLOORS]
    assert floors(SETTINGS["tool"]["pyright"]["strict"]) - {"benchmarks"} == FLOORS
    assert floors(SETTINGS["tool"]["coverage"]["report"]["include"]) == FLOORS


def test_what_tests_install_is_pinned_exactly() -> None:
    pinned = pins()
    installed = names(PROJECT["dependencies"]) | names(EXTRAS["torch"]) | names(EXTRAS["dev"])
    assert not installed - set(pinned)
    assert not [name for name, specifier in pinned.items() if not specifier.startswith("==")]
    assert pinned["torch"] == "==2.13.0"


def test_versions_of_tools_are_written_once() -> None:
    assert all(not Requirement(text).specifier for text in EXTRAS["dev"])


def test_every_dependency_has_a_reason() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    reasons = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, flags=re.MULTILINE)
    explained = {name.lower() for row in reasons for name in re.findall(r"`([^`]+)`", row[0])}
    asked = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert explained == asked
    assert len(text.splitlines()) <= 60


def test_modules_and_the_readme_are_searched_for_doctests() -> None:
    options = SETTINGS["tool"]["pytest"]["ini_options"]
    assert {"autoshard", "benchmarks", "README.md", "docs"} <= set(options["testpaths"])
    assert {"--doctest-modules", "--doctest-glob=*.md"} <= set(options["addopts"])


def test_ci_is_the_local_check_and_then_the_rest() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if "make " in line]
    assert [line for line in commands if not line.startswith("echo")] == [
        "make lint",
        "make test",
        "make test-all MINUTES=$((70 - SECONDS / 60))",
    ]
    (fast,) = (line for line in makefile("check").splitlines() if "-m pytest" in line)
    rest = [line for line in makefile("test-all").splitlines() if "-m pytest" in line]
    assert "not slow" in fast and "--cov" not in fast
    assert len(rest) == 1 and "and slow" in rest[0]
    assert "thorough" in makefile("thorough")
    assert "--cov" in makefile("coverage")


def test_every_install_of_make_obeys_the_constraints_and_make_plan_installs_only_what_plans() -> None:
    installs = [line for line in makefile("plan", "check").splitlines() if "pip install" in line]
    assert any("[dev]" in line for line in installs) and any("-e ." in line for line in installs)
    assert all("-c constraints.txt" in line for line in installs)
    assert "dev" not in makefile("plan")


def test_help_names_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert not [target for target in phony.split() if f"make {target} " not in shown]
