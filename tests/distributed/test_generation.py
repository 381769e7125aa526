"""Generation over tensor- and pipeline-parallel ranks: the serial texts, token for token."""

from typing import Any

import pytest
import torch

from megatron.core import comm, rng
from megatron.core.grid import ParallelConfig
from megatron.core.inference.engine import Completion, generate
from megatron.core.inference.sampling import Sampling
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.stages import make_stages
from megatron.core.transformer.config import TransformerConfig
from tests.harness import Pool

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 7, 1], [3], [8, 8, 8, 8, 8, 8, 8, 4, 6]]
VOCABULARY = 49
VARIANTS: dict[str, dict[str, Any]] = {
    "learned_tied": {},
    "llama_untied": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
    "grouped_window_sink": {
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
    },
    "alibi_softcap": {
        "position_embedding_type": "alibi",
        "attention_softcap": 2.0,
        "logit_softcap": 5.0,
    },
}
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.9, top_k=20, top_p=0.95),
}


def build(
    choices: dict[str, Any], tensor: int, pipeline: int, dtype: torch.dtype = torch.float64
) -> GPTModel:
    config = TransformerConfig.resolve(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=32,
        init_method_std=0.3,
        **choices,
    )
    mesh = Mesh.serial()
    if tensor * pipeline > 1:
        layout = ParallelConfig.resolve(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
        )
        mesh = Mesh.create(layout, CPU, num_query_groups=config.attention.num_query_groups)
    model = GPTModel(
        config,
        mesh,
        vocab_size=VOCABULARY,  # padded: 2 and 4 do not divide it
        padded_vocab_size=52,
        dtype=dtype,
        stage=make_stages(config.num_layers, pipeline)[mesh.pp.coordinate],
    )
    rng.initialize(model, seed=3)
    return model


def completions(
    rank: int, choices: dict[str, Any], tensor: int, pipeline: int, caches: tuple[bool, ...]
) -> dict[tuple[str, bool], list[Completion]]:
    model = build(choices, tensor, pipeline)
    stop = [7]
    return {
        (name, cache): generate(
            model,
            PROMPTS,
            max_new_tokens=6,
            sampling=sampling,
            stop_tokens=stop,
            seed=11,
            use_cache=cache,
        )
        for name, sampling in SAMPLINGS.items()
        for cache in caches
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_says_what_one_process_says(pool: Pool, variant: str) -> None:
    # The cheapest that shows it: (2, 2) has both kinds of ranks, and the groups are two.
    caches = (True, False) if variant == "learned_tied" else (True,)
    more = [(4, 1), (1, 3)] if variant == "grouped_window_sink" else []
    choices = VARIANTS[variant]
    expected = completions(0, choices, 1, 1, caches)
    texts = [text.tokens for one in expected.values() for text in one]
    assert len(set(map(tuple, texts))) > len(PROMPTS)  # sampling is not greedy
    for tensor, pipeline in [(2, 2), *more]:
        world = tensor * pipeline
        for ended in pool.run(world, completions, choices, tensor, pipeline, caches):
            for key, there in expected.items():
                for here, serial in zip(ended[key], there, strict=True):
                    assert (here.tokens, here.finish) == (serial.tokens, serial.finish)
                    logarithms = pytest.approx(serial.log_probabilities, rel=1e-10)
                    assert here.log_probabilities == logarithms


def in_half(rank: int, dtype: torch.dtype, pipeline: int) -> list[Completion]:
    model = build({"fp32_residual_connection": True}, 1, pipeline, dtype)
    return generate(model, PROMPTS, max_new_tokens=4, sampling=Sampling(temperature=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stages_in_half_hand_on_an_fp32_stream(pool: Pool, dtype: torch.dtype) -> None:
    serial = in_half(0, dtype, 1)
    for ended in pool.run(2, in_half, dtype, 2):
        assert ended == serial


def sent(rank: int, tensor: int, pipeline: int) -> comm.Traffic:
    model = build({}, tensor, pipeline)
    with comm.counting() as traffic:
        generate(model, PROMPTS, max_new_tokens=4, sampling=Sampling(temperature=0))
    return traffic


def test_a_step_sends_one_position_of_each_text_on(pool: Pool) -> None:
    first, last = pool.run(2, sent, 1, 2)
    longest, batch, width = max(map(len, PROMPTS)), len(PROMPTS), 32 * 8
    # The prompts, then three steps: the fourth token is not read.
    assert first.bytes["pp", "send"] == (longest + 3) * batch * width
    assert first.calls["pp", "send"] == last.calls["pp", "receive"] == 4
    # An id and a logarithm of each text and step.
    assert first.bytes["world", "all_reduce"] == 4 * batch * 2 * 8
    assert set(last.calls) == {("pp", "receive"), ("world", "all_reduce")}
