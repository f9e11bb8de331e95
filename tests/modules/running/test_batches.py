"""Batches of ranks: the same everywhere, or a part of one each; what does not fit is refused by all, and none waits."""

import copy
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import InputError
from autoshard.modules.running import agreeing
from autoshard.modules.sharded import shard
from tests.ranks.spawn import each_rank
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LOCAL = "local"


class Tagger(nn.Module):
    """Words with a scale for every place, which all rows share; a loss, logits of each row, and of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, words: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> Any:
        x = torch.tanh(self.up(self.words(words))) * scale[:, None]
        logits = self.head(x)
        flat = logits.flatten(0, 1)
        loss = nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=0)
        return {"loss": loss, "logits": logits, "flat": flat.tanh(), "mean": logits.mean((0, 1)), "words": words + 1}


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


def batch(rows: int, length: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 16, (rows, length), generator=numbers)
    return {"words": words, "labels": words % 5, "scale": torch.linspace(0.5, 1.5, length, dtype=torch.float64)}


def cut(whole: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: one if name == "scale" else one[start:stop] for name, one in whole.items()}


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [cast(Any, one.grad) for one in module.parameters()]
    module.zero_grad()
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def far(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


EVERYTHING = ["loss", "logits", "flat", "mean", "words"]


@pytest.mark.parametrize(
    ("ranks", "mesh", "batches", "counts", "results"),
    rest_is_slow(
        [
            (4, "dp=2,tp=2", LOCAL, [2, 2], EVERYTHING),
            (2, "dp=2", LOCAL, [3, 2], ["loss"]),
            (4, "dp=2,tp=2", "local:dp.tp", [2, 2, 2, 2], EVERYTHING),
            (2, "dp=2", LOCAL, [3, 2], EVERYTHING),
            (2, "dp=2", LOCAL, [2, 2], ["loss"]),
        ],
        2,
        3,
    ),
)
@each_rank("ranks")
def test_parts_of_ranks_are_rows_of_one_batch(
    ranks: int, mesh: str, batches: str, counts: list[int], results: list[str]
):
    """Each rank's part of a batch gives the results, and the gradients of losses, of the plain module on all of it."""
    sizes, number = [int(axis.partition("=")[2]) for axis in mesh.split(",")], dist.get_rank()
    if batches == LOCAL:
        number //= ranks // sizes[0]
    plain, whole, start = tagger(), batch(sum(counts)), sum(counts[:number])
    own = cut(whole, start, start + counts[number])
    examples = cut(batch(2 * len(counts)), 2 * number, 2 * number + 2)
    module = shard(copy.deepcopy(plain), examples, mesh, batch=batches, results=results)
    wanted, ours = plain(**whole), module(**own)
    rows = slice(start, start + counts[number])
    parts = {"logits": rows, "words": rows, "flat": slice(rows.start * 6, rows.stop * 6)}
    for name in results:
        expected = wanted[name][parts[name]] if name in parts else wanted[name]
        assert type(ours[name]) is torch.Tensor and ours[name].shape == expected.shape, name
        assert float((ours[name] - expected).abs().max()) < 1e-12, name
    (wanted["loss"] * 3).backward(retain_graph=True)
    (ours["loss"] * 3).backward()
    assert far(gradients(plain), gradients(module)) < 1e-12, "gradients of the loss"
    if "logits" in results:
        ours = module(**own)
        names = [name for name in ("logits", "flat") if name in results]
        sum((ours[name] ** 2).mean() for name in names).backward()  # pyright: ignore
        ends = [sum(counts[: one + 1]) for one in range(len(counts))]
        spans = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
        own_losses = [(wanted["logits"][first:last] ** 2).mean() for first, last in spans]
        own_losses += [(wanted["flat"][6 * first : 6 * last] ** 2).mean() for first, last in spans] * ("flat" in names)
        (sum(own_losses) / len(counts)).backward()  # pyright: ignore
        assert far(gradients(plain), gradients(module)) < 1e-12, "gradients of losses outside"


