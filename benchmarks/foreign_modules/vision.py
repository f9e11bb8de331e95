"""Vision: timm, vit-pytorch and segment-anything."""

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
_MIXED: dict[str, Any] = {"img_size": 64, "embed_dim": 32, "num_blocks": 2}

MODULES = (
    _timm("vit_tiny_patch16_224", **_SMALL),
    _timm("vit_small_patch16_dinov3", **_SMALL),
    _timm("deit3_small_patch16_224", **_SMALL),
    _timm("beit_base_patch16_224", **_SMALL, embed_dim=32, num_heads=4),
    _timm("cait_xxs24_224", **_SMALL),
    _timm("eva02_tiny_patch14_224", **_SMALL),
    _timm("xcit_nano_12_p16_224", img_size=32, depth=2),
    _timm("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=4),
    _timm(
        "swin_tiny_patch4_window7_224", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=16, num_heads=(2, 2, 2, 2),
        window_size=2,
    ),
    _timm("swinv2_tiny_window8_256", 64, img_size=64, depths=(2, 2), embed_dim=16, num_heads=(2, 2), window_size=4),
    _timm("mixer_s16_224", 64, **_MIXED),
    _timm("gmlp_s16_224", 64, **_MIXED),
    _timm("resmlp_12_224", 64, **_MIXED),
    _timm("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm("convnextv2_atto", 64, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm("resnet18", 64, training=True),
    _timm("efficientnet_b0", 64, training=True),
    _timm("regnety_002", 64, training=True),
    _timm("mobilenetv3_small_050", 64, training=True),
    _timm("poolformer_s12", 64),
    _timm("densenet121", 64, training=True, block_config=(2, 2), growth_rate=8),
    _timm("pvt_v2_b0", 64),
    _timm("hiera_tiny_224", 64, img_size=64),
    _timm("maxvit_nano_rw_256", 64, img_size=64),
    _timm("coat_tiny", 64, img_size=64),
    _timm("volo_d1_224", 64, img_size=64),
    _timm("edgenext_xx_small", 64),
    _timm("focalnet_tiny_srf", 64, depths=(1, 1), embed_dim=16),
    _vit("ViT", "vit:ViT"),
    _vit("SimpleViT", "simple_vit:SimpleViT"),
    _vit("DeepViT", "deepvit:DeepViT"),
    _vit("CaiT", "cait:CaiT", cls_depth=1),
    _vit("T2T-ViT", "t2t:T2TViT", patch_size=None, t2t_layers=((3, 2), (3, 2))),
    _vit("parallel ViT", "parallel_vit:ViT"),
    _vit("SimpleViT with registers", "simple_vit_with_register_tokens:SimpleViT"),
    _vit("ViT with learned memory", "learnable_memory_vit:ViT"),
    _vit("XCiT", "xcit:XCiT", cls_depth=1),
    _vit("ViT for small data sets", "vit_for_small_dataset:ViT"),
    _vit("normalized ViT", "normalized_vit:nViT"),
    _vit("SimpleViT with FFT", "simple_vit_with_fft:SimpleViT", freq_patch_size=8),
    _vit("RvT", "rvt:RvT"),
    ForeignModule(
        name="encoder of SAM",
        package="segment-anything",
        make=made(
            "segment_anything.modeling.image_encoder:ImageEncoderViT", img_size=32, patch_size=8, embed_dim=32, depth=2,
            num_heads=4, out_chans=16, use_rel_pos=True, window_size=2, global_attn_indexes=(1,),
        ),
        inputs=images(),
    ),
)  # fmt: skip
