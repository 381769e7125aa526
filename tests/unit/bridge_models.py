"""Weights as the bridge hands them over, and models of ours with them."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron.bridge.hugging_face import Import
from megatron.core import sharding

Model = TypeVar("Model", bound=nn.Module)


def read_all(opened: Import) -> dict[str, Tensor]:
    """Return every tensor, whole, under our name."""
    return {
        name: opened.read(name, tuple((0, size) for size in tensor.shape))
        for name, tensor in opened.tensors.items()
    }


def filled(model: Model, tensors: Mapping[str, Tensor]) -> Model:
    """Return a model that computes, with these weights and no others."""
    parameters = {sharding.of(p).name: p for p in model.parameters()}
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return model.eval()
