"""Rules across configs: each refuses what it is about, names flags and values, and nothing else."""

from collections.abc import Sequence

import pytest

from megatron.core.optimizer.schedule import Progress
from megatron.core.utils import UserError, divisors
from megatron.training import device_choices, wording
from megatron.training.arguments import ParsedRun, parse
from megatron.training.config import RunConfig

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data"
)
DRY = f"{BASE} --dry-run --train-iters 10"


def plan(text: str, base: str = DRY) -> ParsedRun[RunConfig]:
    return parse(f"{base} {text}".split())


def refused(text: str, base: str = DRY) -> str:
    with pytest.raises(UserError) as caught:
        plan(text, base)
    return str(caught.value)


def test_env_06_every_factor_is_named_with_its_flag_and_origin() -> None:
    message = refused(
        "--dry-run-world-size 4 --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --num-experts 4"
    )
    assert "--expert-tensor-parallel-size 2 (flag)" in message
    assert "--expert-model-parallel-size 2 (flag)" in message
    assert "--pipeline-model-parallel-size 2 (flag)" in message
    assert "4 processes" in message and "multiple of 8" in message and "1, 2, 4" in message
    derived = refused(
        "--dry-run-world-size 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
        "--num-experts 4"
    )
    assert "--expert-tensor-parallel-size 2 (derived)" in derived


def test_env_06_the_dense_product_too() -> None:
    message = refused("--dry-run-world-size 6 --tensor-model-parallel-size 4")
    assert "--tensor-model-parallel-size 4 (flag)" in message
    assert "--context-parallel-size 1 (default)" in message and "such as 4 or 8" in message


def test_env_07_a_dense_model_needs_no_sequence_parallelism() -> None:
    plan("--dry-run-world-size 2 --tensor-model-parallel-size 2")
    # Nor does one with experts here, whose tokens are cut over the ranks for them alone.
    plan("--dry-run-world-size 2 --tensor-model-parallel-size 2 --num-experts 4")


@pytest.mark.parametrize(("ranks", "said"), [(3, "size 2 or 4"), (16, "size 8")])
def test_experts_are_shared_out_before_processes_are_counted(ranks: int, said: str) -> None:
    """What "start a multiple of 3 processes" would lead to is refused again."""
    words = f"--dry-run-world-size 8 --num-experts 8 --expert-model-parallel-size {ranks}"
    message = refused(words)
    assert f"try --expert-model-parallel-{said}" in message and "cannot hold" not in message


def test_expert_parallelism_needs_experts() -> None:
    layout = "--dry-run-world-size 2 --expert-model-parallel-size 2"
    assert "dense" in refused(layout)
    plan(f"{layout} --num-experts 4")
    assert "try --expert-model-parallel-size 1" in refused(f"{layout} --num-experts 3")
    tensors = "--expert-tensor-parallel-size 2 --dry-run-world-size 2 --num-experts 4"
    assert "or --expert-tensor-parallel-size 1" in refused(f"{tensors} --moe-ffn-hidden-size 9")
    assert "2 processes" in refused(
        "--dry-run-world-size 2 --expert-model-parallel-size 4 --num-experts 4"
    )


@pytest.mark.parametrize(
    "stages", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6, 7, 8))]
)
def test_par_02_all_layers_are_there_or_the_run_is_refused(stages: int) -> None:
    from megatron.training.plan.report import report

    for layers in range(1, 41):
        text = (
            f"--num-layers {layers} --dry-run-world-size {stages} "
            f"--pipeline-model-parallel-size {stages} --vocab-size 100"
        )
        if layers < stages:
            assert "--num-layers" in refused(text)
            continue
        line = next(x for x in report(plan(text), "p").splitlines() if "layers per stage" in x)
        counts = [int(word) for word in line.partition(":")[2].partition("=")[0].split()]
        assert len(counts) == stages and sum(counts) == layers and max(counts) - min(counts) <= 1


