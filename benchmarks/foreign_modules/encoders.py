"""Other families of transformers: encoders, encoder-decoders, speech, vision, and both together."""

import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.foreign_modules.registry import Call, ForeignModule, images, numbers, tokens

_WORDS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PIXELS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_PAIR: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SOUND: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
}  # fmt: skip
_LLAMA: dict[str, Any] = {**_WORDS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_ROTARY: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_IMAGE, _IMAGE_END, _VISION_START = 60, 61, 62


def _family(name: str, config: str, inputs: Callable[[], Call], **options: Any) -> ForeignModule:
    def make() -> torch.nn.Module:
        made = pkgutil.resolve_name(f"transformers:{config}")(**options)
        return pkgutil.resolve_name(f"transformers:{name}")(made)

    return ForeignModule(name=name, package="transformers", make=make, inputs=inputs)


def _pair() -> Call:
    return {
        "input_ids": torch.randint(3, 64, (4, 16)), "decoder_input_ids": torch.randint(3, 64, (4, 12)),
        "use_cache": False,
    }  # fmt: skip


def _spoken() -> Call:
    return {
        "input_features": torch.randn(4, 8, 32), "decoder_input_ids": torch.randint(3, 64, (4, 12)), "use_cache": False
    }  # fmt: skip


def _text_and_image(**others: Callable[[], Any]) -> Callable[[], Call]:
    def inputs() -> Call:
        words: dict[str, Any] = {"input_ids": torch.randint(3, 60, (4, 16)), "pixel_values": torch.randn(4, 3, 32, 32)}
        return words | {name: value() for name, value in others.items()}

    return inputs


def _with_images(count: int) -> Callable[[], torch.Tensor]:
    """Return words whose first ones stand for an image."""

    def words() -> torch.Tensor:
        found = torch.randint(3, 60, (4, 20))
        found[:, 1 : 1 + count] = _IMAGE
        return found

    return words


def _no() -> bool:
    return False


def _qwen_vision() -> Call:
    words = _with_images(4)()
    words[:, 0], words[:, 5] = _VISION_START, _IMAGE_END
    return {
        "input_ids": words, "pixel_values": torch.randn(4 * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4), "mm_token_type_ids": (words == _IMAGE).int(),
        "use_cache": False,
    }  # fmt: skip


MODULES = (
    _family("BertForMaskedLM", "BertConfig", tokens(), **_WORDS),
    _family("RobertaForMaskedLM", "RobertaConfig", tokens(), **_WORDS),
    _family("AlbertForMaskedLM", "AlbertConfig", tokens(), **_WORDS, embedding_size=16),
    _family("ElectraForMaskedLM", "ElectraConfig", tokens(), **_WORDS, embedding_size=16),
    _family("ModernBertForMaskedLM", "ModernBertConfig", tokens(), **_WORDS, cls_token_id=3, sep_token_id=4),
    _family(
        "DebertaV2ForMaskedLM", "DebertaV2Config", tokens(), **_WORDS, relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    _family("DistilBertForMaskedLM", "DistilBertConfig", tokens(), vocab_size=64, dim=32, hidden_dim=64, n_layers=2,
        n_heads=4,
    ),
    _family("EsmForMaskedLM", "EsmConfig", tokens(), **{**_WORDS, "pad_token_id": 1}, mask_token_id=2),
    _family("BartForConditionalGeneration", "BartConfig", _pair, **_PAIR),
    _family("T5ForConditionalGeneration", "T5Config", _pair, **_T5),
    _family(
        "WhisperForConditionalGeneration", "WhisperConfig", _spoken,
        **{key: value for key, value in _PAIR.items() if key != "max_position_embeddings"}, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
    ),
    _family("Wav2Vec2Model", "Wav2Vec2Config", numbers((4, 400)), **_SOUND),
    _family("ViTForImageClassification", "ViTConfig", images(), **_PIXELS),
    _family("DeiTForImageClassification", "DeiTConfig", images(), **_PIXELS),
    _family("Dinov2Model", "Dinov2Config", images(), **_PIXELS),
    _family("DINOv3ViTModel", "DINOv3ViTConfig", images(), **_PIXELS),
    _family("SiglipVisionModel", "SiglipVisionConfig", images(), **_PIXELS),
    _family(
        "CLIPModel", "CLIPConfig", _text_and_image(), text_config={**_WORDS, "eos_token_id": 63}, vision_config=_PIXELS,
        projection_dim=16,
    ),
    _family(
        "LlavaForConditionalGeneration", "LlavaConfig", _text_and_image(input_ids=_with_images(16), use_cache=_no),
        text_config={"model_type": "llama", **_LLAMA}, vision_config={"model_type": "clip_vision_model", **_PIXELS},
        image_token_id=_IMAGE,
    ),
    _family(
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", _qwen_vision,
        text_config={**_LLAMA, "rope_parameters": _ROTARY},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2},
        image_token_id=_IMAGE, vision_start_token_id=_VISION_START, vision_end_token_id=_IMAGE_END,
    ),
)  # fmt: skip
