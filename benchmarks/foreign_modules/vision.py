"""Vision: timm and vit-pytorch."""

from typing import Any

from benchmarks.foreign_modules.registry import ForeignModule, images, made


def _timm(name: str, size: int = 32, *, training: bool = False, **options: Any) -> ForeignModule:
    return ForeignModule(
        name=name, package="timm", make=made("timm:create_model", name, num_classes=8, **options), inputs=images(size),
        training=training,
    )  # fmt: skip


def _vit(name: str, path: str, **options: Any) -> ForeignModule:
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
    kept = {key: value for key, value in {**sizes, **options}.items() if value is not None}
    return ForeignModule(
        name=name, package="vit-pytorch", make=made(f"vit_pytorch.{path}", **kept), inputs=images()
    )  # fmt: skip


_SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2}

MODULES = (
    _timm("vit_tiny_patch16_224", **_SMALL),
    _timm("beit_base_patch16_224", **_SMALL, embed_dim=32, num_heads=4),
    _timm("eva02_tiny_patch14_224", **_SMALL),
    _timm("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=4),
    _timm(
        "swin_tiny_patch4_window7_224", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=16, num_heads=(2, 2, 2, 2),
        window_size=2,
    ),
    _timm("resnet18", 64, training=True),
    _vit("ViT", "vit:ViT"),
    _vit("SimpleViT", "simple_vit:SimpleViT"),
    _vit("DeepViT", "deepvit:DeepViT"),
    _vit("CaiT", "cait:CaiT", cls_depth=1),
    _vit("T2T-ViT", "t2t:T2TViT", patch_size=None, t2t_layers=((3, 2), (3, 2))),
    _vit("parallel ViT", "parallel_vit:ViT"),
    _vit("SimpleViT with registers", "simple_vit_with_register_tokens:SimpleViT"),
    _vit("SimpleViT with FFT", "simple_vit_with_fft:SimpleViT", freq_patch_size=8),
)  # fmt: skip
