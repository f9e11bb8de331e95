"""The number formats of a run, those of the plan or all FP64, and the device of its tensors."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.graph.op import Array
from autoshard.run.protocol import HOST
from autoshard.spec.workload import Dtype

NOWHERE = torch.device("meta")  # where tensors have shapes and no memory
_HOST = torch.device(HOST)
_ROW = 1024  # numbers of which one sum is made
_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Formats:
    """Which of torch's types each format of the plan becomes; ``exact`` computes all of them in double.

    Only positions, of tokens and of documents, stay on the host, which decides by them which queries see which keys.
    """

    exact: bool = False
    device: torch.device = _HOST

    @property
    def staging(self) -> torch.device:
        """The device on which whole weights are cut into pieces: the host, unless tensors have no memory."""
        return self.device if self.device == NOWHERE else _HOST

    def of(self, dtype: Dtype) -> torch.dtype:
        """Return torch's type of a format of the plan."""
        as_planned = _TYPES[dtype]
        return torch.float64 if self.exact and as_planned.is_floating_point else as_planned

    def tensor(self, array: Array, dtype: Dtype) -> torch.Tensor:
        """Return a tensor with memory of its own, on the device of the run, with an array's numbers."""
        return own(array, self.of(dtype), self.device)


def own(array: Array, dtype: torch.dtype | None = None, device: torch.device = _HOST) -> torch.Tensor:
    """Return a tensor with memory of its own and an array's numbers, in another format where one is given."""
    numbers = np.asarray(array)  # a part of a single number is none of numpy's arrays
    shared = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())  # torch warns of others
    return torch.empty(shared.shape, dtype=dtype or shared.dtype, device=device).copy_(shared)


@cache
def slow_halves(device: torch.device) -> frozenset[torch.dtype]:
    """Return the half formats whose products a device computes number by number: ten and more times slower than FP32.

    Such devices are processors without AVX-512, or without the instructions of ARM for these formats.
    """
    if device.type != HOST:
        return frozenset()
    kernels = torch.ops.mkldnn  # torch asks the same before it hands a product to oneDNN
    fast = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    usable = torch.backends.mkldnn.is_available()
    return frozenset(dtype for dtype, name in fast.items() if not (usable and getattr(kernels, name)()))


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Name the memory in which a tensor lies: equal for views of the same, also where there are no addresses."""
    return StorageWeakRef(tensor.untyped_storage())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in the format in which statistics are computed: at least FP32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def sum_of_squares(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, in the format of statistics, from sums of rows.

    torch's own norms and products on a processor add one number after the other in FP32: of 100 million numbers 0.7 to
    2 % of the sum are lost.
    """
    flat = wide(numbers).reshape(-1)
    num_whole = len(flat) // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:num_whole].view(-1, _ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(flat[num_whole:], dim=0, keepdim=True)]).square().sum()
