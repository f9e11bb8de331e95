"""Encoders whose result a decoder reads, written as their authors would: each with example inputs by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.modules.decoder.reading import with_constants
from tests.modules.training.own_samples import HEADS, HIDDEN, Made

WORDS, SOURCE, TARGET, BUCKETS, LAYERS = 48, 12, 8, 8, 2


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself; a layer may have the bias by position of all others."""

    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.bias = nn.Embedding(BUCKETS, HEADS) if biased else None

    def by_position(self, length: int) -> Tensor:
        assert self.bias
        places = torch.arange(length, device=self.bias.weight.device)
        distance = (places[:, None] - places).abs().clamp(max=BUCKETS - 1)
        return self.bias(distance).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
        def heads(of: Tensor) -> Tensor:
            return of.view(*of.shape[:2], HEADS, HIDDEN // HEADS).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(source)), heads(self.value(source))
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Reader(nn.Module):
    """A layer of the encoder, which makes the bias of all layers if it is the first."""

    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.attention = Attention(biased=biased)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.norms[0](x)
        x = x + self.attention(attended, attended, mask)
        return x + self.down(functional.relu(self.up(self.norms[1](x))))


class Writer(nn.Module):
    """A layer of the decoder: attention to itself and to the encoder's result."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross = Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(3))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        attended = self.norms[0](x)
        x = x + self.attention(attended, attended, None, is_causal=True)
        x = x + self.cross(self.norms[1](x), source, None)
        return x + self.down(functional.gelu(self.up(self.norms[2](x))))


class Translator(nn.Module):
    """An encoder and a decoder that share their words with the head; the first layer makes the bias of the encoder."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.places = nn.Parameter(torch.randn(TARGET, HIDDEN) * 0.02)
        self.readers = nn.ModuleList(Reader(biased=number == 0) for number in range(layers))
        self.read = nn.LayerNorm(HIDDEN)
        self.writers = nn.ModuleList(Writer() for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, bias = self.words(source), None
        for layer in self.readers:
            assert isinstance(layer, Reader)
            bias = layer.attention.by_position(source.shape[1]) if bias is None else bias
            x = layer(x, bias)
        read = self.read(x)
        y = self.words(target[:, :-1]) + self.places
        for layer in self.writers:
            y = layer(y, read)
        return functional.cross_entropy(self.out(self.norm(y)).flatten(0, 1), target[:, 1:].flatten())


class OfTorch(nn.Module):
    """Torch's own layers, with words for each side; those of the decoder may have a batch behind a sequence."""

    def __init__(self, layers: int = LAYERS, *, is_first: bool = True) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, HIDDEN), nn.Embedding(WORDS, HIDDEN)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, 64, 0.0, batch_first=True) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(HIDDEN, HEADS, 64, 0.0, batch_first=is_first) for _ in range(layers)
        )
        self.is_first = is_first
        self.out = nn.Linear(HIDDEN, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.source(source), self.target(target[:, :-1])
        for layer in self.encoder:
            x = layer(x)
        x, y = (x, y) if self.is_first else (x.transpose(0, 1), y.transpose(0, 1))
        length = target.shape[1] - 1
        mask = torch.full((length, length), float("-inf"), device=y.device, dtype=y.dtype).triu(1)
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=mask)
        y = y if self.is_first else y.transpose(0, 1)
        return functional.cross_entropy(self.out(y).flatten(0, 1), target[:, 1:].flatten())


def _texts() -> dict[str, Tensor]:
    return {"source": torch.randint(0, WORDS, (4, SOURCE)), "target": torch.randint(0, WORDS, (4, TARGET + 1))}


def translator(layers: int = LAYERS) -> Made:
    return Translator(layers), _texts()


def of_torch(layers: int = LAYERS) -> Made:
    return OfTorch(layers), _texts()


def batch_behind(layers: int = LAYERS) -> Made:
    return OfTorch(layers, is_first=False), _texts()


TRANSLATORS = {"translator": translator, "layers of torch": of_torch, "batch behind": batch_behind}


def _of_transformers(kind: str, sizes: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Made:
    import transformers

    config: Any = getattr(transformers, f"{kind}Config")
    module: Any = getattr(transformers, f"{kind}ForConditionalGeneration", None) or getattr(
        transformers, f"{kind}MTModel"
    )
    return with_constants(module(config(**sizes, use_cache=False))), inputs


def _of_text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (4, SOURCE)), "labels": torch.randint(3, WORDS, (4, TARGET))}


def _like_bart(layers: int) -> dict[str, Any]:
    sizes = {"d_model": HIDDEN, "encoder_layers": layers, "decoder_layers": layers}
    sizes |= {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in _OF_BOTH.items()}
    return {**sizes, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 1, **_DROPPING}


_OF_BOTH = {"attention_heads": HEADS, "ffn_dim": 64}
_DROPPING = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def t5(layers: int = LAYERS) -> Made:
    sizes = {
        "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 64, "num_layers": layers, "num_heads": HEADS,
        "vocab_size": WORDS,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }  # fmt: skip
    return _of_transformers("T5", sizes, _of_text())


def bart(layers: int = LAYERS) -> Made:
    return _of_transformers("Bart", _like_bart(layers), _of_text())


def mbart(layers: int = LAYERS) -> Made:
    return _of_transformers("MBart", _like_bart(layers), _of_text())


def marian(layers: int = LAYERS) -> Made:
    return _of_transformers("Marian", {**_like_bart(layers), "decoder_start_token_id": 1}, _of_text())


def pegasus(layers: int = LAYERS) -> Made:
    return _of_transformers("Pegasus", {**_like_bart(layers), "decoder_start_token_id": 1}, _of_text())


def whisper(layers: int = LAYERS) -> Made:
    sizes = {**_like_bart(layers), "num_mel_bins": 8, "max_source_positions": SOURCE, "max_target_positions": 32}
    sizes |= {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    inputs = {"input_features": torch.randn(4, 8, 2 * SOURCE), "labels": _of_text()["labels"]}
    return _of_transformers("Whisper", sizes, inputs)


def timesformer(layers: int = LAYERS) -> Made:
    import transformers

    config: Any = transformers.TimesformerConfig(
        image_size=16, patch_size=8, num_frames=2, hidden_size=HIDDEN, num_hidden_layers=layers,
        num_attention_heads=HEADS, intermediate_size=64,
    )  # fmt: skip
    config.num_labels = 6
    module: Any = transformers.TimesformerForVideoClassification(config)
    return module, {"pixel_values": torch.randn(4, 2, 3, 16, 16), "labels": torch.arange(4)}


OF_TRANSFORMERS = {
    "T5": t5, "BART": bart, "MBart": mbart, "Marian": marian, "Pegasus": pegasus, "Whisper": whisper,
    "Timesformer": timesformer,
}  # fmt: skip