def test_par_03_a_count_for_the_last_stage_is_not_taken_for_the_model() -> None:
    message = refused("--num-layers 20 --decoder-last-pipeline-num-layers 1")
    assert "--decoder-last-pipeline-num-layers (1)" in message
    assert "--pipeline-model-parallel-size of at least 2" in message
    split = plan(
        "--num-layers 20 --decoder-last-pipeline-num-layers 1 --pipeline-model-parallel-size 2 "
        "--dry-run-world-size 2"
    ).config
    assert split.model.num_layers == 20
    assert [len(stage.layers) for stage in split.stages] == [19, 1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("--num-attention-heads 7", ("--hidden-size (64)", "4 or 8 heads")),
        (
            "--dry-run-world-size 3 --tensor-model-parallel-size 3",
            ("--num-attention-heads (8)", "size 2 or 4"),
        ),
        (
            "--group-query-attention --num-query-groups 2 --num-attention-heads 8 "
            "--dry-run-world-size 8 --tensor-model-parallel-size 8 --ffn-hidden-size 100",
            ("--ffn-hidden-size (100, flag)", "96 or 104"),
        ),
        (
            "--dry-run-world-size 2 --tensor-model-parallel-size 2 --padded-vocab-size 101",
            ("--padded-vocab-size (101)", "100 or 102"),
        ),
        (
            "--seq-length 30 --dry-run-world-size 4 --context-parallel-size 4",
            ("--seq-length (30)", "24 or 32"),
        ),
        (
            "--seq-length 30 --dry-run-world-size 4 --tensor-model-parallel-size 4 "
            "--sequence-parallel",
            ("--seq-length (30)", "--sequence-parallel", "28 or 32"),
        ),
        (
            "--position-embedding-type rope --rotary-percent 0.4",
            ("--rotary-percent (0.4)", "--kv-channels (8, derived)", "makes 3"),
        ),
        (
            "--position-embedding-type yarn --rotary-percent 0.1",
            ("--rotary-percent (0.1)", "makes 0"),
        ),
        ("--max-position-embeddings 16", ("--max-position-embeddings (16)", "32")),
        ("--global-batch-size 5", ("--global-batch-size (5)", "2 = ", "try 4 or 6")),
        (
            "--global-batch-size 1 --decrease-batch-size-if-needed",
            ("--global-batch-size (1)", "less than 2"),
        ),
        (
            "--rampup-batch-size 2 3 10 --global-batch-size 12",
            ("from 2", "--global-batch-size 11 or 14"),
        ),
        ("--rampup-batch-size 3 3 10 --global-batch-size 12", ("divisible by 2", "2 or 4")),
        ("--rampup-batch-size 16 2 10 --global-batch-size 12", ("(12)",)),
        ("--rampup-batch-size 2 0 10 --global-batch-size 4", ("at least 1",)),
        (
            "--rampup-batch-size 2 2 10 --step-batch-size-schedule 0:2",
            ("--rampup-batch-size", "--step-batch-size-schedule"),
        ),
        ("--step-batch-size-schedule 0:3", ("size 3", "2 or 4")),
        (
            "--step-batch-size-schedule 0:2,1K:4 --global-batch-size 8",
            ("--global-batch-size (8)", "(4)"),
        ),
        ("--step-batch-size-schedule 5:2", ("start at 0",)),
        ("--step-batch-size-schedule 0:2,3X:4", ("'3X'",)),
        ("--train-samples 10", ("--train-iters (10)", "--train-samples (10)")),
        ("--lr-warmup-iters 10", ("--lr-warmup-iters", "10 iterations")),
        ("--lr-warmup-samples 5", ("--lr-warmup-samples (5)", "--train-iters")),
        ("--lr-decay-style WSD", ("--lr-wsd-decay-iters",)),
        ("--ckpt-step 3", ("--ckpt-step (3)", "--load")),
        ("--exit-on-missing-checkpoint", ("--load",)),
        ("--profile --profile-ranks 0 4", ("--profile-ranks", "4", "0 to 0")),
        ("--profile --device cpu", ("--profile", "add --use-pytorch-profiler")),
        ("--record-memory-history --device cpu", ("leave it out, or use --log-memory-interval",)),
        (
            "--use-torch-fsdp2 --dry-run-world-size 4 --pipeline-model-parallel-size 2",
            (
                "--use-torch-fsdp2 does not go with --pipeline-model-parallel-size (2)",
                "use --use-megatron-fsdp",
                "this works: --pipeline-model-parallel-size 1",
            ),
        ),
        (
            "--use-torch-fsdp2 --dry-run-world-size 2 --optimizer muon",
            ("--optimizer muon needs whole ones", "use --use-distributed-optimizer"),
        ),
        (
            "--use-torch-fsdp2 --dry-run-world-size 2 --bf16 --use-precision-aware-optimizer "
            "--main-grads-dtype bf16",
            ("--main-grads-dtype bf16 does not go with --use-torch-fsdp2", "--use-megatron-fsdp"),
        ),
        (
            "--use-torch-fsdp2 --dry-run-world-size 2 --bf16 --use-precision-aware-optimizer "
            "--main-params-dtype fp16",
            ("--main-params-dtype fp16 does not go with --use-torch-fsdp2",),
        ),
        (
            "--use-torch-fsdp2 --dry-run-world-size 2 --num-experts 4",
            ("--use-torch-fsdp2 knows", "(--num-experts 4) have their own", "use --use-megatron-f"),
        ),
        (
            "--use-torch-fsdp2 --use-megatron-fsdp",
            ("--use-torch-fsdp2 and --use-megatron-fsdp", "drop one"),
        ),
        (
            "--use-torch-fsdp2 --data-parallel-sharding-strategy optim",
            ("--data-parallel-sharding-strategy optim does not", "--use-megatron-fsdp in place"),
        ),
    ],
)
def test_what_does_not_fit_is_named(text: str, parts: tuple[str, ...]) -> None:
    message = refused(text)
    for part in parts:
        assert part in message, message


