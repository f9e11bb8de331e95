"""Stacks of layers whose samples are no tokens, written as their authors would: each with example inputs by name."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, IMAGE, PATCH, CLASSES = 32, 4, 16, 4, 6
Made = tuple[nn.Module, Mapping[str, Tensor]]


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm; a condition, if there is one, scales and shifts both."""

    def __init__(self, *, conditioned: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.modulation = nn.Linear(HIDDEN, 6 * HIDDEN) if conditioned else None

    def attend(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = self.qkv(x).view(count, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(count, length, width))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        first, second = self.norms
        if self.modulation is None or condition is None:
            x = x + self.attend(first(x))
            return x + self.down(functional.gelu(self.up(second(x))))
        six = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        x = x + six[2] * self.attend(first(x) * (1 + six[1]) + six[0])
        return x + six[5] * self.down(functional.gelu(self.up(second(x) * (1 + six[4]) + six[3])))


class Vision(nn.Module):
    """A classifier of images by a class token, or by the mean of all patches."""

    def __init__(self, *, pooled: bool = False, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, PATCH)
        self.token = None if pooled else nn.Parameter(torch.randn(1, 1, HIDDEN) * 0.02)
        self.places = nn.Parameter(torch.randn((IMAGE // PATCH) ** 2 + (not pooled), HIDDEN) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.classes = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.places
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return functional.cross_entropy(self.classes(x.mean(1) if self.token is None else x[:, 0]), labels)


class Diffusion(nn.Module):
    """A diffusion transformer that tells the noise in latents; time and class condition every layer."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, HIDDEN, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn((IMAGE // PATCH) ** 2, HIDDEN) * 0.02)
        self.time = nn.Sequential(nn.Linear(HIDDEN // 2, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.classes = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(Layer(conditioned=True) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * PATCH**2)

    def forward(self, latents: Tensor, noise: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(HIDDEN // 4, device=time.device) / (HIDDEN // 4))
        angles = time[:, None] * rates.to(time.dtype)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(labels)
        share = time[:, None, None, None]
        x = self.patches((1 - share) * latents + share * noise).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x, 1.5 * condition)  # for each layer anew
        count, side = len(x), IMAGE // PATCH
        told = self.out(self.norm(x)).view(count, side, side, PATCH, PATCH, 4).permute(0, 5, 1, 3, 2, 4)
        return functional.mse_loss(told.reshape(count, 4, IMAGE, IMAGE), noise - latents)


class Contrastive(Vision):
    """Compares images with texts, all with all, behind layers that no product follows."""

    def __init__(self) -> None:
        super().__init__(pooled=True)
        self.words, self.scale = nn.Embedding(16, HIDDEN), nn.Parameter(torch.tensor(1.0))
        del self.norm, self.classes

    def forward(self, images: Tensor, text: Tensor) -> Tensor:  # pyright: ignore
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        seen, read = (functional.normalize(y.mean(1), dim=-1) for y in (x, self.words(text)))
        scores, pairs = self.scale.exp() * seen @ read.mT, torch.arange(len(x), device=x.device)
        return (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.mT, pairs)) / 2


def _labels() -> Tensor:
    return torch.arange(4) % CLASSES


def vision() -> Made:
    return Vision(), {"images": torch.randn(4, 3, IMAGE, IMAGE), "labels": _labels()}


def pooled() -> Made:
    return Vision(pooled=True), {"images": torch.randn(4, 3, IMAGE, IMAGE), "labels": _labels()}


def contrastive() -> Made:
    return Contrastive(), {"images": torch.randn(4, 3, IMAGE, IMAGE), "text": torch.arange(20).view(4, 5) % 16}


def diffusion() -> Made:
    latents, noise = torch.randn(2, 4, 4, IMAGE, IMAGE)
    return Diffusion(), {"latents": latents, "noise": noise, "time": torch.rand(4), "labels": _labels()}


def hf_vision() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=HEADS, intermediate_size=64, image_size=IMAGE,
        patch_size=PATCH,
    )  # fmt: skip
    config.num_labels = CLASSES
    images = torch.randn(4, 3, IMAGE, IMAGE)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": _labels()}


SAMPLES = {"vision": vision, "pooled": pooled, "diffusion": diffusion, "HF ViT": hf_vision}
