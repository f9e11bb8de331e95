"""Weights in MXFP4 and in FP8 are read as those in BF16: against transformers, the formats' definitions, and twins."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from autoshard.cli import main
from autoshard.engine.hf_names import HfNames, shapes_of
from autoshard.errors import InputError
from autoshard.runtime.convert import packed, stored
from autoshard.runtime.convert.converting import read_weights
from autoshard.runtime.convert.packed import unpacked
from autoshard.runtime.convert.stored import Stored
from autoshard.spec.model_catalogue import load_model
from tests.kit import small_config
from tests.ranks.spawn import on_ranks
from tests.runtime.convert.cases import converted, read, same
from tests.runtime.convert.test_opening import box, first_step, plan_for
from tests.slower import rest_is_slow

mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4")
fp8: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")

GPT_OSS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
BLOCK = (16, 12)  # which divide few of the widths
FILE, CONFIG = "model.safetensors", "config.json"
FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"  # the second has the scales
LAYOUTS = ("tp=1,pp=2,dp=2,zero=3", "tp=2,pp=1,dp=2,ep=2")


def held(name: str, tensor: torch.Tensor, odd: str = "") -> Stored:
    return Stored(
        name=name, file="file", dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda: tensor, odd=odd
    )  # fmt: skip


def in_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Stored:
    pair = {"w_blocks": held("w_blocks", blocks, "U8"), "w_scales": held("w_scales", scales, "U8")}
    return unpacked(pair, BLOCK)["w"]


def in_fp8(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> Stored:
    pair = {"w": held("w", values, "F8_E4M3"), "w_scale_inv": held("w_scale_inv", scales)}
    return unpacked(pair, block)["w"]


def drawn_bytes(shape: tuple[int, ...], low: int, stop: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, stop, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def of_blocks(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """As DeepSeek's ``weight_dequant`` computes: each number times the scale of its block, in FP32."""
    rows, columns = (torch.arange(length) // side for length, side in zip(values.shape[-2:], block, strict=True))
    return values.float() * scales.float()[..., rows[:, None], columns]


# ---------------------------------------------------------------------------------------- one tensor


def test_mxfp4_is_that_of_transformers_to_the_last_bit() -> None:
    """Of all bytes and of all scales, those that overflow too; 255 stands for NaN in the format."""
    blocks = torch.arange(255 * 16 * 16).remainder(256).to(torch.uint8).reshape(5, 51, 16, 16)
    scales = torch.arange(5 * 51 * 16).remainder(255).to(torch.uint8).reshape(5, 51, 16)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)
    ours = in_mxfp4(blocks, scales).read()
    assert ours.dtype == theirs.dtype == torch.bfloat16 and ours.shape == theirs.shape == (5, 512, 51)
    assert torch.equal(bits(ours), bits(theirs)) and theirs.isinf().any() and not theirs.isnan().any()
    assert in_mxfp4(blocks, torch.full_like(scales, 255)).read().isnan().all()


def by_definition(byte: int, upper: bool, scale: int) -> float:
    """OCP MX v1.0: E2M1 is a sign, two bits of exponent of bias 1 and one of mantissa; E8M0 an exponent of bias 127."""
    code = byte >> 4 if upper else byte & 15
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    number = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return (-1) ** sign * number * 2.0 ** (scale - 127)