def test_a_run_has_a_length_and_a_rate() -> None:
    assert "--train-iters" in refused("", base=f"{BASE} --dry-run")
    without = BASE.replace("--lr 1e-3", "")
    assert "--lr" in refused("--train-iters 5 --dry-run", base=without)
    plan("--skip-train --dry-run", base=without)


@pytest.mark.parametrize(
    "text",
    [
        "--kv-channels 10 --num-attention-heads 7",
        "--kv-channels 10 --num-attention-heads 7 --rotary-percent 0.5",
        "--max-position-embeddings 16 --position-embedding-type rope",
        "--global-batch-size 5 --decrease-batch-size-if-needed",
        "--rampup-batch-size 2 2 10 --global-batch-size 6",
        "--rampup-batch-size 3 3 10 --global-batch-size 12 --decrease-batch-size-if-needed",
        "--step-batch-size-schedule 0:2,1K:4",
        "--dry-run-world-size 8 --tensor-model-parallel-size 8 --group-query-attention "
        "--num-query-groups 2",
        "--dry-run-world-size 3 --pipeline-model-parallel-size 3",
        "--dry-run-world-size 16 --tensor-model-parallel-size 2 --context-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 2",
        "--profile-ranks 5",
        "--transformer-impl transformer_engine --distributed-backend nccl --use-flash-attn",
    ],
)
def test_what_fits_is_planned(text: str) -> None:
    plan(text)


def test_a_run_of_several_processes_takes_them_from_the_launcher() -> None:
    words = f"{BASE} --train-iters 10".split()
    assert parse(words, world_size=2).config.data_parallel_size == 2
    config = parse([*words, "--tensor-model-parallel-size", "2"], world_size=2).config
    assert (config.process.world_size, config.data_parallel_size) == (2, 1)
    with pytest.raises(UserError, match="1 process cannot hold.*torchrun --nproc-per-node 2"):
        parse([*words, "--tensor-model-parallel-size", "2"], world_size=1)


def test_a_run_needs_data_and_a_plan_does_not() -> None:
    without = BASE.replace("--mock-data", "--train-iters 10")
    assert "--data-path" in refused("", base=without)
    plan("--dry-run", base=without)


