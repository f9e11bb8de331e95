"""Decoders whose code is read: of Hugging Face, with small sizes, and written here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY, TOKENS, SEQUENCES, LAYERS = 96, 24, 2, 2
_SIZES: Mapping[str, Any] = {
    "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def of_transformers(kind: str, *without: str, **more: Any) -> Callable[[], nn.Module]:
    """A decoder of transformers by the name of its class; ``without`` are sizes that its config does not have."""

    def make() -> nn.Module:
        import transformers

        found: Any = getattr(transformers, f"{kind}ForCausalLM")
        given = {name: value for name, value in {**_SIZES, **more}.items() if name not in without}
        return found(found.config_class(**given))

    return make


FAMILIES: Mapping[str, Callable[[], nn.Module]] = {  # without experts
    "Cohere": of_transformers("Cohere"),
    "Gemma 2": of_transformers("Gemma2", sliding_window=8),
    "Gemma 3": of_transformers("Gemma3", sliding_window=8, layer_types=["sliding_attention"] * LAYERS),
    "GLM-4": of_transformers("Glm4"),
    "GPT-J": of_transformers(
        "GPTJ", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", n_embd=64, n_head=8, n_layer=LAYERS, n_positions=64, rotary_dim=4,
    ),
    "Granite": of_transformers("Granite"),
    "OLMo 2": of_transformers("Olmo2"),
    "Phi": of_transformers("Phi"),
    "Phi-3": of_transformers("Phi3"),
    "SmolLM3": of_transformers("SmolLM3"),
    "StableLM": of_transformers("StableLm"),
    "StarCoder 2": of_transformers("Starcoder2"),
}  # fmt: skip

EXPERTS: Mapping[str, Callable[[], nn.Module]] = {
    "Qwen2-MoE, with a shared expert": of_transformers(
        "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=32
    ),
    "Qwen3-MoE": of_transformers("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt-oss": of_transformers("GptOss", num_local_experts=4, num_experts_per_tok=2),
    "Mixtral": of_transformers("Mixtral", num_local_experts=4),
    "Mixtral, every expert apart": of_transformers("Mixtral", num_local_experts=4, experts_implementation="batched_mm"),
}


class Own(nn.Module):
    """What a researcher may write: functions of torch, attention in two products, learned positions."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(OwnLayer() for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, VOCABULARY, bias=False)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))

    def layered(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layered(self.embedded(tokens))))


class OwnLayer(nn.Module):
    """Eight heads of eight, and an MLP with an activation that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.query, self.key, self.value, self.mix = (nn.Linear(64, 64) for _ in range(4))
        self.widen, self.narrow = nn.Linear(64, 88), nn.Linear(88, 64)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 8, 8)
        query, key, value = (one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (query @ key.transpose(2, 3)) * 8**-0.5
        mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
        return self.mix(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.first(x))
        inner = self.widen(self.second(x))
        return x + self.narrow(inner * torch.sigmoid(inner))


def own() -> nn.Module:
    return Own()


def tokens(device: str = "meta") -> torch.Tensor:
    return torch.zeros(SEQUENCES, TOKENS, dtype=torch.int64, device=device)
