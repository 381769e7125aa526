"""How positions enter: a learned table on the embedding, rotations, or biases on the scores.

Where nobody gives positions, a rank's are those that `context_parallel.partition` gives it.

Shapes: B batch, S positions of this context-parallel rank, H hidden, n heads, f rotary frequencies.
"""

import math

import torch
from torch import Tensor, nn

from megatron.core.context_parallel.partition import positions
from megatron.core.kernels import rope
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.embedding import position_record
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.mla_config import MLAConfig
from megatron.core.transformer.position_config import PositionConfig
from megatron.core.utils import UserError


class LearnedPositions(nn.Module):
    """One learned vector per position, added to the token's (Vaswani et al., 2017)."""

    def __init__(
        self,
        config: PositionConfig,
        hidden_size: int,
        init: Init,
        mesh: Mesh,
        dtype: torch.dtype,
        summed: bool,
    ) -> None:
        super().__init__()
        rows = config.max_position_embeddings
        record = position_record(rows, hidden_size, init, summed)
        self.weight = make_parameter(record, (rows, hidden_size), mesh, dtype)
        self.axis = mesh.cp

    def forward(self, length: int, position_ids_BS: Tensor | None) -> Tensor:
        """Return ``[S, 1, H]``, or ``[S, B, H]`` where samples have positions of their own.

        Raises:
            UserError: the sequence is longer than the table.
        """
        whole = length * self.axis.size
        if whole > self.weight.shape[0]:
            raise UserError(
                f"a sequence of {whole} tokens exceeds --max-position-embeddings "
                f"({self.weight.shape[0]}); raise it or shorten --seq-length"
            )
        if position_ids_BS is not None:
            return self.weight[position_ids_BS.t()]
        if self.axis.size == 1:
            return self.weight[:length].unsqueeze(1)
        here = positions(whole, self.axis.coordinate, self.axis.size)
        return self.weight[here.to(self.weight.device)].unsqueeze(1)


class RotaryTables:
    """Cosines and sines for the positions of a microbatch; plain ranges are computed once."""

    def __init__(
        self, frequencies_f: Tensor, concentration: float, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self.dtype, self.axis = dtype, mesh.cp
        self.frequencies = frequencies_f.to(mesh.device)
        self.concentration = concentration
        self._plain: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, position_ids_BS: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), ``[S, f]`` or, with ids, ``[S, B, f]``."""
        if position_ids_BS is not None:
            return self._compute(position_ids_BS.t())
        if length not in self._plain:
            axis = self.axis
            here = positions(length * axis.size, axis.coordinate, axis.size)
            self._plain[length] = self._compute(here.to(self.frequencies.device))
        return self._plain[length]

    def _compute(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return rope.rope_tables(self.frequencies, at, self.dtype, self.concentration)


def rotary_tables(config: TransformerConfig, mesh: Mesh, dtype: torch.dtype) -> RotaryTables | None:
    """Return the tables of a model, or None if nothing in it rotates."""
    position, latent = config.position, config.mla
    if latent.multi_latent_attention:
        found = latent_frequencies(position, latent), latent_concentration(latent)
    elif position.is_rotary:
        dim = position.rotated_channels(config.attention.kv_channels)
        found = frequencies(position, dim), concentration(position)
    else:
        return None
    return RotaryTables(*found, mesh, dtype)


def latent_frequencies(position: PositionConfig, latent: MLAConfig) -> Tensor:
    """Return the rotary frequencies of multi-latent attention, in fp64.

    All rotary channels turn under YaRN, and --rotary-percent of them without it.
    """
    dim = latent.qk_pos_emb_head_dim
    if latent.rope_type == "rope":
        return rope.inverse_frequencies(position.rotated_channels(dim), position.rotary_base)
    return rope.yarn_frequencies(
        dim,
        position.rotary_base,
        latent.rotary_scaling_factor,
        latent.original_max_position_embeddings,
        latent.beta_fast,
        latent.beta_slow,
    )


def latent_concentration(latent: MLAConfig) -> float:
    """Return YaRN's factor on cosines and sines of multi-latent attention."""
    if latent.rope_type == "rope":
        return 1.0
    factor = latent.rotary_scaling_factor
    return rope.yarn_mscale(factor, latent.mscale) / rope.yarn_mscale(factor, latent.mscale_all_dim)


def frequencies(config: PositionConfig, dim: int) -> Tensor:
    """Return the rotary frequencies of ``dim`` channels, in fp64."""
    assert dim >= 2 and dim % 2 == 0, f"{dim} channels are not pairs"
    if config.position_embedding_type == "yarn":
        return rope.yarn_frequencies(
            dim,
            config.rotary_base,
            config.yarn_rotary_scaling_factor,
            config.yarn_original_max_position_embeddings,
            config.yarn_beta_fast,
            config.yarn_beta_slow,
            config.yarn_correction_range_round_to_int,
        )
    plain = rope.inverse_frequencies(
        dim, config.rotary_base, config.rotary_seq_len_interpolation_factor
    )
    if config.use_rope_scaling:
        return rope.llama3_frequencies(plain, config.rope_scaling_factor)
    return plain


def concentration(config: PositionConfig) -> float:
    """Return YaRN's factor on cosines and sines (Peng et al., 2023, equation 22)."""
    if config.position_embedding_type != "yarn":
        return 1.0
    factor = config.yarn_rotary_scaling_factor
    return rope.yarn_mscale(factor, config.yarn_mscale) / rope.yarn_mscale(
        factor, config.yarn_mscale_all_dim
    )


def alibi_slopes(num_heads: int) -> Tensor:
    """Return each head's slope (Press et al., 2022), in fp64.

    A geometric series from 2^(-8/n) for a power of two; other head counts take the series of the
    power below and fill up with every other slope of the power above.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-8.0 / power)
    slopes = [base ** (i + 1) for i in range(power)]
    finer = 2.0 ** (-4.0 / power)
    slopes += [finer ** (2 * i + 1) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)
