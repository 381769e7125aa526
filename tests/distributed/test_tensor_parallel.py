"""A GPT cut over tensor-parallel ranks is the serial GPT: losses, every gradient, norm, weights."""

from typing import Any

import pytest
import torch

from megatron.core import comm, rng, sharding
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.transformer.config import TransformerConfig
from tests.harness import Pool

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 4,
        "untie_embeddings_and_output_weights": True,
    },
    "window": {
        "position_embedding_type": "alibi",
        "qk_layernorm": True,
        "window_size": (3, 0),
        "softmax_type": "learnable",
        "squared_relu": True,
    },
}
LAYOUTS = [(2, False), (2, True), (4, False), (4, True), (2, "overlap"), (4, "overlap")]
# Neither divides by 2 or 4: the last rank's rows are partly padding, or wholly.
VOCAB, PADDED = 37, {"gpt2": 40, "llama": 80, "window": 40}


def run(mesh: Mesh, variant: str, sequence_parallel: bool) -> dict[str, Any]:
    """Train three iterations; return losses, norms, and gathered gradients and weights."""
    config = TransformerConfig.resolve(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 8,
            "ffn_hidden_size": 48,
            "max_position_embeddings": 16,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "init_method_std": 0.2,
            **VARIANTS[variant],
        }
    )
    model = GPTModel(
        config,
        mesh,
        vocab_size=VOCAB,
        padded_vocab_size=PADDED[variant],
        dtype=torch.float64,
        sequence_parallel=sequence_parallel,
    )
    rng.initialize(model, seed=5)
    settings = OptimizerConfig.resolve(clip_grad=0.5)
    optimizer = build_optimizer(settings, [model], mesh, PrecisionConfig.resolve(fp64=True))
    data = torch.randint(0, VOCAB, (3, 2, 17), generator=torch.Generator().manual_seed(1))
    out: dict[str, Any] = {"losses": [], "norms": []}
    for text in data:
        optimizer.zero_grad()
        losses = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        losses.sum().backward()
        optimizer.data_parallel.reduce_gradients()
        if not out["losses"]:
            out["grads"] = logical(model, mesh, "grad")
        result = optimizer.step(1 / 32, lr=1e-2, weight_decay=0.1)
        out["losses"].append(losses.detach())
        out["norms"].append(float(result.grad_norm))
    out["weights"] = logical(model, mesh, "data")
    return out


def logical(model: GPTModel, mesh: Mesh, attribute: str) -> dict[str, torch.Tensor]:
    """Return every parameter's logical tensor, joined from all ranks, all boxes once."""
    joined = {}
    for parameter in model.parameters():
        record, local = sharding.of(parameter), getattr(parameter, attribute)
        whole = torch.full(record.shape, torch.nan, dtype=torch.float64)
        parts = [
            (region.logical, local[sharding.box_slices(region.local)].clone())
            for region in record.regions
        ]
        for boxes in comm.gather_objects(parts, mesh.tp):
            for box, values in boxes:
                target = whole[sharding.box_slices(box)]
                # Ranks that hold the same box must agree on it.
                known = ~target.isnan()
                torch.testing.assert_close(target[known], values[known], rtol=1e-12, atol=1e-14)
                target.copy_(values)
        assert not whole.isnan().any(), record.name
        joined[record.name] = whole
    return joined


def on_ranks(rank: int, size: int, variant: str, sequence_parallel: bool | str) -> Any:
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=size,
        sequence_parallel=bool(sequence_parallel),
        tp_comm_overlap=sequence_parallel == "overlap",
    )
    return run(Mesh.create(config, torch.device("cpu")), variant, bool(sequence_parallel))


@pytest.fixture(scope="module", params=VARIANTS)
def serial(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, run(Mesh.serial(), request.param, False)


@pytest.mark.parametrize(("size", "sequence_parallel"), LAYOUTS)
def test_equals_the_serial_run(
    pool: Pool, serial: tuple[str, dict[str, Any]], size: int, sequence_parallel: bool | str
) -> None:
    variant, expected = serial
    for result in pool.run(size, on_ranks, size, variant, sequence_parallel):
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-12, atol=1e-13)
        # Adam makes of a gradient that is nothing but rounding, that of a key's bias (no softmax
        # sees it), a small step of its own: weights and later gradients agree less well.
        for what in ("grads", "weights"):
            assert result[what].keys() == expected[what].keys()
            for name, value in expected[what].items():
                torch.testing.assert_close(
                    result[what][name], value, rtol=1e-9, atol=1e-11, msg=f"{what} of {name}"
                )
