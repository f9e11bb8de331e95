"""Small stacks of other packages, as `plan --module FILE:FUNCTION` takes them: the module, or it and its inputs."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, LENGTH, WORDS, CLASSES = 4, 16, 64, 8
Made = nn.Module | tuple[nn.Module, Mapping[str, Tensor]]

_IMAGE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": LAYERS, "num_classes": CLASSES}
_PIXELS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStack:
    """A stack of a package, and the function of this file that makes it."""

    name: str
    package: str  # as benchmarks/foreign_modules/registry.py calls it
    function: str


class Classifier(nn.Module):
    """A module that tells the class of an image, with its loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        logits: Any = self.module(images)
        return functional.cross_entropy(getattr(logits, "logits", logits), labels)


class NextToken(nn.Module):
    """A module that returns logits, perhaps among other results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        result: Any = self.module(tokens)
        return getattr(result, "logits", result)


class Told(nn.Module):
    """A module that takes tokens and the next ones, and returns logits and the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.module(tokens, targets)[1]


class Translator(nn.Module):
    """A module that takes two texts, and returns its loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.module(input_ids=input_ids, labels=labels, use_cache=False).loss


class Hidden(nn.Module):
    """A module that tells words that were hidden."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.module(input_ids=input_ids, labels=labels).loss


def _of(path: str, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]  # equal weights on every call
    return pkgutil.resolve_name(path)(*args, **kwargs)


def _images(make: Callable[[], nn.Module]) -> Made:
    module, images = Classifier(make()), torch.zeros(4, 3, 32, 32)
    return module, {"images": images, "labels": torch.arange(4) % CLASSES}


def _timm(name: str, **options: Any) -> Made:
    return _images(lambda: _of("timm:create_model", name, **{**_IMAGE, **options}))


def _vit(path: str) -> Made:
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, "dim": 32, "depth": LAYERS, "heads": 4}
    return _images(lambda: _of(f"vit_pytorch.{path}", **sizes, mlp_dim=64))


def _nano_gpt() -> Made:
    sizes = {"block_size": LENGTH, "vocab_size": WORDS, "n_layer": LAYERS, "n_head": 4, "n_embd": 32, "dropout": 0.0}
    return Told(_of("nanoGPT.model:GPT", _of("nanoGPT.model:GPTConfig", **sizes)))


def _min_gpt() -> Made:
    sizes = pkgutil.resolve_name("mingpt.model:GPT").get_default_config()
    sizes.model_type, sizes.vocab_size, sizes.block_size = None, WORDS, LENGTH
    sizes.n_layer, sizes.n_head, sizes.n_embd = LAYERS, 4, 32
    sizes.embd_pdrop = sizes.resid_pdrop = sizes.attn_pdrop = 0.0
    return Told(_of("mingpt.model:GPT", sizes))


def _x_transformers() -> Made:
    layers = _of("x_transformers:Decoder", dim=32, depth=LAYERS, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    return NextToken(_of("x_transformers:TransformerWrapper", num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers))


def _decoder(name: str, **options: Any) -> Made:
    sizes = _of(f"transformers:{name}Config", **_TEXT, **options)
    return NextToken(_of(f"transformers:{name}ForCausalLM", sizes))


def _encoder(name: str, **options: Any) -> Made:
    sizes = {key: value for key, value in _TEXT.items() if key not in ("num_key_value_heads", "use_cache")}
    module = Hidden(_of(f"transformers:{name}ForMaskedLM", _of(f"transformers:{name}Config", **sizes, **options)))
    words = torch.arange(4 * LENGTH).reshape(4, LENGTH) % WORDS
    return module, {"input_ids": words, "labels": words}


def _texts(name: str, **options: Any) -> Made:
    model = _of(f"transformers:{name}ForConditionalGeneration", _of(f"transformers:{name}Config", **options))
    words = torch.arange(4 * LENGTH).reshape(4, LENGTH) % WORDS
    return Translator(model), {"input_ids": words, "labels": words[:, : LENGTH - 4].contiguous()}


def _pixels(name: str) -> Made:
    def make() -> nn.Module:
        config = _of(f"transformers:{name}Config", **_PIXELS)
        config.num_labels = CLASSES
        return _of(f"transformers:{name}ForImageClassification", config)

    return _images(make)


timm_vit = partial(_timm, "vit_tiny_patch16_224")
timm_beit = partial(_timm, "beit_base_patch16_224", embed_dim=32, num_heads=4)
timm_eva02 = partial(_timm, "eva02_tiny_patch14_224")
vit_pytorch_vit = partial(_vit, "vit:ViT")
vit_pytorch_simple = partial(_vit, "simple_vit:SimpleViT")
nano_gpt, min_gpt, x_transformers = _nano_gpt, _min_gpt, _x_transformers
exaone4 = partial(_decoder, "Exaone4", sliding_window=8, sliding_window_pattern=2)
olmo3 = partial(_decoder, "Olmo3", sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
lfm2 = partial(_decoder, "Lfm2", layer_types=["conv", "full_attention"] * 2, block_multiple_of=8)
mamba2 = partial(_decoder, "Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)
bert = partial(_encoder, "Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
modern_bert = partial(_encoder, "ModernBert", cls_token_id=3, sep_token_id=4)
t5 = partial(
    _texts, "T5", vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4, dropout_rate=0.0,
    decoder_start_token_id=0,
)  # fmt: skip
bart = partial(
    _texts, "Bart", vocab_size=WORDS, d_model=32, encoder_layers=LAYERS, decoder_layers=LAYERS,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=1,
)  # fmt: skip
hf_vit, dino_v2 = partial(_pixels, "ViT"), partial(_pixels, "Dinov2")

STACKS = (
    ForeignStack(name="ViT", package="timm", function="timm_vit"),
    ForeignStack(name="BEiT", package="timm", function="timm_beit"),
    ForeignStack(name="EVA-02", package="timm", function="timm_eva02"),
    ForeignStack(name="ViT", package="vit-pytorch", function="vit_pytorch_vit"),
    ForeignStack(name="SimpleViT", package="vit-pytorch", function="vit_pytorch_simple"),
    ForeignStack(name="GPT with loss", package="nanoGPT", function="nano_gpt"),
    ForeignStack(name="GPT with loss", package="minGPT", function="min_gpt"),
    ForeignStack(name="decoder, rotary", package="x-transformers", function="x_transformers"),
    ForeignStack(name="EXAONE 4", package="transformers", function="exaone4"),
    ForeignStack(name="OLMo 3", package="transformers", function="olmo3"),
    ForeignStack(name="LFM2", package="transformers", function="lfm2"),
    ForeignStack(name="Mamba-2", package="transformers", function="mamba2"),
    ForeignStack(name="BERT", package="transformers", function="bert"),
    ForeignStack(name="ModernBERT", package="transformers", function="modern_bert"),
    ForeignStack(name="T5", package="transformers", function="t5"),
    ForeignStack(name="BART", package="transformers", function="bart"),
    ForeignStack(name="ViT", package="transformers", function="hf_vit"),
    ForeignStack(name="DINOv2", package="transformers", function="dino_v2"),
)
