"""Regions of a sharded module on a device: nothing that they make lies on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.engine.torch.formats import NOWHERE, Formats
from autoshard.engine.torch.kernels import KernelContext, kernel_of
from autoshard.errors import InputError
from autoshard.modules.region import Region
from autoshard.modules.running.meshes import cluster_of
from tests.modules.modules import MODULES
from tests.modules.test_sharded import traced

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class OnDevice(TorchDispatchMode):
    """Notes which operations make tensors on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.on_host.append(str(func))
        return result


@pytest.mark.parametrize("name", ["selective scan", "mixture of experts by slots", *tuple(MODULES)[::6]])
def test_what_a_region_makes_of_nothing_lies_on_the_device_of_the_rank(name: str) -> None:
    """A scan begins with zeros, and slots of experts do: they must be where the module is."""
    _, _, sharding = traced(name, "a=1")
    block, sizes = sharding.traced.block, sharding.traced.sizes
    context = KernelContext(formats=Formats(exact=True, device=NOWHERE))
    regions = [op for op in block.select("micro_batch", "F") if isinstance(op.kind, Region)]
    assert regions
    for op in regions:
        call = block.call(op, sizes)
        tensors = [
            torch.empty([sizes[dim] for dim in one.dims], dtype=context.formats.of(one.dtype), device=NOWHERE)
            for one in call.inputs
        ]
        with OnDevice() as seen:
            (result,) = kernel_of(op.kind, call, context)(*tensors)
        assert result.is_meta and not seen.on_host, (op.name, seen.on_host)


def test_a_part_of_a_node_is_a_cluster() -> None:
    """People rent two of the eight GPUs of a node; more than a node are whole nodes."""
    part, nodes = cluster_of("h100-80", 2), cluster_of("h100-80", 16)
    assert (part.num_ranks, part.num_nodes, nodes.num_ranks, nodes.num_nodes) == (2, 1, 16, 2)
    assert part.chip == nodes.chip and cluster_of("trn2.48xlarge", 8).num_ranks == 8
    with pytest.raises(InputError, match="12 ranks do not fill nodes of h100-80, which have 8"):
        cluster_of("h100-80", 12)
