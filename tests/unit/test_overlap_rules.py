"""What work beside travelling tokens needs: each refusal names flags, values and the way out."""

import pytest

from megatron.training.idle import without_effect
from tests.unit.test_rules import plan, refused

EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall --dry-run-world-size 4"
SPREAD = f"{EXPERTS} --expert-model-parallel-size 2 --global-batch-size 32"
COMBINED = "--overlap-moe-expert-parallel-comm"
PP2 = "--pipeline-model-parallel-size 2"
SHARED = "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 16"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (COMBINED, ("the model is dense", "give --num-experts")),
        (
            f"{EXPERTS} {COMBINED}",
            ("--expert-model-parallel-size is 1", "raise it, or drop the overlap"),
        ),
        (
            f"{SPREAD} {COMBINED} --moe-token-dispatcher-type allgather",
            (
                "--moe-token-dispatcher-type allgather",
                "choose --moe-token-dispatcher-type alltoall",
            ),
        ),
        *(
            (
                f"{SPREAD} {PP2} {COMBINED} --pipeline-schedule {name}",
                (f"--pipeline-schedule {name}", "use auto, 1f1b or interleaved"),
            )
            for name in ("gpipe", "zb-h1", "zb-v")
        ),
        (f"{SPREAD} {COMBINED} --pipeline-schedule gpipe", ("use auto, 1f1b or interleaved",)),
        (
            f"{SPREAD} {COMBINED} --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            ("--recompute-granularity full", "use --recompute-granularity selective"),
        ),
        (
            f"{SPREAD} {COMBINED} --recompute-granularity selective --recompute-modules moe",
            ("--recompute-modules moe", "recompute moe_act and shared_experts instead"),
        ),
        (
            f"{SPREAD} {COMBINED} --fine-grained-activation-offloading --offload-modules moe_act",
            ("activations in host memory", "drop one of the two"),
        ),
        (
            f"{SPREAD} {COMBINED} --data-parallel-sharding-strategy optim_grads_params "
            "--use-megatron-fsdp",
            ("--data-parallel-sharding-strategy optim_grads_params", "use optim"),
        ),
        (
            f"{SPREAD} --delay-wgrad-compute",
            ("--delay-wgrad-compute", f"tokens travel under {COMBINED}", "give that too"),
        ),
        (
            f"{SPREAD} --moe-shared-expert-overlap",
            ("--moe-shared-expert-overlap", "by --moe-shared-expert-intermediate-size"),
        ),
        (
            f"{SPREAD} {SHARED} --moe-token-dispatcher-type allgather",
            (
                "--moe-token-dispatcher-type allgather",
                "choose --moe-token-dispatcher-type alltoall",
            ),
        ),
    ],
)
def test_refused(text: str, parts: tuple[str, ...]) -> None:
    message = refused(text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "text",
    [
        f"{SPREAD} {COMBINED} --delay-wgrad-compute {SHARED}",
        f"{SPREAD} {COMBINED} {PP2} --num-virtual-stages-per-pipeline-rank 2",
        f"{SPREAD} {COMBINED} --recompute-activations --use-distributed-optimizer",
        f"{SPREAD} {SHARED} --recompute-granularity selective --recompute-modules moe",
    ],
)
def test_what_goes_together_has_an_effect(text: str) -> None:
    run = plan(text)
    notes = " ".join(without_effect(run.config, run.origins))
    assert "overlap" not in notes and "delay" not in notes


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            f"{SPREAD} {COMBINED} --delay-wgrad-compute --global-batch-size 8",
            f"{COMBINED} (an iteration has one microbatch)",
        ),
        (
            f"{SPREAD} {COMBINED} --delay-wgrad-compute --global-batch-size 8",
            "--delay-wgrad-compute (an iteration has one microbatch)",
        ),
        (
            f"{EXPERTS} {SHARED}",
            "--moe-shared-expert-overlap (every rank holds all experts)",
        ),
    ],
)
def test_what_has_none_is_named(text: str, note: str) -> None:
    run = plan(text)
    assert note in without_effect(run.config, run.origins)