def test_lr_05_lengths_in_iterations_hold_under_ramp_up() -> None:
    config = plan(
        "--micro-batch-size 8 --global-batch-size 16 --rampup-batch-size 8 8 160 --train-iters 100 "
        "--lr-warmup-iters 10 --lr-decay-style WSD --lr-wsd-decay-iters 20 --min-lr 1e-4 "
        "--lr-wsd-decay-style linear"
    ).config
    schedule, sizes = config.learning_schedule, config.batch_sizes
    # 20 iterations of 8, then 80 of 16.
    assert [sizes.samples(n) for n in (0, 1, 20, 21, 100)] == [0, 8, 160, 176, 1440]
    assert config.total_iterations == 100 and config.total_samples == 1440

    def rate(iteration: int) -> float:
        return schedule.learning_rate(Progress(iteration, sizes.samples(iteration)))

    assert rate(9) < rate(10) == 1e-3 == rate(80) > rate(81)
    assert rate(100) == pytest.approx(1e-4, rel=1e-12)


def test_muon_beside_units_of_their_own_is_warned_of() -> None:
    muon = "--train-iters 10 --optimizer muon --dry-run-world-size 4 --global-batch-size 32"
    for strategy, warned in (("optim", False), ("optim_grads", True), ("optim_grads_params", True)):
        said = plan(f"{muon} --data-parallel-sharding-strategy {strategy}").reports
        assert any("largest matrix" in text for text in said) == warned
    alone = plan("--train-iters 10 --optimizer muon --use-megatron-fsdp").reports
    assert not any("largest matrix" in text for text in alone)


def test_lr_07_a_fraction_is_of_the_decay() -> None:
    config = plan("--train-iters 350 --lr-warmup-fraction 0.1").config
    rates = [config.learning_schedule.learning_rate_at(n) for n in range(351)]
    rising = sum(later > earlier for earlier, later in zip(rates, rates[1:], strict=False))
    assert rising == 35


def test_device_cpu_maps_what_only_exists_on_cuda() -> None:
    text = "--transformer-impl transformer_engine --distributed-backend nccl --use-flash-attn"
    run = plan(f"{text} --device cpu")
    assert run.config.process.distributed_backend == "gloo"
    assert run.config.model.transformer_impl == run.config.model.attention_backend == "auto"
    line = next(line for line in run.reports if "--device cpu" in line)
    for flag in ("nccl", "transformer_engine", "flash"):
        assert flag in line
    device_choices.check_device(run.config, cuda_is_available=False)


