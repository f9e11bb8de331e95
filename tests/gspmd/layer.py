"""A Llama-like decoder layer of plain torch modules, one for each operation.

It imports nothing but torch: an environment without autoshard runs it as well.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Product(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class Scores(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key


class Softmax(nn.Module):
    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(scores * 0.25 + mask, -1)


class Mix(nn.Module):
    def forward(self, shares: Tensor, value: Tensor) -> Tensor:
        return shares @ value


class Gate(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Residual(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Layer(nn.Module):
    def __init__(self, hidden: int, keys: int, group: int, head: int, ffn: int) -> None:
        super().__init__()
        self.keys, self.group, self.head = keys, group, head
        self.norm, self.norm_2 = Norm(hidden), Norm(hidden)
        self.query = Product(hidden, keys * group * head)
        self.key, self.value = Product(hidden, keys * head), Product(hidden, keys * head)
        self.turn_query, self.turn_key = Rotary(), Rotary()
        self.scores, self.softmax, self.mix = Scores(), Softmax(), Mix()
        self.out = Product(keys * group * head, hidden)
        self.add, self.add_2 = Residual(), Residual()
        self.gate, self.up, self.down = Product(hidden, ffn), Product(hidden, ffn), Product(ffn, hidden)
        self.product = Gate()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        keys, group, head = self.keys, self.group, self.head
        y = self.norm(x)
        query = self.query(y).view(batch, seq, keys, group, head).permute(0, 2, 3, 1, 4)
        key = self.key(y).view(batch, seq, keys, 1, head).permute(0, 2, 3, 1, 4)
        value = self.value(y).view(batch, seq, keys, 1, head).permute(0, 2, 3, 1, 4)
        query, key = self.turn_query(query, cos, sin), self.turn_key(key, cos, sin)
        shares = self.softmax(self.scores(query, key.transpose(-1, -2)), mask)
        mixed = self.mix(shares, value).permute(0, 3, 1, 2, 4).reshape(batch, seq, keys * group * head)
        x = self.add(x, self.out(mixed))
        y = self.norm_2(x)
        return self.add_2(x, self.down(self.product(self.gate(y), self.up(y))))
