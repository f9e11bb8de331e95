"""The picture of docs/developers/architecture.md: its floors are those of the linter, and what it skips is not used."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.test_structure import MODULES, imported

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "developers" / "architecture.md"
MOST_WORDS = 3000


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder_of(module: str) -> str:
    return (*module.split("."), "")[1]


def test_the_picture_is_what_the_script_draws_and_the_page_shows_it(house: ModuleType) -> None:
    assert house.PICTURE.read_text(encoding="utf-8") == house.svg(), "draw it again: python docs/house.py"
    assert "/house.svg)" in PAGE.read_text(encoding="utf-8")


def test_the_tour_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_its_floors_are_those_of_the_linter(house: ModuleType) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = [set(layer.split(" | ")) for layer in layers]
    aside = {*house.ENTRANCE, *house.GROUND}
    assert [set(floor) - aside for floor in house.FLOORS][1:] == [floor for floor in floors if not floor <= aside]
    assert set().union(*floors) == set().union(*house.FLOORS) | aside


def test_no_product_uses_a_folder_that_its_reader_may_skip(house: ModuleType) -> None:
    used = [(folder_of(name), folder_of(other)) for name, path in MODULES.items() for other in imported(path)
            if other in MODULES]  # fmt: skip
    folders = sorted(folder for product in house.PRODUCTS for folder in product.folders)
    assert folders == sorted(set().union(*house.FLOORS) - {*house.ENTRANCE}), "each belongs to one product"
    for product in house.PRODUCTS:
        marked = {*product.folders, *product.reads, *product.glances, *house.GROUND, ""}
        missing = {(folder, other) for folder, other in used if folder in product.folders and other not in marked}
        assert not missing, f"{product.title}: mark what it uses in docs/house.py"
