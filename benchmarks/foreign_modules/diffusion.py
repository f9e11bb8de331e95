"""Diffusion: networks of diffusers."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.foreign_modules.registry import Call, ForeignModule, made

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8}
_PATCHES: dict[str, Any] = {**_HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}
_JOINT: dict[str, Any] = {"joint_attention_dim": 16, "pooled_projection_dim": 16}


def _diffusers(name: str, inputs: Callable[[], Call], **options: Any) -> ForeignModule:
    return ForeignModule(name=name, package="diffusers", make=made(f"diffusers:{name}", **options), inputs=inputs)


def _steps() -> torch.Tensor:
    return torch.tensor([1, 20, 300, 900])


def _latents(*names: str, channels: int = 4, size: int = 8, **others: Callable[[], Any]) -> Callable[[], Call]:
    """Return latent images with the time of each, words where their name is told, and other inputs."""

    def inputs() -> Call:
        call: dict[str, Any] = dict.fromkeys(names)
        call |= {name: torch.randn(4, 5, 16) for name in names}
        image, times = torch.randn(4, channels, size, size), _steps()
        return {**call, **{name: value() for name, value in others.items()}, "image": image, "timestep": times}

    return lambda: _renamed(inputs())


def _renamed(call: Call) -> Call:
    assert isinstance(call, dict)
    first = call.pop("first", "hidden_states")
    return {first: call.pop("image"), **call, "return_dict": False}


def _flux() -> Call:
    return {
        "hidden_states": torch.randn(4, 16, 4), "encoder_hidden_states": torch.randn(4, 5, 16),
        "pooled_projections": torch.randn(4, 16), "timestep": torch.rand(4), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3), "return_dict": False,
    }  # fmt: skip


def _labels() -> torch.Tensor:
    return torch.tensor([0, 1, 2, 3])


MODULES = (
    _diffusers(
        "DiTTransformer2DModel", _latents(class_labels=_labels), **_PATCHES, num_embeds_ada_norm=1000,
        norm_num_groups=4,
    ),
    _diffusers("VQModel", lambda: {"sample": torch.randn(4, 3, 16, 16), "return_dict": False},
        block_out_channels=(16,), norm_num_groups=4, num_vq_embeddings=16,
    ),
    _diffusers(
        "FluxTransformer2DModel", _flux, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, **_JOINT, axes_dims_rope=(4, 4, 8),
    ),
)  # fmt: skip