def test_without_device_cpu_they_are_an_error_where_there_is_no_cuda() -> None:
    config = plan("--distributed-backend nccl").config
    device_choices.check_device(config, cuda_is_available=True)
    with pytest.raises(UserError, match="--distributed-backend nccl.*--device cpu"):
        device_choices.check_device(config, cuda_is_available=False)
    with pytest.raises(UserError, match="--device cuda"):
        device_choices.check_device(plan("--device cuda").config, cuda_is_available=False)
    streams = "--dry-run-world-size 2 --high-priority-stream-groups tp dp"
    with pytest.raises(UserError, match="--high-priority-stream-groups tp dp.*--device cpu"):
        device_choices.check_device(plan(streams).config, cuda_is_available=False)
    for harmless in ("--device cpu", "--distributed-backend gloo", "--dry-run-world-size 1"):
        device_choices.check_device(plan(f"{streams} {harmless}").config, cuda_is_available=False)
    device_choices.check_device(plan("").config, cuda_is_available=False)


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("--save-interval 10", "--save-interval (no --save)"),
        (
            "--num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage (--pipeline-model-parallel-size is 1)",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 3",
            "--num-virtual-stages-per-pipeline-rank (--pipeline-model-parallel-size is 1)",
        ),
        (
            "--pipeline-model-parallel-layout Ett|ttL",
            "--pipeline-model-parallel-layout (--pipeline-model-parallel-size is 1)",
        ),
        ("--pipeline-schedule zb-v", "--pipeline-schedule (--pipeline-model-parallel-size is 1)"),
        ("--no-overlap-p2p-communication", "--overlap-p2p-communication (--pipeline"),
        ("--account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split (--pipe"),
        ("--cp-comm-type a2a", "--cp-comm-type (--context-parallel-size is 1)"),
        (
            "--hierarchical-context-parallel-sizes 2 2",
            "--hierarchical-context-parallel-sizes (--context-parallel-size is 1)",
        ),
        (
            "--hierarchical-context-parallel-sizes 3 2 --dry-run-world-size 2 "
            "--context-parallel-size 2",
            "--hierarchical-context-parallel-sizes (--cp-comm-type is not a2a+p2p)",
        ),
        (
            "--attention-backend unfused --dry-run-world-size 2 --context-parallel-size 2",
            "--attention-backend (--cp-comm-type p2p has a kernel of its own)",
        ),
        ("--overlap-grad-reduce", "--overlap-grad-reduce (there is one replica)"),
        ("--ddp-bucket-size 8", "--ddp-bucket-size (there is one replica)"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 (there is one replica)"),
        (
            "--use-torch-fsdp2 --dry-run-world-size 2 --overlap-param-gather",
            "--overlap-param-gather (with --use-torch-fsdp2 torch overlaps",
        ),
        (
            "--torch-fsdp2-no-reshard-after-forward --dry-run-world-size 2",
            "--torch-fsdp2-reshard-after-forward (no --use-torch-fsdp2)",
        ),
        ("--distributed-timeout-minutes 20", "--distributed-timeout-minutes (there is one process"),
        ("--tp-comm-overlap", "--tp-comm-overlap (--tensor-model-parallel-size is 1)"),
        (
            "--tp-comm-overlap --dry-run-world-size 2 --tensor-model-parallel-size 2",
            "--tp-comm-overlap (no --sequence-parallel)",
        ),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 4 --dry-run-world-size 2 "
            "--pipeline-model-parallel-size 2",
            "--microbatch-group-size-per-virtual-pipeline-stage (there is one stage per rank)",
        ),
        ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping (--pipeline-model-parallel-size is 1)"),
        (
            "--high-priority-stream-groups tp --dry-run-world-size 2 --device cpu",
            "--high-priority-stream-groups (with --device cpu NCCL is not used)",
        ),
        (
            "--flight-recorder-dump-path x --dry-run-world-size 2 --distributed-backend gloo",
            "--flight-recorder-dump-path (--distributed-backend is gloo)",
        ),
        (
            "--flight-recorder-trace-buffer-size 9 --dry-run-world-size 2",
            "--flight-recorder-trace-buffer-size (no --flight-recorder-dump-path)",
        ),
        (
            "--high-priority-stream-groups tp gtp_remat --dry-run-world-size 2",
            "--high-priority-stream-groups: gtp_remat (nothing is communicated",
        ),
        ("--sequence-parallel", "--sequence-parallel"),
        ("--manual-gc-interval 5", "--manual-gc-interval"),
        ("--finetune", "--finetune (no --load)"),
        ("--rotary-percent 0.5", "--rotary-percent (--position-embedding-type is learned_abs"),
        ("--no-rope-freq 2", "--no-rope-freq (--position-embedding-type is learned_absolute)"),
        ("--yarn-mscale 2 --position-embedding-type rope", "--yarn-mscale (--position-embedding"),
        ("--rope-scaling-factor 4 --position-embedding-type rope", "--rope-scaling-factor (no --"),
        (
            "--use-rope-scaling --position-embedding-type yarn",
            "--use-rope-scaling (--position-embedding-type is yarn)",
        ),
        (
            "--rotary-seq-len-interpolation-factor 2 --position-embedding-type yarn",
            "--rotary-seq-len-interpolation-factor (--position-embedding-type is yarn)",
        ),
    ],
)
def test_settings_that_change_nothing_are_listed(text: str, idle: str) -> None:
    assert any(note.startswith(idle) for note in plan(text).no_effect)