@given(data=st.data())
def test_any_places_of_mxfp4_hold_what_the_format_defines(data: st.DataObject) -> None:
    experts, rows, groups = (data.draw(st.integers(1, 3)) for _ in range(3))
    seed = data.draw(st.integers(0, 99))
    blocks = drawn_bytes((experts, rows, groups, 16), 0, 256, seed)
    scales = drawn_bytes((experts, rows, groups), 100, 150, seed)
    tensor = in_mxfp4(blocks, scales)
    places = [np.array(sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))) for length in tensor.shape]
    assert tensor.compute
    found = tensor.compute(places)
    expected = [
        [
            [
                by_definition(int(blocks[e, r, c // 32, c % 32 // 2]), c % 2 == 1, int(scales[e, r, c // 32]))
                for r in places[2].tolist()
            ]
            for c in places[1].tolist()
        ]
        for e in places[0].tolist()
    ]
    assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64))


@given(data=st.data())
def test_any_places_of_fp8_are_numbers_times_the_scale_of_their_block(data: st.DataObject) -> None:
    """Of two axes and of three, with scales in FP32, in BF16 and in powers of two."""
    shape = (*data.draw(st.sampled_from([(), (2,)])), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    in_blocks = (*shape[:-2], *(-(-length // side) for length, side in zip(shape[-2:], BLOCK, strict=True)))
    scales = torch.rand(in_blocks, generator=generator)
    scales = scales.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu])))
    kind = "F8_E8M0" if scales.dtype == torch.float8_e8m0fnu else ""
    pair = {"w": held("w", values, "F8_E4M3"), "w_scale_inv": held("w_scale_inv", scales, kind)}
    tensor = unpacked(pair, BLOCK)["w"]
    places = [np.array(sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))) for length in shape]
    assert tensor.compute
    expected = of_blocks(values, scales)[np.ix_(*places)]
    assert torch.equal(tensor.compute(places), expected) and torch.equal(tensor.read(), of_blocks(values, scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_that_of_transformers_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=dtype)
    assert torch.equal(in_fp8(values, scales, (128, 128)).read().to(dtype), theirs)


# ------------------------------------------------------------------------------------ whole models


def twins(folder: Path, family: str) -> tuple[Path, Path]:
    """Write a model with small numbers in blocks, over two files, and the same in BF16, or FP32 where BF16 rounds."""
    packed, plain = (folder / name for name in ("packed", "plain"))
    config = small_config(family, **(GPT_OSS if family == "gpt_oss" else {}))
    method = {"quant_method": "mxfp4"} if family == "gpt_oss" else {"quant_method": "fp8", "weight_block_size": BLOCK}
    for path, stated in ((packed, {"quantization_config": method}), (plain, {})):
        path.mkdir()
        (path / CONFIG).write_text(json.dumps({**config, **stated, "torch_dtype": "bfloat16"}))
    generator = torch.Generator().manual_seed(1)
    wholes, parts = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for number, (name, shape) in enumerate(HfNames.of(family, load_model(plain)).shapes.items()):
        wholes[name] = parts[name] = torch.randn(shape, generator=generator).mul(0.3).bfloat16()
        if name.endswith("_proj") and family == "gpt_oss":
            experts, columns, rows = shape
            blocks = drawn_bytes((experts, rows, columns // 32, 16), 0, 256, number)
            scales = drawn_bytes((experts, rows, columns // 32), 121, 126, number)
            wholes[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
            del parts[name]
            parts |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif name.endswith("_proj.weight") and family == "deepseek_v3":
            values = wholes[name].to(torch.float8_e4m3fn)
            in_blocks = [-(-length // side) for length, side in zip(shape, BLOCK, strict=True)]
            scales = torch.rand(in_blocks, generator=generator)
            wholes[name] = of_blocks(values, scales)
            parts |= {name: values, f"{name}_scale_inv": scales}
    safetensors.torch.save_file(wholes, plain / FILE, {"format": "pt"})
    for file, is_scale in ((FIRST, False), (SECOND, True)):
        tensors = {name: tensor for name, tensor in parts.items() if ("_scale" in name) == is_scale}
        safetensors.torch.save_file(tensors, packed / file, {"format": "pt"})
    return packed, plain


FAMILIES = ("gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Path]]:
    return {family: twins(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_writes_what_it_writes_of_the_twin(
    family: str, pairs: Mapping[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    packed, plain = pairs[family]
    for dtype in ("bf16", "fp16", "fp32"):
        first, second = tmp_path / f"{dtype} packed", tmp_path / f"{dtype} plain"
        assert main(["convert", str(packed), str(first), "--dtype", dtype]) == 0
        assert main(["convert", str(plain), str(second), "--dtype", dtype]) == 0
        same(read(first), read(second))
        configs = [json.loads((target / CONFIG).read_text()) for target in (first, second)]
        assert configs[0] == configs[1] and "quantization_config" not in configs[0]
    assert main(["convert", str(packed), str(tmp_path / "as it is")]) == 0
    same(read(tmp_path / "as it is"), read(tmp_path / "bf16 plain"))


@pytest.mark.parametrize("family", FAMILIES)
def test_boxes_hold_the_numbers_of_the_twin_and_nothing_else_is_computed(
    family: str, pairs: Mapping[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few numbers are computed at a time, and those of a box only."""
    (source, plain), generator = pairs[family], np.random.default_rng(0)
    plan, sizes, most, counted = plan_for(plain), list[int](), 40, 0
    monkeypatch.setattr(stored, "_COMPUTED", most)
    for function in ("_of_mxfp4", "_of_fp8"):
        monkeypatch.setattr(packed, function, counting(getattr(packed, function), sizes))
    for name, shape in shapes_of(plan.model).items():
        offsets = tuple(int(generator.integers(0, length)) for length in shape)
        lengths = tuple(int(generator.integers(1, length - at + 1)) for length, at in zip(shape, offsets, strict=True))
        pieces = [box(name, lengths, torch.float32, whole=shape, offsets=offsets) for _ in range(2)]
        before = sum(sizes)
        read_weights(source, plan, pieces[:1])
        read_weights(plain, plan, pieces[1:])
        assert torch.equal(*(piece.memory for piece in pieces)), name
        computed = sum(sizes) - before
        assert computed in (0, pieces[0].memory.numel()), name
        counted += computed > 0
    assert max(sizes) <= most and counted > 5


def counting(compute: Callable[..., torch.Tensor], sizes: list[int]) -> Callable[..., torch.Tensor]:
    def counted(*arguments: Any) -> torch.Tensor:
        found = compute(*arguments)
        sizes.append(found.numel())
        return found

    return counted


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "text"), rest_is_slow(zip(reversed(FAMILIES), LAYOUTS, strict=True), 0))
def test_a_run_begins_as_from_the_twin(family: str, text: str, pairs: Mapping[str, tuple[Path, Path]]) -> None:
    plan = plan_for(pairs[family][1], text)
    found = [on_ranks(plan.mesh.num_ranks, first_step, plan, folder) for folder in pairs[family]]
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------- faults


DOWN = "model.layers.1.mlp.experts.down_proj"
LINEAR = "model.layers.0.mlp.down_proj.weight"


def rewritten(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = safetensors.torch.load_file(folder / file)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / file)


def reconfigured(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": fields}))


SPOILT: Mapping[str, tuple[str, Callable[[Path], object], str]] = {
    "scales are missing": (
        "gpt_oss",
        lambda f: rewritten(f, SECOND, lambda t: t.pop(f"{DOWN}_scales")),
        f"{FIRST}: {DOWN}_blocks: belongs to {DOWN}_scales, which is missing. Download it again",
    ),
    "blocks are missing": (
        "gpt_oss",
        lambda f: rewritten(f, FIRST, lambda t: t.pop(f"{DOWN}_blocks")),
        f"{SECOND}: {DOWN}_scales: belongs to {DOWN}_blocks, which is missing. Download it again",
    ),
    "scales of another shape": (
        "gpt_oss",
        lambda f: rewritten(
            f, SECOND, lambda t: t.update({f"{DOWN}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)})
        ),
        f"{DOWN}_scales: has shape (4, 64, 2), and {DOWN}_blocks of (4, 64, 3, 16) asks for (4, 64, 3)",
    ),
    "groups of another length": (
        "gpt_oss",
        lambda f: rewritten(
            f, FIRST, lambda t: t.update({f"{DOWN}_blocks": torch.zeros(4, 64, 6, 8, dtype=torch.uint8)})
        ),
        f"{DOWN}_blocks: has shape (4, 64, 6, 8), and MXFP4 asks for (experts, rows, groups, 16)",
    ),
    "another width": (
        "gpt_oss",
        lambda f: (
            rewritten(f, FIRST, lambda t: t.update({f"{DOWN}_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8)})),
            rewritten(f, SECOND, lambda t: t.update({f"{DOWN}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)})),
        ),
        f"{DOWN}: has shape (4, 64, 64), the model asks for (4, 96, 64)",
    ),
    "blocks of fractions": (
        "gpt_oss",
        lambda f: rewritten(f, FIRST, lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].float()})),
        f"{DOWN}_blocks: holds F32, and only U8 with scales can be read",
    ),
    "the whole tensor beside": (
        "gpt_oss",
        lambda f: rewritten(f, FIRST, lambda t: t.update({DOWN: torch.zeros(4, 96, 64)})),
        f"{FIRST}: {DOWN}: is there beside {DOWN}_blocks. Remove what is not meant",
    ),
    "numbers of which none is finite": (
        "gpt_oss",
        lambda f: rewritten(f, SECOND, lambda t: t[f"{DOWN}_scales"].fill_(255)),
        f"{FIRST}: {DOWN}: holds numbers that are not finite",
    ),
    "FP8 without scales": (
        "deepseek_v3",
        lambda f: rewritten(f, SECOND, lambda t: t.pop(f"{LINEAR}_scale_inv")),
        f"{FIRST}: {LINEAR}: belongs to {LINEAR}_scale_inv, which is missing. Download it again",
    ),
    "FP8 in other blocks than the configuration says": (
        "deepseek_v3",
        lambda f: reconfigured(f, quant_method="fp8", weight_block_size=[128, 128]),
        f"{LINEAR}_scale_inv: has shape (1, 4), and {LINEAR} of (16, 40) asks for (1, 1)",
    ),
    "FP8 with fewer bits of fraction": (
        "deepseek_v3",
        lambda f: rewritten(f, FIRST, lambda t: t.update({LINEAR: t[LINEAR].to(torch.float8_e5m2)})),
        f"{LINEAR}: holds F8_E5M2, and only F8_E4M3 with scales can be read",
    ),
    "scales in whole numbers": (
        "deepseek_v3",
        lambda f: rewritten(f, SECOND, lambda t: t.update({f"{LINEAR}_scale_inv": torch.zeros(1, 4).to(torch.int32)})),
        f"{LINEAR}_scale_inv: holds I32, which are no scales that can be read",
    ),
    "another format": (
        "gpt_oss",
        lambda f: reconfigured(f, quant_method="gptq"),
        f"{CONFIG}: quantization_config.quant_method: weights in 'gptq' are not read, only in 'mxfp4' and 'fp8'. Save",
    ),
}


@pytest.mark.parametrize(("family", "spoil", "says"), SPOILT.values(), ids=SPOILT)
def test_what_is_malformed_is_refused_in_a_sentence(
    family: str, spoil: Callable[[Path], object], says: str, pairs: Mapping[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder = shutil.copytree(pairs[family][0], tmp_path / "copy")
    spoil(folder)
    with pytest.raises(InputError) as caught:
        converted(folder, tmp_path / "last")
    assert says in str(caught.value)
    assert not (tmp_path / "last").exists()
