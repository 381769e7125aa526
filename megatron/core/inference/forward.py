"""One forward pass over all ranks of a model, for logits.

A rank may hold a share of every layer (tensor parallelism) and some of the layers (pipeline
parallelism). Hidden states go from stage to stage, all samples together: a step reads one token of
each, and costs about the same for one sample as for many.

Shapes: B batch, S tokens of this step, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.inference.kv_cache import StaticCache
from megatron.core.models.gpt import GPTModel


def forward(
    model: GPTModel, tokens_BS: Tensor, cache: StaticCache | None, positions_BS: Tensor | None
) -> Tensor | None:
    """Return logits ``[B, S, V]`` on the ranks of the last stage, None on the others.

    A collective of the model's ranks, which all give the same tokens.

    Args:
        model: this rank's part of the model, built without sequence parallelism.
        tokens_BS: ids of the tokens of this step, on the model's device.
        cache: of this rank's layers.
        positions_BS: where the tokens stand among the cached ones; None for 0 .. S-1.
    """
    assert not model.sequence_parallel, "single tokens are not divided over ranks"
    x_SBH = None if model.stage.is_first else _receive(model, tokens_BS)
    out: Tensor = model(tokens_BS, x_SBH=x_SBH, cache=cache, position_ids_BS=positions_BS)
    if model.stage.is_last:
        return out
    axis = model.mesh.pp
    comm.send(out.contiguous(), axis, axis.coordinate + 1).wait()
    return None


def _receive(model: GPTModel, tokens_BS: Tensor) -> Tensor:
    """Return the hidden states of the stage before."""
    batch, length = tokens_BS.shape
    like = next(model.parameters())
    x_SBH = torch.empty(
        length, batch, model.config.hidden_size, dtype=model.residual_dtype, device=like.device
    )
    axis = model.mesh.pp
    comm.receive(x_SBH, axis, axis.coordinate - 1).wait()
    return x_SBH