def test_settings_that_count_are_not_listed() -> None:
    run = plan("--save-interval 10 --save x --manual-gc --manual-gc-interval 5 --finetune --load y")
    assert run.no_effect == ()
    rotary = "--rotary-base 500 --rotary-percent 0.5 --no-rope-freq 2 --position-embedding-type"
    assert plan(f"{rotary} yarn --yarn-mscale 2").no_effect == ()
    layout = (
        "--dry-run-world-size 16 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --use-tp-pp-dp-mapping "
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved "
        "--microbatch-group-size-per-virtual-pipeline-stage 2 --cp-comm-type a2a "
        "--attention-backend unfused --overlap-grad-reduce --ddp-num-buckets 2 --tp-comm-overlap "
        "--distributed-timeout-minutes 20 --high-priority-stream-groups tp "
        "--flight-recorder-dump-path x --flight-recorder-include-stack-trace"
    )
    assert plan(layout).no_effect == ()
    shared = "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --dry-run-world-size 4"
    assert plan(f"{shared} --num-distributed-optimizer-instances 2").no_effect == ()
    scaled = "--use-rope-scaling --rope-scaling-factor 4 --rotary-seq-len-interpolation-factor 2"
    assert plan(f"{rotary} rope {scaled}").no_effect == ()


def test_uneven_masks_are_warned_of_once_unless_the_objective_is_chosen() -> None:
    for program, words in (
        ("pretrain_gpt", "--eod-mask-loss"),
        ("pretrain_t5", "--decoder-seq-length 8"),
        ("pretrain_bert", "--masked-words"),
    ):

        def reports(more: str, program: str = program, words: str = words) -> Sequence[str]:
            return parse(f"{DRY} {words} {more}".split(), program).reports

        warned = reports("")
        (line,) = (one for one in warned if "--no-calculate-per-token-loss" in one)
        assert words.partition(" ")[0] in line and "(--calculate-per-token-loss)" in line
        for chosen in ("--calculate-per-token-loss", "--no-calculate-per-token-loss"):
            assert not any("-per-token-loss" in one for one in reports(chosen))
    assert not plan("").reports


def test_nearest_choices() -> None:
    assert wording.nearest_multiples(5, 4) == "4 or 8"
    assert wording.nearest_multiples(3, 4) == "4"
    assert wording.nearest_of([1, 2, 4, 8], 3) == "2 or 4"
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_final_fall_that_begins_in_the_warm_up_is_warned_of() -> None:
    wsd = "--lr-warmup-iters 4 --lr-decay-style WSD --lr-wsd-decay-iters"
    (line,) = plan(f"{wsd} 7").reports
    assert line.startswith("warning: the final fall of WSD (7 iterations)") and "(10)" in line
    assert plan(f"{wsd} 6").reports == ()


SCATTERED = "--ddp-reduce-scatter-with-fp32-accumulation"
LOCAL = "--ddp-param-name-patterns-for-fp32-local-accumulation"


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        (f"--bf16 --grad-reduce-in-bf16 {SCATTERED}", "--grad-reduce-in-bf16"),
        (
            f"--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32 {SCATTERED}",
            "--grad-reduce-in-bf16",
        ),
        (f"--bf16 --grad-reduce-in-bf16 {LOCAL} *.mlp.*", "--accumulate-allreduce-grads-in-fp32"),
        (
            f"--fp16 --no-accumulate-allreduce-grads-in-fp32 {SCATTERED}",
            "--accumulate-allreduce-grads-in-fp32",
        ),
        (
            f"--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 {LOCAL} all",
            "--main-grads-dtype",
        ),
    ],
)
def test_sums_in_half_are_refused_where_fp32_is_asked_for(text: str, way_out: str) -> None:
    asked = SCATTERED if SCATTERED in text else LOCAL
    dtype = "bfloat16" if "--bf16" in text else "float16"
    with pytest.raises(UserError, match=f"{asked} is not built.* in {dtype} .*{way_out}"):
        plan(text)


@pytest.mark.parametrize("text", ["", "--fp64", "--bf16", "--fp16"])
def test_fp32_sums_where_they_are_fp32_anyway_are_listed(text: str) -> None:
    dtype = "float64" if "64" in text else "float32"
    two = "--dry-run-world-size 2"
    scattered, local = plan(f"{text} {two} {SCATTERED} {LOCAL} all").no_effect
    assert scattered == f"{SCATTERED} (gradients are summed in {dtype})"
    assert local == f"{LOCAL} (gradients add up in {dtype})"
    fine = "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32"
    assert plan(f"{fine} {two} {LOCAL} all").no_effect == (
        f"{LOCAL} (gradients add up in float32)",
    )
