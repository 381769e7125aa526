"""The smallest training loop over torch's own modules: what our step is measured against."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sizes import BETAS, DECAY, EPSILON, LR, Size
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` with its channel halves rotated."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """Pre-norm attention and MLP, as GPT-2 or as Llama has them."""

    def __init__(self, size: Size, llama: bool) -> None:
        super().__init__()
        hidden, inner = size.hidden, size.gated_width if llama else 4 * size.hidden
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.heads, self.llama = size.heads, llama
        self.norms = nn.ModuleList([norm(hidden, eps=1e-5), norm(hidden, eps=1e-5)])
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=not llama)
        self.out = nn.Linear(hidden, hidden, bias=not llama)
        self.up = nn.Linear(hidden, 2 * inner if llama else inner, bias=not llama)
        self.down = nn.Linear(inner, hidden, bias=not llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        mixed = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        if self.llama:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        up = self.up(self.norms[1](x))
        if not self.llama:
            return x + self.down(F.gelu(up))
        gate, up = up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A decoder with tied embeddings that returns its loss."""

    def __init__(self, size: Size, llama: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.positions = None if llama else nn.Embedding(size.sequence, size.hidden)
        self.layers = nn.ModuleList(Layer(size, llama) for _ in range(size.layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(size.hidden, eps=1e-5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        dim = size.hidden // size.heads
        inverse = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(size.sequence).float(), inverse)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain(size: Size, arch: str) -> Callable[[Tensor, Tensor], float]:
    """Return the loop's step: forward, backward, fused AdamW."""
    model = Model(size, arch == "llama")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
    )

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
