"""torch's fully_shard in place of our own sharding: what is whole when, what is kept, what is read.

That layouts train as one process does is in `test_layouts` and `test_strategies`, the closed form
of the traffic in `test_traffic`, checkpoints across layouts in `test_checkpoints`.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pretrain_gpt
from megatron.core import rng, sharding
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.layout import unit_of
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.models import base, gpt
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import WholeLinear, without_memory
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.transformer.config import TransformerConfig
from megatron.training import arguments, build
from megatron.training.plan.memory import MemoryPlan
from megatron.training.processes import setup
from megatron.training.replica_check import ReplicaCheck
from megatron.training.verification import equality
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import Outcome, Share, compare, join
from megatron.training.verification.small_run import SmallRun
from tests.distributed.test_sharded import LAYERS, WIDTH, Layer, Model, iterate, positions
from tests.harness import Pool
from tests.programs import launch
from tools.verify_layout import case

CPU = torch.device("cpu")
FLAG = "--use-torch-fsdp2"


def optimizer_of(model: nn.Module, **settings: Any) -> Optimizer:
    return build_optimizer(
        OptimizerConfig.resolve(optimizer="sgd", clip_grad=0.0),
        [model],
        Mesh.create(ParallelConfig.resolve(), CPU),
        PrecisionConfig.resolve(fp64=True),
        DataParallelConfig.resolve(**{"use_torch_fsdp2": True, **settings}),
    )


def alive(rank: int, settings: dict[str, Any]) -> dict[str, int]:
    """Return the most layers that were whole at once in each pass, and how many are afterwards."""
    # The layers tell "between" when their backward has used their weights.
    model, most = Model(), {"forward": 0, "between": 0}
    optimizer = optimizer_of(model, **settings)
    layers = [layer for layer in model.layers.values() if isinstance(layer, Layer)]

    def whole() -> int:
        return sum(not isinstance(layer.linear.weight, DTensor) for layer in layers)

    def look(text: str) -> None:
        kind = text.split()[0]
        if kind in most:
            most[kind] = max(most[kind], whole())

    for layer in layers:
        layer.tell = look
    iterate(model, optimizer, rank)
    most["after training"] = whole()
    model(torch.ones(1, 1, WIDTH, dtype=torch.float64, requires_grad=True))
    most["after a forward"] = whole()
    optimizer.data_parallel.settle()
    return most | {"settled": whole()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 0, 0, 0]),
        ({"torch_fsdp2_reshard_after_forward": False}, [LAYERS] * 2 + [0, 4, 0]),
    ],
    ids=["given up", "kept"],
)
def test_units_are_whole_while_they_compute(
    pool: Pool, settings: dict[str, Any], expected: list[int]
) -> None:
    assert [[*found.values()] for found in pool.run(2, alive, settings)] == [expected] * 2


def events(rank: int) -> list[str]:
    model = Model()
    optimizer = optimizer_of(model)
    iterate(model, optimizer, rank)
    return iterate(model, optimizer, rank)


def test_a_units_gradients_are_summed_when_its_backward_ends(pool: Pool) -> None:
    for found in pool.run(2, events):
        gathers, sums = positions(found, "all_gather"), positions(found, "reduce_scatter")
        assert len(gathers) == 2 * LAYERS and len(sums) == LAYERS
        for number, start in enumerate(sums):
            assert start > found.index(f"backward {LAYERS - 1 - number}")
            if number < LAYERS - 1:
                assert start < found.index(f"backward {LAYERS - 2 - number}")
        # The next unit is gathered ahead in backward.
        assert gathers[LAYERS] < gathers[LAYERS + 1] < found.index("between") < sums[0]


class Odd(nn.Module):
    """Matrices of 3, 5 and 1 rows, which four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3, 4), (5, 3), (1, 5)]
        init = Init("normal", 0.5)
        self.layers = nn.ModuleDict(
            {
                str(number): WholeLinear(shape, init, Mesh.serial(), torch.float64)
                for number, shape in enumerate(shapes)
            }
        )
        sharding.name_parameters(self)
        rng.initialize(self, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def odd_rows(rank: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train on uneven rows; return the weights, and the rows of each that this rank keeps."""
    model = Odd()
    optimizer = optimizer_of(model, **settings)
    replicas, norms = optimizer.data_parallel, []
    for number in range(3):
        optimizer.zero_grad()
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(100 * number + 10 * microbatch + rank)
            x = torch.randn(2, 1, 4, generator=generator, dtype=torch.float64)
            replicas.begin(0, "backward", microbatch == 1)
            model(x.requires_grad_()).square().sum().backward()
            replicas.finish(0, "backward", microbatch == 1)
        replicas.reduce_gradients()
        norms.append(float(optimizer.step(1.0, lr=0.1, weight_decay=0.1).grad_norm))
    kept = {
        member.record.name: (member.stop - member.start) // member.shape[1]
        for member, _ in replicas.weights()
    }
    found = {sharding.of(p).name: p.detach().clone() for p in replicas.whole_parameters()}
    return found | {"norms": torch.tensor(norms, dtype=torch.float64)}, kept


def test_rows_that_ranks_do_not_divide(pool: Pool) -> None:
    ours = pool.run(4, odd_rows, {"use_torch_fsdp2": False})
    rows = []
    for (expected, _), (found, kept) in zip(ours, pool.run(4, odd_rows, {}), strict=True):
        rows.append([kept.get(f"layers.{number}.weight", 0) for number in range(3)])
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-13, atol=0)
    assert rows == [[1, 2, 1], [1, 2, 0], [1, 1, 0], [0, 0, 0]]


def late_values(rank: int) -> tuple[int, int, bool]:
    """Build a model without memory; return how many units had some at once, and of how many."""
    config = TransformerConfig.resolve(
        num_layers=3, hidden_size=16, num_attention_heads=2, max_position_embeddings=8
    )
    mesh, there = Mesh.create(ParallelConfig.resolve(), CPU), []

    def built(model: gpt.GPTModel) -> list[Tensor]:
        def fill(parameter: nn.Parameter) -> None:
            alone = [p for p in model.parameters() if not isinstance(p, DTensor) and p.numel()]
            there.append({unit_of(sharding.of(p).name) for p in alone if sharding.is_there(p)})
            rng.fill(parameter, 1)

        replicas = DataParallelConfig.resolve(use_torch_fsdp2=True)
        precision = PrecisionConfig.resolve(fp64=True)
        optimizer = build_optimizer(
            OptimizerConfig.resolve(), [model], mesh, precision, replicas, fill=fill
        )
        return [p.detach().clone() for p in optimizer.data_parallel.whole_parameters()]

    early = gpt.GPTModel(config, mesh, vocab_size=6, dtype=torch.float64)
    rng.initialize(early, 1)
    models = [early]
    with without_memory():
        models.append(gpt.GPTModel(config, mesh, vocab_size=6, dtype=torch.float64))
    first, second = map(built, models)
    equal = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return max(map(len, there)), len(set.union(*there)), equal


def test_weights_may_have_no_memory_until_their_values_are_drawn(pool: Pool) -> None:
    """Three layers, the last norm, and the embedding with the head that is tied to it."""
    assert pool.run(2, late_values) == [(1, 5, True)] * 2


RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --train-iters 2 --device cpu --global-batch-size 4 --eval-iters 0 "
    "--log-interval 1 --num-workers 0 --attention-dropout 0 --hidden-dropout 0"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
SCALED = (
    "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 "
    # Widths that 64 does not divide, so that rows of a rank end where they will.
    "--hidden-size 20 --ffn-hidden-size 42"
)
LAYOUTS = {
    "dp2": (2, ""),
    "dp3 bf16": (3, "--bf16 --global-batch-size 6 --untie-embeddings-and-output-weights"),
    "dp2 fp16 sgd": (2, "--fp16 --optimizer sgd"),
    "dp2 moments": (2, "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"),
    "dp3 moments with scales": (3, f"{SCALED} --global-batch-size 6"),
    "dp3 moments with scales on the host": (
        3,
        f"{SCALED} --global-batch-size 6 --optimizer-cpu-offload --optimizer-offload-fraction 0.4",
    ),
    "dp2 host": (2, "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    "tp2 dp2": (4, f"--bf16 {TP2} --group-query-attention --num-query-groups 1"),
    "dp4 in two": (4, "--num-distributed-optimizer-instances 2 --bf16"),
}


def built(world: int, words: str) -> tuple[Optimizer, dict[str, int]]:
    """Return the optimizer of a run, and the bytes that its plan says it holds."""
    config = arguments.parse(f"{RUN} {FLAG} {words}".split(), world_size=world).config
    mesh = setup.connected_mesh(config, CPU)
    vocabulary = resolve_vocabulary(config.tokenizer, 61, mesh.tp.size)
    chunks = build.build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    optimizer = build.build_run_optimizer(config, chunks, mesh)
    (planned,) = MemoryPlan(config, vocabulary.padded_rows).ranks()
    return optimizer, planned.fixed


def held(rank: int, world: int, words: str) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Return bytes as counted and as planned, and of the tensors that torch keeps."""
    optimizer, planned = built(world, words)
    parameters = optimizer.data_parallel.parameters
    weights, gradients = 0, set()
    for parameter in parameters:
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        weights += parameter.to_local().untyped_storage().nbytes()
        gradients.add(parameter.grad.to_local().untyped_storage())
    return optimizer.memory(), planned, weights, sum(each.nbytes() for each in gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_are_those_of_built_ranks(pool: Pool, layout: str) -> None:
    world, words = LAYOUTS[layout]
    for counted, planned, weights, gradients in pool.run(world, held, world, words):
        assert counted == planned
        assert counted["weights"] == counted["gradients"] == weights == gradients


def checked(rank: int, words: str) -> tuple[list[str], list[str]]:
    """Compare copies of weights, then change what one of two tensor-parallel ranks keeps."""
    optimizer, _ = built(4, words)
    replicas, mesh = optimizer.data_parallel, optimizer.mesh
    check = ReplicaCheck(replicas, mesh, 1)
    before = check.differences()
    for member, flat in replicas.weights():
        if mesh.tp.coordinate == 1 and member.record.name == "decoder.final_layernorm.weight":
            flat += 1
    return before, check.differences()


def test_copies_are_compared_in_whole(pool: Pool) -> None:
    for before, after in pool.run(4, checked, TP2):
        assert before == []
        (line,) = after
        assert line.startswith("decoder.final_layernorm.weight:")


def reloaded(rank: int) -> bool:
    """Change kept weights after a forward that left whole ones; return whether the next sees it."""
    model = Model()
    optimizer = optimizer_of(model, torch_fsdp2_reshard_after_forward=False)
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.tell = lambda text: None
    x = torch.ones(1, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    before = model(x)
    shares = optimizer.weights()  # as a load asks for what it fills
    assert shares is not None
    for share in shares:
        share.tensor.mul_(2)
    return torch.equal(model(x), before * 2**LAYERS)


def test_weights_that_were_loaded_are_used(pool: Pool) -> None:
    assert pool.run(2, reloaded) == [True] * 2


MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16"
)


def run_on(pool: Pool, text: str, words: str = "", **precision: Any) -> Outcome:
    small = SmallRun(arguments.read_settings(f"{MODEL} {words}".split(), "test").values)
    config = small.on(parse_layout(text, "test"))
    if precision:
        config = replace(config, precision=PrecisionConfig.resolve(**precision))
    return equality.run(pool, case(config))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_our_own_sharding(pool: Pool, precision: str) -> None:
    """Gradients of a microbatch are rounded to half before they are summed, in fp32 as ours."""
    settings = {precision: True, "initial_loss_scale": 1024.0}
    found = run_on(pool, "dp2 torch_fsdp2", **settings)
    ours = run_on(pool, "dp2 optim_grads_params", **settings)
    assert found.losses[0] == ours.losses[0]  # before any update, the same bits
    apart = compare(found, ours)
    assert max(apart.loss, apart.norm) < 2e-3
    assert 0 < apart.gradients < 2e-2 and apart.ranks == 0


def with_fused_bias(rank: int, one: equality.Case) -> Share:
    """Train with the residual's kernel adding the bias of the layer before it."""
    with pytest.MonkeyPatch.context() as patch:
        choose = base.choose_backends
        fused = functools.partial(replace, fuses_residual_bias=True)
        patch.setattr(base, "choose_backends", lambda *chosen: fused(choose(*chosen)))
        return equality.train_on_rank(rank, one)


def test_a_bias_that_another_layer_adds_is_the_one_in_place(pool: Pool) -> None:
    small = SmallRun(arguments.read_settings(MODEL.split(), "test").values)
    layout = parse_layout("dp2 torch_fsdp2", "test")
    found = join(pool.run(2, with_fused_bias, case(small.on(layout))))
    serial = equality.run(pool, case(small.reference(layout)))
    assert compare(found, serial).largest <= 1e-10


def test_activations_may_wait_on_the_host(pool: Pool) -> None:
    words = (
        f"{MODEL} --fine-grained-activation-offloading --offload-modules core_attn attn_proj "
        "mlp_norm --min-offloaded-tensor-size 0"
    )
    small = SmallRun(arguments.read_settings(words.split(), "test").values)
    layout = parse_layout("dp2 torch_fsdp2", "test")
    found, serial = (
        equality.run(pool, case(one)) for one in (small.on(layout), small.reference(layout))
    )
    assert compare(found, serial).largest <= 1e-10


def save_at(pool: Pool, folder: Path, name: str, *flags: str) -> None:
    """Run ``pretrain_gpt`` on two replicas in bf16, with checkpoints in ``name``."""
    words = f"{RUN} --bf16 --save {name} {' '.join(flags)}".split()
    ended = launch(pool, 2, "pretrain_gpt", *words, folder=folder)
    assert [one.code for one in ended] == [0, 0], ended[0].err


def test_bf16_checkpoints_pass_between_torch_and_our_own_sharding(
    pool: Pool, tmp_path: Path
) -> None:
    """Masters become weights that are kept in fp32, and these become masters, bit for bit."""
    ours = "--use-megatron-fsdp"
    still = "--lr 0 --min-lr 0 --override-opt_param-scheduler --train-iters"
    save_at(pool, tmp_path, "one", ours)
    save_at(pool, tmp_path, "two", FLAG, f"--load one {still} 3")
    save_at(pool, tmp_path, "three", ours, f"--load two {still} 4")
    with (
        Checkpoint(tmp_path / "one" / "iter_0000002") as one,
        Checkpoint(tmp_path / "two" / "iter_0000003") as two,
        Checkpoint(tmp_path / "three" / "iter_0000004") as three,
    ):
        names = [key.removeprefix("model.") for key in one.index.tensors if "model." in key[:6]]
        assert len(names) > 10
        assert not any(key.startswith("optimizer.master.") for key in two.index.tensors)
        for name in names:
            master = one.read(f"optimizer.master.{name}")
            assert torch.equal(two.read(f"model.{name}"), master)
            assert torch.equal(three.read(f"optimizer.master.{name}"), master)
            assert torch.equal(three.read(f"model.{name}"), one.read(f"model.{name}"))


def with_a_frozen_layer(rank: int) -> tuple[bool, bool, list[str]]:
    """Return whether a frozen weight stays whole and as it was, and all names in order."""
    model = Odd()
    frozen = model.layers["1"].weight
    assert isinstance(frozen, nn.Parameter)
    frozen.requires_grad_(False)
    before, optimizer = frozen.clone(), optimizer_of(model)
    replicas = optimizer.data_parallel
    optimizer.zero_grad()
    x = torch.ones(2, 1, 4, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    replicas.reduce_gradients()
    optimizer.step(1.0, lr=0.1, weight_decay=0.1)
    names = [sharding.of(parameter).name for parameter in replicas.whole_parameters()]
    assert names == [sharding.of(parameter).name for parameter in replicas.parameters]
    return model.layers["1"].weight is frozen, torch.equal(before, frozen), names


def test_what_is_not_trained_is_not_shared_out(pool: Pool) -> None:
    names = ["layers.2.weight", "layers.0.weight", "layers.1.weight"]
    assert pool.run(2, with_a_frozen_layer) == [(True, True, names)] * 2
