"""Generation: cached and uncached agree for every position scheme; sampling keeps its promises."""

import itertools

import pytest
import torch

from megatron.core import rng
from megatron.core.inference.engine import generate
from megatron.core.inference.sampling import Sampling, choose, probabilities
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError

VARIANTS = {
    "learned": {},
    "rope": {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True},
    "rope_partial": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "qk_layernorm": True,
    },
    "yarn": {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0},
    "latent": {
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10,
        "qk_layernorm": True,
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
        "position_embedding_type": "none",
    },
    "alibi": {"position_embedding_type": "alibi"},
    "none": {"position_embedding_type": "none"},
    "grouped_window_sink": {
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
    },
    "softcap": {"attention_softcap": 2.0, "logit_softcap": 5.0, "softmax_type": "off-by-one"},
}
PROMPTS = [[5, 9, 2, 7, 1], [3], [8, 8, 8, 8, 8, 8, 8, 4, 6]]


def build(**choices: object) -> GPTModel:
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "init_method_std": 0.3,
        **choices,
    }
    model = GPTModel(TransformerConfig.resolve(**values), Mesh.serial(), vocab_size=48)
    rng.initialize(model, seed=3)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached(variant: str) -> None:
    """Every step's log-probability, in a batch of three lengths, as when each text is read anew."""
    model = build(**VARIANTS[variant])
    greedy = Sampling(temperature=0)
    cached, plain = (
        generate(model, PROMPTS, max_new_tokens=12, sampling=greedy, use_cache=use_cache)
        for use_cache in (True, False)
    )
    for one, other, prompt in zip(cached, plain, PROMPTS, strict=True):
        assert one.tokens == other.tokens
        text = torch.tensor([[*prompt, *one.tokens]])
        with torch.no_grad():
            log_probabilities = model(text).log_softmax(-1)[0]
        expected = [
            float(log_probabilities[position - 1, text[0, position]])
            for position in range(len(prompt), text.shape[1])
        ]
        assert one.log_probabilities == pytest.approx(expected, abs=1e-5)
        assert other.log_probabilities == pytest.approx(expected, abs=1e-5)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model = build()
    together = generate(model, PROMPTS, max_new_tokens=8, seed=11)
    alone = generate(model, PROMPTS[:1], max_new_tokens=8, seed=11)
    assert together[0].tokens == alone[0].tokens


def test_the_seed_decides() -> None:
    model = build()
    texts = [generate(model, PROMPTS, max_new_tokens=8, seed=seed)[0].tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_tokens_end_a_sample_and_are_kept() -> None:
    model = build()
    free = generate(model, PROMPTS, max_new_tokens=10, seed=5)
    stop = free[0].tokens[3]
    stopped = generate(model, PROMPTS, max_new_tokens=10, seed=5, stop_tokens=[stop])
    assert stopped[0].finish == "stop"
    assert stopped[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    lengths = [len(completion.tokens) for completion in stopped]
    assert all(
        length == 10 or completion.tokens[-1] == stop
        for length, completion in zip(lengths, stopped, strict=True)
    )


def test_streaming_sees_every_token_in_order() -> None:
    model = build()
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    done = generate(
        model, PROMPTS, max_new_tokens=6, on_token=lambda sample, token: seen[sample].append(token)
    )
    assert [seen[sample] for sample in range(3)] == [completion.tokens for completion in done]


def test_learned_positions_limit_the_text() -> None:
    model = build(max_position_embeddings=8)
    with pytest.raises(
        UserError, match=r"5 tokens\) and --num-tokens-to-generate \(5\) .*, 8 .*at most 4 new"
    ):
        generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=5)
    assert len(generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=4)[0].tokens) == 4


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "nothing to generate"), ([[1], []], "prompt 1 has no tokens"), ([[48]], "0 to 47")],
)
def test_bad_prompts_are_refused(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(build(), prompts, max_new_tokens=1)


LOGITS = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0])


def test_top_k_keeps_exactly_k_even_with_ties() -> None:
    for k in range(1, 6):
        kept = probabilities(LOGITS, Sampling(top_k=k)) > 0
        assert int(kept.sum()) == k


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    full = LOGITS.softmax(0)
    for p in (0.01, 0.5, 0.9, 0.99):
        kept = [i for i, c in enumerate(probabilities(LOGITS, Sampling(top_p=p))) if c > 0]
        sets = (
            s
            for r in range(1, 6)
            for s in itertools.combinations(range(5), r)
            if float(full[list(s)].sum()) >= p - 1e-6
        )
        assert len(kept) == len(next(sets))
        assert float(full[kept].sum()) >= p - 1e-6


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    sharp, plain = (probabilities(LOGITS, Sampling(temperature=t)) for t in (0.5, 1.0))
    torch.testing.assert_close(sharp, (LOGITS * 2).softmax(0))
    assert sharp.max() > plain.max()
    assert choose(LOGITS, Sampling(temperature=0), torch.Generator()) == 1


def test_draws_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [choose(LOGITS, Sampling(), generator) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(draws), minlength=5) / 4000
    # A share of 4000 draws has a standard deviation of 0.008 at most: nearly four of them.
    torch.testing.assert_close(shares, LOGITS.softmax(0), atol=0.03, rtol=0)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}])
def test_senseless_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--"):
        Sampling(**wrong)
