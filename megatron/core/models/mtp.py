"""Multi-token prediction: further layers that each predict one token more ahead.

    h_0 = what the head sees                         (after the decoder's final norm)
    for depth k = 1 .. K, at position i:
        h_k = final_norm(layer(eh_proj(enorm(embed(t_{i+k})), hnorm(h_{k-1}))))
        loss_k = cross entropy of head(h_k) with t_{i+k+1}

Embedding and head are the model's own (DeepSeek-V3, 2024, section 2.2; Gloeckle et al., 2024, have
heads side by side instead). So the stage with the head needs the embedding too: where another rank
has it, a copy that is tied to it.

What depth k sees of a sample is the sample shifted to the left by k (`look_ahead`). As in
Megatron-core, zeros fill up, which the mask leaves out; where documents attend only within
themselves, the shift stays within each; and a layer takes its rotary positions, window and the like
from the decoder's layer of the same number. Sequences are shifted whole, before they are cut over
ranks, since the token after a cut stands elsewhere.

``eh_proj`` is held whole by every tensor-parallel rank and applied to the positions that it has, so
that no activation travels for it.

Shapes: B batch, S positions, K depths, H hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core import rng
from megatron.core.models.language_model import LanguageEmbedding
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.layers import WholeLinear
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init
from megatron.core.transformer.layer import Surroundings, TransformerLayer, build_norm
from megatron.core.transformer.plan import mtp_layer_plan

_NAMES = ("tokens", "labels", "loss_mask")


@dataclass(frozen=True)
class Ahead:
    """What the depths see of a microbatch; entry k - 1 of the last dim is depth k's."""

    tokens_BSK: Tensor
    labels_BSK: Tensor
    mask_BSK: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "Ahead | None":
        """Return what `look_ahead` has added to a microbatch, or None if it has not."""
        if f"ahead_{_NAMES[0]}" not in batch:
            return None
        return cls(*(batch[f"ahead_{name}"] for name in _NAMES))


def look_ahead(batch: Mapping[str, Tensor], depths: int) -> dict[str, Tensor]:
    """Return a microbatch of whole samples with what ``depths`` depths see of it added.

    A batch without tokens, that of a rank that reads none, stays as it is.
    """
    wide = dict(batch)
    if "tokens" in batch:
        ends_BS = _ends(batch["tokens"], batch.get("cu_seqlens"))
        for name in _NAMES:
            shifted_BS, shares = batch[name], []
            for _ in range(depths):
                shifted_BS = shifted_BS.roll(-1, 1).masked_fill(ends_BS, 0)
                shares.append(shifted_BS)
            wide[f"ahead_{name}"] = torch.stack(shares, -1)
    return wide


def _ends(tokens_BS: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return where nothing follows: at the ends of samples and of documents."""
    ends_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    ends_BS[:, -1] = True
    if cu_seqlens is not None:
        # Bounds may repeat: a document can be empty. The first is the 0 before all tokens.
        bounds = cu_seqlens[cu_seqlens > 0].long()
        ends_BS.view(-1)[bounds - 1] = True
    return ends_BS


class MTPLayer(nn.Module):
    """One depth: joins hidden states with the embedding of a later token, and transforms them."""

    def __init__(self, depth: int, around: Surroundings) -> None:
        super().__init__()
        config = around.config
        shape = (config.hidden_size, 2 * config.hidden_size)
        self.enorm = build_norm(around)
        self.hnorm = build_norm(around)
        self.eh_proj = WholeLinear(
            shape, inner_init(config, shape), around.mesh, around.dtype, around.sequence_parallel
        )
        self.transformer_layer = TransformerLayer(mtp_layer_plan(config, depth), around)
        self.final_layernorm = build_norm(around)
        self.residual_dtype = around.residual_dtype

    def forward(self, x_SBH: Tensor, embedded_SBH: Tensor, context: Context) -> Tensor:
        both = torch.cat((self.enorm(embedded_SBH), self.hnorm(x_SBH)), -1)
        joined_SBH = self.eh_proj(both).to(self.residual_dtype)
        y_SBH: Tensor = self.transformer_layer(joined_SBH, context)
        return self.final_layernorm(y_SBH)  # type: ignore[no-any-return]


class MultiTokenPrediction(nn.Module):
    """All depths, one after the other."""

    def __init__(self, depths: int, around: Surroundings) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(depth): MTPLayer(depth, around) for depth in range(depths)}
        )
        self.run = around.saving.ahead()

    def forward(
        self, x_SBH: Tensor, ahead: Ahead, embedding: LanguageEmbedding, context: Context
    ) -> list[Tensor]:
        """Return the hidden states of every depth, ready for the head.

        Args:
            x_SBH: what the head sees of the model itself.
            ahead: the tokens that each depth is told, and which count.
            embedding: of the model.
            context: as for the layers of the model.
        """
        states = []
        for depth, layer in enumerate(self.layers.values()):
            key = _key(context.dropout, depth)
            tokens_BS, mask_BS = ahead.tokens_BSK[..., depth], ahead.mask_BSK[..., depth]
            embedded_SBH = embedding(tokens_BS, None, key)
            valid_SB = None if context.valid_SB is None else mask_BS.t() > 0
            own = replace(context, dropout=key, valid_SB=valid_SB, tokens_SB=tokens_BS.t())
            whole = partial(layer, context=own)
            x_SBH = self.run(whole, x_SBH, embedded_SBH)
            states.append(x_SBH)
        return states


def _key(dropout: DropoutKey | None, depth: int) -> DropoutKey | None:
    """Return a key of other masks than those of the embedding and the decoder's layers."""
    if dropout is None:
        return None
    return replace(dropout, seed=rng.key("mtp", depth, dropout.seed))
