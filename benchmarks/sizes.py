"""Shapes of the benchmark's models, and the one operation count used for every contestant."""

from dataclasses import dataclass

LR, BETAS, EPSILON, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
"""AdamW's settings, the same for all."""


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its batch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocab: int
    gated_width: int

    def flops(self, arch: str) -> float:
        """Return the operations of one step, forward and backward."""
        hidden = self.hidden
        mlp = 16 * hidden**2 if arch == "gpt2" else 6 * hidden * self.gated_width
        layer = 8 * hidden**2 + mlp + 2 * self.sequence * hidden
        tokens = self.batch * self.sequence
        return 3.0 * tokens * (self.layers * layer + 2 * hidden * self.vocab)


SIZES = {
    "T": Size(2, 64, 4, 64, 2, 512, 192),
    "S": Size(4, 256, 8, 256, 8, 8192, 704),
    "M": Size(8, 512, 8, 512, 4, 16384, 1408),
    "L": Size(12, 768, 12, 512, 2, 50304, 2048),
}
