"""Whole models that nobody wrote a card for, each with example inputs by name, in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Model = tuple[nn.Module, Mapping[str, Any]]
_VOCABULARY = 64


def words(*shape: int) -> torch.Tensor:
    return torch.randint(1, _VOCABULARY, shape)


def decoder(kind: str, layers: int, **sizes: Any) -> Model:
    """A decoder of Hugging Face with its loss."""
    import transformers

    found = getattr(transformers, f"{kind}ForCausalLM")
    usual = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": _VOCABULARY, "pad_token_id": 0, "use_cache": False,
    }  # fmt: skip
    config = found.config_class(num_hidden_layers=layers, **{**usual, **sizes})
    tokens = words(4, 8)
    return found(config), {"input_ids": tokens, "labels": tokens}


def llama(layers: int) -> Model:
    return decoder("Llama", layers)


def qwen(layers: int) -> Model:
    return decoder("Qwen3", layers)


def gemma_2(layers: int) -> Model:
    """Layers with a sliding window and without, in turns."""
    return decoder("Gemma2", layers, sliding_window=4)


def gemma_3(layers: int) -> Model:
    return decoder("Gemma3", layers, sliding_window=4, sliding_window_pattern=2)


def phi(layers: int) -> Model:
    return decoder("Phi3", layers)


def gpt_2(layers: int) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=layers, n_positions=8, vocab_size=_VOCABULARY, use_cache=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    tokens = words(4, 8)
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def vit(layers: int) -> Model:
    """Nine patches and a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48, image_size=8,
        patch_size=4, id2label={number: str(number) for number in range(6)},
    )  # fmt: skip
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.randint(0, 6, (4,))}


def bert(layers: int) -> Model:
    """Words of which some are padding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48, vocab_size=_VOCABULARY,
        max_position_embeddings=16,
    )  # fmt: skip
    tokens, mask = words(4, 9), torch.ones(4, 9, dtype=torch.int64)
    mask[1, 6:], mask[3, 4:] = 0, 0
    labels = torch.where(mask == 1, tokens, -100)
    return BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def t5(layers: int) -> Model:
    """An encoder whose result every layer of the decoder reads."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=layers, num_decoder_layers=layers,
        relative_attention_num_buckets=8, vocab_size=_VOCABULARY, use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), {"input_ids": words(4, 10), "labels": words(4, 6)}


class Encoder(nn.Module):
    """The encoder of torch itself, with a head on its mean."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        logits = self.head(self.encoder(x).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def encoder(layers: int) -> Model:
    x = torch.randn(4, 9, 32, dtype=torch.float64)
    return Encoder(layers), {"x": x, "labels": torch.randint(0, 6, (4,))}


def mixtral(layers: int, experts: str = "batched_mm") -> Model:
    """Experts whose weights are gathered for each token, unless they are asked for otherwise."""
    return decoder("Mixtral", layers, num_local_experts=4, experts_implementation=experts)


def qwen_experts(layers: int) -> Model:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return decoder("Qwen3Moe", layers, **sizes, experts_implementation="batched_mm")


def in_groups(kind: str, width: int) -> Model:
    """One layer whose experts are products of groups of rows: four experts of this width, two for each token."""
    sizes = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts_per_tok": 2}
    if kind == "GptOss":
        sizes |= {"num_local_experts": 4, "sliding_window": 4, "intermediate_size": width}
    elif kind == "Qwen3Moe":
        sizes |= {"num_experts": 4, "moe_intermediate_size": width}
    else:
        sizes |= {"intermediate_size": width}
    return decoder(kind, 1, **sizes, experts_implementation="grouped_mm")


MODELS: Mapping[str, Callable[[int], Model]] = {
    "Llama": llama,
    "Qwen3": qwen,
    "Gemma 2": gemma_2,
    "Gemma 3": gemma_3,
    "Phi-3": phi,
    "GPT-2": gpt_2,
    "ViT": vit,
    "BERT with padding": bert,
    "T5": t5,
    "torch's TransformerEncoder": encoder,
    "Mixtral": mixtral,
    "Qwen3-MoE": qwen_experts,
}


def model(name: str, layers: int = 4) -> Model:
    """A model of this many layers, without random numbers."""
    torch.manual_seed(0)
    module, inputs = MODELS[name](layers)
    return module.double().eval(), inputs
