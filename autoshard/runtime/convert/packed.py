"""Weights that files hold as small numbers in blocks with scales: MXFP4, as GPT-OSS has it, and FP8, as DeepSeek-V3.

They are computed when they are copied, a few at a time, from the bytes in the files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from autoshard.errors import Fault, InputError
from autoshard.runtime.checkpoint.files import DTYPES
from autoshard.runtime.convert.stored import Once, Stored

Places = Sequence[np.ndarray]  # along each axis of a tensor
Block = tuple[int, int]
# cited: OCP Microscaling Formats (MX) Specification v1.0, 5.3.3: E2M1, the sign in the highest of four bits
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# By byte: the numbers of its lower and of its upper four bits, in BF16, in which each of them times a scale is exact.
_PAIRS = torch.tensor([(_E2M1[byte % 16], _E2M1[byte // 16]) for byte in range(256)], dtype=torch.bfloat16)
_PAIR_BITS = _PAIRS.view(torch.int32).reshape(256)
_GROUP, _GROUP_BYTES = 32, 16  # numbers that share a scale, and their bytes
_BLOCKS, _SCALES, _BLOCK_SCALES = "_blocks", "_scales", "_scale_inv"
_BYTES, _E4M3, _E8M0 = ("U8", "uint8"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E8M0", "float8_e8m0fnu")


def unpacked(tensors: Mapping[str, Stored], block: Block) -> Mapping[str, Stored]:
    """Return tensors as a model has them: one in the place of small numbers and of their scales.

    ``block`` says how many rows and columns of a weight in FP8 have one scale.
    """
    plain, faults = dict(tensors), list[Fault]()
    for pair in _pairs(tensors, block):
        if fault := pair.fault():
            faults.append(fault)
        else:
            del plain[pair.values_name], plain[pair.scales_name]
            plain[pair.name] = pair.stored()
    if faults:
        raise InputError(sorted(faults, key=lambda fault: fault.where))
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Small numbers of a tensor in files, and their scales; ``fp8_block`` is None for MXFP4."""

    name: str
    values_name: str
    scales_name: str
    tensors: Mapping[str, Stored]
    fp8_block: Block | None

    def fault(self) -> Fault | None:
        """Say what keeps the tensor from being computed."""
        values, scales = self.tensors.get(self.values_name), self.tensors.get(self.scales_name)
        if values is None or scales is None:
            found, lacking = (scales, self.values_name) if values is None else (values, self.scales_name)
            assert found is not None, "a pair is made of what there is"
            return _at(found, f"belongs to {lacking}, which is missing. Download it again")
        if self.fp8_block is None and self.name in self.tensors:
            return _at(self.tensors[self.name], f"is there beside {self.values_name}. Remove what is not meant")
        value_formats, scale_formats = (_BYTES, _BYTES) if self.fp8_block is None else (_E4M3, ("", *_E8M0))
        if values.odd not in value_formats:
            label = value_formats[0]
            return _at(values, f"holds {_label(values)}, and only {label} with scales can be read")
        if scales.odd not in scale_formats:
            return _at(scales, f"holds {_label(scales)}, which are no scales that can be read")
        return self._misfit(values, scales)

    def _misfit(self, values: Stored, scales: Stored) -> Fault | None:
        if self.fp8_block is None:
            if len(values.shape) != 4 or values.shape[-1] != _GROUP_BYTES:
                meant = f"(experts, rows, groups, {_GROUP_BYTES})"
                return _at(values, f"has shape {values.shape}, and MXFP4 asks for {meant}")
            expected = values.shape[:-1]
        elif len(values.shape) < 2:
            return _at(values, f"has shape {values.shape}, and blocks with scales ask for rows and columns")
        else:
            *rest, rows, columns = values.shape
            expected = (
                *rest,
                *(-(-length // side) for length, side in zip((rows, columns), self.fp8_block, strict=True)),
            )
        if scales.shape != expected:
            return _at(
                scales, f"has shape {scales.shape}, and {self.values_name} of {values.shape} asks for {expected}"
            )
        return None

    def stored(self) -> Stored:
        """Return the tensor that they are."""
        values, scales = self.tensors[self.values_name], self.tensors[self.scales_name]
        if self.fp8_block is None:
            experts, rows, groups, _ = values.shape
            shape, compute = (experts, groups * _GROUP, rows), partial(_of_mxfp4, values, scales)
        else:
            shape, compute = values.shape, partial(_of_fp8, values, scales, self.fp8_block)
        checks = [source.check for source in (values, scales) if source.check]

        def check() -> None:
            for of_source in checks:
                of_source()

        return Stored(
            name=self.name, file=values.file, dtype=torch.bfloat16, shape=shape,
            read=lambda: compute([np.arange(length) for length in shape]),
            check=Once(check) if checks else None,
            compute=compute, sources=(values, scales),
        )  # fmt: skip


def _label(stored: Stored) -> str:
    return stored.odd or DTYPES[stored.dtype]


def _at(stored: Stored, message: str) -> Fault:
    return Fault(where=f"{stored.file}: {stored.name}", message=message)


def _pairs(tensors: Mapping[str, Stored], block: Block) -> Iterator[_Pair]:
    """Yield what belongs together, also where only one of both is there."""
    mxfp4 = {name.removesuffix(end): None for end in (_BLOCKS, _SCALES) for name in tensors if name.endswith(end)}
    for name in mxfp4:
        names = {"values_name": f"{name}{_BLOCKS}", "scales_name": f"{name}{_SCALES}"}
        yield _Pair(name=name, **names, tensors=tensors, fp8_block=None)
    scaled = {name.removesuffix(_BLOCK_SCALES): None for name in tensors if name.endswith(_BLOCK_SCALES)}
    for name in scaled | {name: None for name, stored in tensors.items() if stored.odd in _E4M3}:
        names = {"values_name": name, "scales_name": f"{name}{_BLOCK_SCALES}"}
        yield _Pair(name=name, **names, tensors=tensors, fp8_block=block)


def _of_mxfp4(values: Stored, scales: Stored, places: Places) -> torch.Tensor:
    """Compute numbers at places along experts, columns and rows; of the groups that they touch, all are computed."""
    experts, columns, rows = places
    first, stop = int(columns[0]) // _GROUP, int(columns[-1]) // _GROUP + 1
    where = experts, rows, np.arange(first, stop)
    raw, exponents = (_at_places(source.read(), where) for source in (values, scales))
    pairs = _PAIR_BITS.index_select(0, raw.reshape(-1).int()).view(torch.bfloat16)
    # cited: the same, 5.4.1: E8M0 is a power of two of bias 127, and 255 stands for NaN
    factors = exponents.contiguous().view(torch.float8_e8m0fnu).to(torch.bfloat16)
    numbers = pairs.reshape(*exponents.shape, _GROUP) * factors[..., None]
    lone = numbers.reshape(*exponents.shape[:2], -1)
    return _at_places(lone, (np.arange(len(lone)), np.arange(lone.shape[1]), columns - first * _GROUP)).transpose(1, 2)


def _of_fp8(values: Stored, scales: Stored, block: Block, places: Places) -> torch.Tensor:
    """Compute numbers at places in FP32: each is itself times the scale of its block."""
    numbers = _at_places(values.read().view(torch.uint8), places).view(torch.float8_e4m3fn).float()
    blocks = [*places[:-2], *(along // side for along, side in zip(places[-2:], block, strict=True))]
    return numbers.mul_(_at_places(scales.read().float(), blocks))


def _at_places(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    """Select places along the first axes of a tensor; as a view, where they are evenly spaced."""
    for axis, along in enumerate(places):
        steps = np.diff(along)
        step = int(steps[0]) if len(steps) else 1
        if step > 0 and (steps == step).all():
            index = (slice(None),) * axis + (slice(int(along[0]), int(along[-1]) + 1, step),)
            tensor = tensor[index]
        else:
            tensor = tensor.index_select(axis, torch.from_numpy(along))
    return tensor
