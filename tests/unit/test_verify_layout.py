"""The layout check: words, the small run, what is joined and compared, and what the tool says."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron.core.mesh import Mesh
from megatron.core.pipeline_parallel.stages import make_stages
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import UserError
from megatron.training.arguments import read_settings
from megatron.training.verification.equality import MadeUp
from megatron.training.verification.layout_words import all_layouts, parse_layout, parse_layouts
from megatron.training.verification.outcomes import Outcome, Piece, Share, compare, join
from megatron.training.verification.small_run import SmallRun
from megatron.training.verification.worker_pool import RankFailed
from tools import verify_layout as tool

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 11008 --seq-length 4096 --swiglu "
    "--max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--micro-batch-size 4 --global-batch-size 1024 --bf16 --lr 1e-4 --lr-warmup-iters 500 "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 4 --train-iters 500000 --data-path /nowhere/text "
    "--window-size 1024,0 --save /nowhere --clip-grad 0.5 --seed 7"
)
TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16"
)
ROPE = "--position-embedding-type rope"


def small(words: str) -> SmallRun:
    return SmallRun(read_settings(words.split(), "test").values)


def test_words_make_a_layout() -> None:
    layout = parse_layout("tp2 sp pp3 vpp2 cp4 a2a dp5 1f1b overlap --ddp-bucket-size 7", "test")
    assert layout.world_size == 2 * 3 * 4 * 5
    assert layout.values == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 3,
        "num_virtual_stages_per_pipeline_rank": 2,
        "context_parallel_size": 4,
        "cp_comm_type": ("a2a",),
        "pipeline_schedule": "1f1b",
        "overlap_grad_reduce": True,
        "ddp_bucket_size": 7,
    }
    two_levels = parse_layout("cp6 a2a+p2p", "test").values
    assert two_levels["hierarchical_context_parallel_sizes"] == (2, 3)
    quoted = parse_layout("pp2 --pipeline-model-parallel-layout 'Et|tL'", "test")
    assert quoted.values["pipeline_model_parallel_layout"] == "Et|tL"
    assert [one.world_size for one in parse_layouts("tp2; ;pp3 dp2", "test")] == [2, 6]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp2 tq4", "'tq4' means nothing"),
        ("zbv", "did you mean zb-v?"),
        ("tp2 tp4", "says twice what tp4 says"),
        ("1f1b zb-v", "says twice what zb-v says"),
        ("tp0", "tp0: a size must be at least 1"),
        ("tp99999999999", "tp99999999999: a size must be at least 1, and at most 256"),
        (f"tp{'9' * 5000}", "at most 256"),
        ("tp64 cp64", "'tp64 cp64' has 4096 processes; at most 256 are tried"),
        ("pp2 vpp256", "'pp2 vpp256' has 512 stages; at most 256 are tried"),
        (" ; ", "names none"),
        ("pp2 --num-layers 3", "--num-layers is no matter of a layout"),
        ("pp2 --nonsense 3", "unknown flag: --nonsense"),
        ("pp2 'open", "No closing quotation"),
    ],
)
def test_words_that_mean_nothing_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layouts(text, "test")
    assert said in str(caught.value)


def test_all_layouts_are_all() -> None:
    """Every (tp, cp, pp, dp) whose product is 2 to 6, found by trying; none twice."""
    found = all_layouts(6, num_layers=4)
    sizes = [(a.size("tp"), a.size("cp"), a.size("pp"), a.replicas) for a in found]
    numbers = range(1, 7)
    tried = {
        (tp, cp, pp, dp)
        for tp in numbers
        for cp in numbers
        for pp in numbers
        for dp in numbers
        if 2 <= tp * cp * pp * dp <= 6
    }
    assert set(sizes) == tried and len({one.text for one in found}) == len(found)
    for layout in found:
        assert parse_layout(layout.text, "test").world_size == layout.world_size
        chunks = layout.size("vpp")
        assert chunks == 1 or layout.size("pp") * chunks <= 4
    with_more = {one.text for one in found if one.values.get("sequence_parallel")}
    assert {"tp2 sp", "tp2 pp2 sp vpp2", "tp2 sp dp3"} <= with_more and "cp2 sp" not in with_more


def test_a_small_run_has_the_structure_of_the_large_one() -> None:
    config = small(LLAMA).on(parse_layout("tp2 sp pp2", "test"))
    model, attention = config.model, config.model.attention
    assert (attention.num_attention_heads, attention.num_query_groups) == (16, 4)  # 4 to 1, as 32/8
    assert model.num_layers == 8 and model.hidden_size == 16 * 4 == 16 * attention.kv_channels
    # 11008 / 4096 of 64, rounded up to what divides 11008 of 48.
    assert model.mlp.ffn_hidden_size == 176
    assert model.mlp.swiglu and not model.add_bias_linear and model.position.is_rotary
    assert model.position.rotary_base == 500000 and model.norm.normalization == "RMSNorm"
    assert model.untie_embeddings_and_output_weights and attention.window_size == (8, 0)
    assert config.data.seq_length == 32 and model.position.max_position_embeddings == 32
    assert config.optimizer.clip_grad == 0.5 and config.training.seed == 7
    assert config.precision.fp64 and not config.precision.bf16 and not config.checkpoint.save
    assert model.hidden_dropout == attention.attention_dropout == 0 and config.data.mock_data
    assert config.total_iterations == 3 and config.learning_schedule.warmup == 0
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert config.pipeline.num_layers_per_virtual_pipeline_stage is None


def test_rules_that_no_layout_can_be_compared_with_are_replaced_and_named() -> None:
    lion, layout = small(f"{LLAMA} --optimizer lion"), parse_layout("tp2", "test")
    assert lion.on(layout).optimizer.optimizer == "sgd"
    assert "--optimizer sgd (lion)" in lion.changes(layout)
    text = "--optimizer muon --muon-scalar-optimizer lion --muon-tp-mode blockwise"
    muon = small(f"{LLAMA} {text}")
    assert muon.on(layout).optimizer.rules == ("muon", "adam")
    assert muon.on(layout).optimizer.muon_tp_mode == "duplicated"
    assert "--muon-tp-mode duplicated (blockwise)" in muon.changes(layout)
    plain = " ".join(small(f"{LLAMA} --optimizer muon").changes(layout))
    assert "optimizer" not in plain and "muon" not in plain


def test_a_small_run_is_serial_unless_the_layout_says_otherwise() -> None:
    run, layout = small(LLAMA), parse_layout("tp2 sp pp2 cp2 dp3", "test")
    config, reference = run.on(layout), run.reference(layout)
    assert reference.process.world_size == 1 and config.process.world_size == 24
    for same in ("model", "optimizer", "data", "tokenizer", "schedule", "batch_sizes"):
        assert getattr(config, same) == getattr(reference, same)
    assert config.training.micro_batch_size == reference.training.micro_batch_size == 2


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--num-attention-heads 40 --hidden-size 5120", "num_attention_heads", 10),
        ("--num-attention-heads 12 --hidden-size 768", "num_attention_heads", 12),
        ("--num-attention-heads 71 --hidden-size 4544", "num_attention_heads", 1),
        ("--kv-channels 32", "kv_channels", 8),
        (f"--hidden-size 512 {ROPE} --rotary-percent 0.125", "kv_channels", 16),
        ("--window-size 3,-1", "window_size", (3, -1)),
        ("--num-layers 12 --no-rope-freq ([0]*6+[1]*6)", "no_rope_freq", (0,) * 6 + (1,) * 2),
        ("--num-layers 12 --window-size 4,0 --window-attn-skip-freq 12", "num_layers", 8),
        ("--seq-length 24 --max-position-embeddings 24", "seq_length", 24),
        ("--adam-eps 1e-8", "adam_eps", 1e-3),
        ("--overlap-grad-reduce", "ddp_bucket_size", 2000),
        (f"--multi-latent-attention {ROPE}", "qk_head_dim", 8),
    ],
)
def test_sizes_shrink_together(words: str, name: str, value: Any) -> None:
    config = small(f"{TINY} {words}").on(parse_layout("dp2", "test"))
    assert config.flatten()[name] == value


def test_a_sequence_divides_only_where_the_large_one_does() -> None:
    layout = parse_layout("cp3", "test")
    assert small(f"{TINY} {ROPE} --seq-length 96").on(layout).data.seq_length % 6 == 0
    with pytest.raises(UserError, match="--seq-length"):
        small(f"{TINY} {ROPE} --seq-length 64").on(layout)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("", "GPTModel"),
        ("--masked-words --bert-no-binary-head", "BertModel"),
        ("--masked-words", "BertModel"),
        ("--decoder-seq-length 8", "T5Model"),
    ],
)
def test_the_model_is_of_the_kind_that_the_flags_say(words: str, kind: str) -> None:
    case = tool.case(small(f"{TINY} {words}").on(parse_layout("dp2", "test")))
    vocabulary = resolve_vocabulary(case.config.tokenizer, case.vocabulary, 1)
    stages = make_stages(case.config.model.all_layers, 1)
    (model,) = case.program.build_model(case.config, Mesh.serial(), vocabulary, stages)
    assert type(model).__name__ == kind
    assert ("sentence_order" in case.samples[0]) == (words == "--masked-words")


def test_samples_are_functions_of_their_number() -> None:
    config = small(f"{TINY} --reset-attention-mask --eod-mask-loss").on(parse_layout("dp2", "test"))
    samples = tool.case(config).samples
    assert isinstance(samples, MadeUp) and len(samples) == config.total_samples == 3 * 4
    one, again, other = samples[3], tool.case(config).samples[3], samples[4]
    assert all((one[name] == again[name]).all() for name in one)
    assert (one["tokens"] != other["tokens"]).any()
    assert len({float(samples[i]["loss_mask"].sum()) for i in range(12)}) > 3
    assert any(len(samples[i]["cu_seqlens"]) > 2 for i in range(12))


def share(*pieces: Piece, losses: Any = (2.0,)) -> Share:
    shapes = {"w": (2, 2), "b": (2,)}
    bias = Piece("b", ((0, 2),), np.array([0.5, -1.0]))
    parts = [*pieces, bias]
    return Share(
        losses=[*losses], norms=[1.0], shapes=shapes, gradients=parts, weights=parts, traffic={}
    )


def rows(first: int, *values: list[float]) -> Piece:
    return Piece("w", ((first, first + len(values)), (0, 2)), np.array(values))


def test_boxes_are_joined() -> None:
    outcome = join([share(rows(0, [1.0, 2.0])), share(rows(1, [3.0, 4.0]))])
    assert outcome.gradients["w"].tolist() == [[1, 2], [3, 4]] and outcome.disagreement == 0
    assert outcome.weights["b"].tolist() == [0.5, -1.0]
    # The overlap of the second rank's box differs by 1/8, of a largest element of 4.
    both = [share(rows(0, [1.0, 2.0])), share(rows(0, [1.0, 2.125], [3.0, 4.0]))]
    assert join(both).disagreement == 0.125 / 4
    assert join([share(rows(0, [1.0, 2.0], [3.0, 4.0]), losses=(2.0,))] * 2).disagreement == 0
    apart = [share(rows(0, [1.0, 2.0])), share(rows(1, [3.0, 4.0]), losses=(2.5,))]
    assert join(apart).disagreement == 0.25
    with pytest.raises(AssertionError, match="w: no rank holds 2 of 4 elements"):
        join([share(rows(0, [1.0, 2.0]))])


def test_differences_are_relative_to_the_largest_element() -> None:
    reference = join([share(rows(0, [1.0, 2.0], [3.0, 4.0]))])

    def changed(**tensors: list[Any]) -> Outcome:
        arrays = {name: np.array(value, dtype=float) for name, value in tensors.items()}
        return replace(reference, gradients={**reference.gradients, **arrays})

    apart = compare(changed(w=[[1, 2], [3, 4.5]]), reference)
    assert apart.gradients == 0.125 and apart.weights == 0 and apart.worst == "gradient of w"
    assert not apart.are_equal and compare(reference, reference).are_equal
    assert compare(replace(reference, losses=[2.2]), reference).loss == pytest.approx(0.1)
    assert compare(changed(w=[[1, 2], [3, math.nan]]), reference).largest == math.inf
    assert not compare(replace(reference, losses=[math.nan]), reference).are_equal
    assert not compare(replace(reference, disagreement=1e-9), reference).are_equal
    # A tensor of nothing but rounding is compared on the scale of the others.
    noise = changed(b=[1e-18, 0])
    assert compare(changed(b=[0, 1e-18]), noise).gradients < 1e-11


class NoPool:
    """Stands where workers would be; `equality.run` is replaced too."""

    def __init__(self, preload: Any = ()) -> None: ...

    def __enter__(self) -> "NoPool":
        return self

    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[int, Outcome | Exception]:
    """Give the tool these outcomes, by world size."""
    found: dict[int, Outcome | Exception] = {}

    def run(pool: Any, one: Any, timeout: float) -> Outcome:
        world = one.config.process.world_size
        outcome = found.get(world, found[1])
        if isinstance(outcome, Exception):
            raise outcome
        return replace(outcome, traffic=tool.closed_form(one.config))

    monkeypatch.setattr(tool, "Pool", NoPool)
    monkeypatch.setattr(tool.equality, "run", run)
    found[1] = join([share(rows(0, [1.0, 2.0], [3.0, 4.0]))])
    return found


def test_a_row_for_each_layout(
    outcomes: dict[int, Outcome | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    serial = outcomes[1]
    assert isinstance(serial, Outcome)
    outcomes[3] = replace(serial, losses=[2.0 * (1 + 1e-9)])
    outcomes[4] = RankFailed("rank 2 of 4: it broke")
    words = [*TINY.split(), "--layouts"]
    assert tool.main([*words, "tp2 sp; dp8"]) == 0
    text = capsys.readouterr().out
    assert text.count("  equal\n") == 2 and "2 equal to 1e-10" in text
    assert "tp2 sp" in text and text.count("as the closed form") == 2 + 2
    assert "smaller than yours" not in text
    assert tool.main([*words, "dp3; tp2"]) == 1
    text = capsys.readouterr().out
    assert "1.0e-09" in text and "DIFFERS" in text and "1 equal to 1e-10, 1 not equal" in text
    assert tool.main([*words, "dp4; tp2"]) == 1
    assert "FAILED: rank 2 of 4: it broke" in capsys.readouterr().out


def test_all_leaves_out_what_does_not_fit(
    outcomes: dict[int, Outcome | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([*TINY.split(), "--all", "3"]) == 0
    text = capsys.readouterr().out
    assert "tp3" in text and "does not fit: --num-attention-heads (8)" in text
    assert "left out" in text and "[1/" in text


def test_bytes_are_shown_beside_the_closed_form() -> None:
    """Two replicas sum one bucket: 8 bytes for each of the gradients that both hold."""
    config = small(TINY).on(parse_layout("dp2", "test"))
    counted = tool.closed_form(config)
    (calls, size), rest = counted[0]["dp_cp", "all_reduce"], counted[1]
    lines = tool.traffic_lines(config, counted)
    assert lines[0].split() == [*f"dp_cp {2 * size:,} bytes".split(), *lines[0].split()[3:]]
    assert lines[0].endswith("as the closed form")
    counted[0] = {**counted[0], ("dp_cp", "all_reduce"): (calls, size - 8)}
    shown = tool.traffic_lines(config, [counted[0], rest])[0]
    assert f"{2 * size - 8:,} bytes" in shown and f"closed form: {2 * size:,} bytes" in shown
    assert shown.endswith("DIFFERS")


EXPERTS = f"{TINY} {ROPE} --num-experts 4 --moe-token-dispatcher-type alltoall"
DROPS = f"{EXPERTS} --moe-expert-capacity-factor 0.9"
SINKHORN = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn"
SPREAD = "dp2 --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("words", "layout", "key", "calls", "size", "said"),
    [
        (DROPS, SPREAD, ("etp_ep", "all_to_all"), 0, -8, "at most that: full experts drop choices"),
        (DROPS, SPREAD, ("etp_ep", "all_to_all"), 0, 8, "DIFFERS"),
        (DROPS, SPREAD, ("etp_ep", "all_to_all"), -1, -8, "DIFFERS"),
        (DROPS, SPREAD, ("etp_ep", "all_gather"), 0, -8, "DIFFERS"),
        (EXPERTS, SPREAD, ("etp_ep", "all_to_all"), 0, -8, "DIFFERS"),
        (SINKHORN, "cp2", ("cp", "all_reduce"), 3, 96, "at least that: nobody knows the rounds of"),
        (SINKHORN, "cp2", ("cp", "shift"), 0, 8, "DIFFERS"),
        (SINKHORN, "dp2", ("dp_cp", "all_reduce"), 1, 8, "DIFFERS"),
        (EXPERTS, "cp2", ("cp", "all_reduce"), 1, 8, "DIFFERS"),
    ],
)
def test_a_closed_form_that_is_a_bound_is_said_to_be_one(
    words: str, layout: str, key: tuple[str, str], calls: int, size: int, said: str
) -> None:
    config = small(words).on(parse_layout(layout, "test"))
    counted = tool.closed_form(config)
    before = counted[1].get(key, (0, 0))
    counted[1] = {**counted[1], key: (before[0] + calls, before[1] + size)}
    shown = {line.split()[0]: line for line in tool.traffic_lines(config, counted)}
    assert said in shown.pop(key[0])
    assert all(line.endswith("as the closed form") for line in shown.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{TINY}", "make no layout of several processes"),
        (f"{TINY} --layouts tp2 --all 2", "keep one"),
        (
            f"{TINY} --tensor-model-parallel-size 8 --context-parallel-size 4",
            "32 processes, more than 16: name a smaller one with the same words",
        ),
        (f"{TINY} --all 1", "--all (1) must be at least 2"),
        (f"{TINY} --all 99999999", "--all (99999999) must be at most 64"),
        (f"{TINY} --all many", "--all"),
        (f"{TINY} --all 2 --timeout inf", "--timeout (inf)"),
        (f"{TINY} --all 2 --timeout 0", "--timeout (0)"),
        (f"{TINY} --layouts tp3", "layout 'tp3' of the small run: --num-attention-heads (8)"),
        (f"{TINY} --layouts pp5", "--num-layers (4)"),
        (f"{TINY} --layouts zb", "'zb' means nothing"),
        ("--num-layers 2 --layouts tp2", "required but not given"),
        (f"{TINY} --no-such-flag 2 --layouts tp2", "unknown flag: --no-such-flag"),
    ],
)
def test_wrong_commands_are_refused(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        tool.main(words.split())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text", "world"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tp2 sp dp2", 4),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "pp2 vpp2 dp2",
            4,
        ),
        ("--context-parallel-size 8 --cp-comm-type a2a", "cp8 a2a dp2", 16),
        ("--overlap-grad-reduce", "overlap dp2", 2),
    ],
)
def test_without_layouts_the_flags_own_is_checked(words: str, text: str, world: int) -> None:
    options, rest = tool.read_options(f"{TINY} {words}".split())
    planned = tool.plan(read_settings(rest, "verify_layout"), options)
    assert [(one.text, one.world_size) for one in planned.layouts] == [(text, world)]


PP4 = "--pipeline-model-parallel-size 4"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


def planned_for(words: str) -> tool.Plan:
    options, rest = tool.read_options(f"{TINY} {words}".split())
    return tool.plan(read_settings(rest, "verify_layout"), options)


@pytest.mark.parametrize(
    ("words", "layers", "users"),
    [
        (f"{PP4} {FIRST} 7 {LAST} 7", (1, 2, 2, 1), "7 9 9 7"),
        (f"{PP4} {LAST} 2", (2, 2, 2, 1), "10 10 10 2"),
        (
            f"{PP4} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            (2, 3, 2, 1),
            "8 9 8 7",
        ),
        (
            f"{PP4} --pipeline-model-parallel-layout Et*9|(t*4|)*4,|t*6|tL",
            (4, 2, 2, 2, 2, 0, 3, 1),
            "9 4 4 4 4 0 6 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
            "--pipeline-model-parallel-layout Et*6|t*10|t*10|t*6L",
            (1, 2, 2, 1),
            "6 10 10 6",
        ),
    ],
)
def test_stages_of_a_small_run_differ_as_the_users(
    words: str, layers: tuple[int, ...], users: str
) -> None:
    planned = planned_for(f"--num-layers 32 {words}")
    (layout,) = planned.layouts
    config = planned.small.on(layout)
    assert tuple(len(stage.layers) for stage in config.stages) == layers
    assert f"layers of the stages {' '.join(map(str, layers))} ({users})" in planned.smaller
    assert f"--num-layers {sum(layers)} (32)" in planned.smaller
    assert planned.small.reference(layout).model.num_layers == sum(layers)
    assert config.placement.shape == ("v" if "zb-v" in words else "loop")
    # What the row is called by can be given as it is.
    assert parse_layout(layout.text, "test").num_layers == sum(layers)


def test_patterns_of_layers_are_cut_with_them() -> None:
    pattern = f"--no-rope-freq ([0]*20+[1]*12) {ROPE}"
    planned = planned_for(f"--num-layers 32 {pattern} {PP4} {FIRST} 2")
    config = planned.small.on(planned.layouts[0])
    assert config.model.num_layers == 7 and config.model.position.no_rope_freq == (0,) * 7


def test_numbers_of_microbatches_gradients_and_instances_follow() -> None:
    words = (
        f"--num-layers 32 {PP4} --num-layers-per-virtual-pipeline-stage 4 "
        "--microbatch-group-size-per-virtual-pipeline-stage 16 --overlap-grad-reduce "
        "--ddp-bucket-size 40000000 --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2"
    )
    planned = planned_for(words)
    config = planned.small.on(planned.layouts[0])
    assert config.pipeline.microbatch_group_size_per_vp_stage == 7
    assert config.replicas.ddp_bucket_size == 2000
    assert planned.layouts[0].replicas == 4 and not planned.left_out  # two of each instance
    assert planned.smaller[-2:] == [
        "--microbatch-group-size-per-virtual-pipeline-stage 7 (16)",
        "--ddp-bucket-size 2000 (40000000)",
    ]
    # Two instances of two replicas each would be 64 processes, and one of each is none.
    planned = planned_for(f"{words} --tensor-model-parallel-size 4")
    assert planned.layouts[0].replicas == 1
    assert planned.left_out == ("--num-distributed-optimizer-instances 2: one replica",)


@pytest.mark.parametrize(
    ("given", "layout", "sizes"),
    [
        ("2 4", "cp4", (2, 2)),
        ("4 2", "cp4", (4, 1)),
        ("4 2", "cp6", (2, 3)),
        ("2 4", "cp8", (2, 4)),
    ],
)
def test_two_levels_of_context_fit_the_layout(
    given: str, layout: str, sizes: tuple[int, int]
) -> None:
    words = (
        f"{TINY} {ROPE} --seq-length 96 --context-parallel-size 8 --cp-comm-type a2a+p2p "
        f"--hierarchical-context-parallel-sizes {given}"
    )
    config = small(words).on(parse_layout(layout, "test"))
    assert config.context.cp_comm_type == ("a2a+p2p",)
    assert config.context.hierarchical_context_parallel_sizes == sizes
    # A layout's own words say all of it.
    config = small(words).on(parse_layout(f"{layout} p2p", "test"))
    assert config.context.cp_comm_type == ("p2p",)


def test_a_run_that_fits_no_layout_is_no_success() -> None:
    one_head = "--num-layers 1 --hidden-size 32 --num-attention-heads 1 --seq-length 15 "
    one_head += "--micro-batch-size 1 --max-position-embeddings 15"
    layouts = [one for one in all_layouts(2, 1) if one.replicas == 1]
    check = tool.Check(NoPool(), small(one_head), 1.0, 5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no layout fits the run, so nothing was compared"):
        check.run(layouts, skips=True)


def test_help_lists_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "tpN cpN ppN dpN" in text and "--timeout" in text and "{" not in text
    kept = text.split("are kept", 1)[1]
    for flag in ("--tp-comm-overlap", "--cp-comm-type", "--overlap-grad-reduce"):
        assert f"    {flag}\n" in kept


def test_recomputation_and_offload_may_stand_behind_the_words() -> None:
    text = "tp2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (layout,) = parse_layouts(f"{text};", "test")
    assert layout.values["recompute_granularity"] == "full" and layout.world_size == 2
    with pytest.raises(UserError, match="--hidden-size is no matter of a layout"):
        parse_layouts("tp2 --hidden-size 4", "test")


def test_a_small_run_of_experts_has_some_that_are_chosen_by_score() -> None:
    run = small(
        f"{LLAMA} --num-experts 8 --moe-layer-freq [0]*30+[1]*2 --moe-n-hash-layers 31"
    ).reference(parse_layout("dp2", "test"))
    layers = run.model.num_layers
    assert run.model.moe.moe_layer_freq == (*[0] * (layers - 1), 1) and layers < 32
    assert run.model.router.moe_n_hash_layers == layers - 1