def refused(module: nn.Module, inputs: dict[str, torch.Tensor]) -> str:
    with pytest.raises(InputError) as caught:
        module(**inputs)
    return str(caught.value)


@each_rank(2)
def test_batches_that_differ_are_refused_on_all_ranks():
    """A call that is alike works after each."""
    number, found = dist.get_rank(), dict[str, str]()
    module = shard(tagger(), batch(4), "dp=2", results=["loss"])
    found["numbers"] = refused(module, batch(4, seed=number))
    module(**batch(4))["loss"].backward()
    found["rows"] = refused(module, batch(4 + number))
    found["shape"] = refused(module, batch(4, length=6 + number))
    found["formats"] = refused(module, batch(4) | ({"labels": batch(4)["labels"].int()} if number else {}))
    module.train(number == 0)
    found["modes"] = refused(module, batch(4))
    module.train()
    module(**batch(4))
    found["later"] = refused(module, batch(4, seed=number))
    module(**batch(4))
    agreeing._SMALL_BYTES = 0  # pyright: ignore[reportPrivateUsage]
    module(**batch(4, seed=number))  # numbers of large inputs are not compared at every call
    cast(Any, module).autoshard.rank_inputs.agreement.num_calls = 64
    found["64th"] = refused(module, batch(4, seed=number))
    agreeing._SMALL_BYTES = 2**16  # pyright: ignore[reportPrivateUsage]
    assert found["numbers"] == (
        "inputs.words: has other numbers on rank 1 than on rank 0; give every rank the same whole batch, or shard "
        "with batch='local', where each brings its part"
    )
    assert "inputs.words: is 4 x 6 of int64 on rank 0, and 5 x 6 of int64 on rank 1; give" in found["rows"]
    assert "inputs.words: is 4 x 6 of int64 on rank 0, and 4 x 7 of int64 on rank 1; give" in found["shape"]
    assert "inputs.labels: is 4 x 6 of int64 on rank 0, and 4 x 6 of int32 on rank 1; give" in found["formats"]
    assert found["modes"].startswith("module: is called in another way on some ranks: it trains or not")
    assert found["later"] == found["64th"] == found["numbers"]


@each_rank(2)
def test_a_call_by_some_ranks_is_refused_in_a_sentence():
    module: Any = shard(tagger(), batch(4), "dp=2", results=["loss"])
    agreement = module.autoshard.rank_inputs.agreement
    backend = agreement.group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1))
    if dist.get_rank() == 0:
        refusal = refused(module, batch(4))
        assert refusal.startswith("module: was called on rank 0, and not on all others: Timed out waiting")
    dist.barrier()  # collectives of others are none of the module's


@each_rank(2)
def test_parts_that_are_none_of_one_batch_are_refused_on_all_ranks():
    number, found = dist.get_rank(), dict[str, str]()
    module = shard(tagger(), batch(2), "dp=1,tp=2", batch=LOCAL, results=["loss"])
    found["along tp"] = refused(module, batch(2, seed=number))
    found["lengths"] = refused(module, batch(2, length=6 + number))
    module = shard(tagger(), batch(2), "dp=2", batch=LOCAL, results=["loss"])
    found["common"] = refused(module, batch(2) | {"scale": torch.full((6,), 1.0 + number, dtype=torch.float64)})
    found["lengths of rows"] = refused(module, batch(2, length=6 + number))
    with pytest.raises(InputError, match="batch: 'data' is no axis of the mesh"):
        shard(tagger(), batch(2), "dp=2", batch="local:data")
    assert found["along tp"] == (
        "inputs.words: has other numbers on rank 1 than on rank 0; parts of the batch lie along dp and are equal "
        "along tp, unless batch='local:dp.tp'"
    )
    assert found["common"] == (
        "inputs.scale: has other numbers on rank 1 than on rank 0; what has no rows of the batch is the same on "
        "all ranks"
    )
    lengths = "inputs.words: is rows x 6 of int64 on rank 0, and rows x 7 of int64 on rank 1; pad the parts"
    assert lengths in found["lengths"] and lengths in found["lengths of rows"]
