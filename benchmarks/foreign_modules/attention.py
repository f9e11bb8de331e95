"""Transformers that one author or one repository wrote: x-transformers, minGPT, nanoGPT, and others."""

import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.foreign_modules.registry import Call, ForeignModule, images, made, numbers, tokens

_TOKENS: dict[str, Any] = {"num_tokens": 64, "max_seq_len": 16}
_LAYERS: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 4}


def _wrapped(name: str, wrapper: str, kind: str, inputs: Callable[[], Call], **options: Any) -> ForeignModule:
    """Return layers of x-transformers with the wrapper for their inputs."""
    sizes = _TOKENS if wrapper == "TransformerWrapper" else {"image_size": 32, "patch_size": 8, "num_classes": 8}

    def make() -> torch.nn.Module:
        layers = pkgutil.resolve_name(f"x_transformers:{kind}")(**_LAYERS, attn_dim_head=8, **options)
        return pkgutil.resolve_name(f"x_transformers:{wrapper}")(**sizes, attn_layers=layers)

    return ForeignModule(name=name, package="x-transformers", make=make, inputs=inputs)


def _decoder(name: str, **options: Any) -> ForeignModule:
    return _wrapped(name, "TransformerWrapper", "Decoder", tokens(), **options)


def _nano_gpt() -> torch.nn.Module:
    config = pkgutil.resolve_name("nanoGPT.model:GPTConfig")(
        block_size=16, vocab_size=64, n_layer=2, n_head=4, n_embd=32
    )
    return pkgutil.resolve_name("nanoGPT.model:GPT")(config)


def _min_gpt() -> torch.nn.Module:
    kind = pkgutil.resolve_name("mingpt.model:GPT")
    config = kind.get_default_config()
    config.merge_from_dict(
        {"model_type": None, "vocab_size": 64, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
    )
    return kind(config)


def _other(package: str, path: str, inputs: Callable[[], Call], **options: Any) -> ForeignModule:
    return ForeignModule(name=path.partition(":")[2], package=package, make=made(path, **options), inputs=inputs)


MODULES = (
    ForeignModule(name="GPT with loss", package="nanoGPT", make=_nano_gpt, inputs=tokens(2)),
    ForeignModule(name="GPT with loss", package="minGPT", make=_min_gpt, inputs=tokens(2)),
    _decoder("decoder"),
    _wrapped("encoder, ALiBi", "TransformerWrapper", "Encoder", tokens(), alibi_pos_bias=True),
    _wrapped("ViT", "ViTransformerWrapper", "Encoder", images()),
    _other("conformer", "conformer:ConformerBlock", numbers((4, 16, 32)), dim=32, dim_head=8, heads=4),
    _other("performer-pytorch", "performer_pytorch:PerformerLM", tokens(), **_TOKENS, **_LAYERS, dim_head=8),
    _other(
        "g-mlp-pytorch", "g_mlp_pytorch:gMLP", tokens(), num_tokens=64, dim=32, depth=2, seq_len=16,
        circulant_matrix=True,
    ),
    _other(
        "mlp-mixer-pytorch", "mlp_mixer_pytorch:MLPMixer", images(), image_size=32, channels=3, patch_size=8, dim=32,
        depth=2, num_classes=8,
    ),
)  # fmt: skip
