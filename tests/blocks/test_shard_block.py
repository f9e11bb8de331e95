import math
import subprocess
import sys

import pytest

import autoshard
from autoshard.errors import InputError
from autoshard.layout.table import Strategy


def test_less_memory_costs_time_and_lets_weights_rest_in_pieces():
    free = autoshard.shard_block("tiny-llama", "local", "dp=2,tp=2")
    some, little = (
        autoshard.shard_block("tiny-llama", "local", "dp=2,tp=2", memory_bytes=share * free.memory_bytes)
        for share in (0.8, 0.6)
    )
    assert free.time_s < some.time_s < little.time_s
    assert not free.rests and little.rests
    for found, share in ((some, 0.8), (little, 0.6)):
        assert found.fits and found.memory_bytes <= share * free.memory_bytes and found.bound_s == found.time_s
    assert "up.weight: flat/dp" in str(little)


def test_lines_are_those_of_a_plans_table():
    found = autoshard.shard_block("tiny-llama", "local", "dp=2,tp=2", engine="torch")
    assert {name: str(Strategy.parse(line)) for name, line in found.table.items()} == found.table
    made = autoshard.plan("tiny-llama", "local", fix="dp=2,tp=2,pp=1,cp=1,mbs=1")
    assert found.table == made.plan.strategies["layer"]


def test_what_fits_nowhere_is_answered_with_the_least():
    found = autoshard.shard_block("tiny-llama", "local", "dp=4", kind="head", memory_bytes=1.0)
    assert not found.fits and math.isinf(found.bound_s)
    assert "nothing fits" in str(found)


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        ("dp=3", {}, "pp x dp x cp x tp is 3, but 1 x local has 4 ranks"),
        ("dp=4,zero=3", {}, "mesh.zero: does not say how a block is cut. Known: tp, pp, cp"),
        ("dp=4,hidden=2", {}, "unknown key 'hidden'"),
        ("dp=4", {"kind": "layers"}, "kind: 'layers' is not a kind of block. Did you mean layer"),
        ("dp=4", {"memory_bytes": -1.0}, "must be positive, not -1.0"),
    ],
)
def test_errors_say_what_to_write(mesh, more, message):
    with pytest.raises(InputError, match=message):
        autoshard.shard_block("tiny-llama", "local", mesh, **more)


def test_importing_autoshard_loads_no_solver():
    code = "import sys, autoshard; sys.exit('numpy' in sys.modules or 'autoshard.blocks' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
