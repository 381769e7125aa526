"""Layers with experts: against sums written out token by token, and what flags are refused."""

import pytest
import torch
from torch import Tensor

from megatron.core import rng, sharding
from megatron.core.kernels import grouped, permute, permute_in_places
from megatron.core.mesh import Axis, Mesh
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe.balance import Balance
from megatron.core.transformer.moe.dispatcher import _by_expert, build_dispatcher
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.plan import layer_plan, mtp_layer_plan
from megatron.core.transformer.saving import Saving
from megatron.core.utils import UserError
from megatron.training.plan import operations_gpt, parameter_shapes
from tests.unit.test_rules import plan, refused

HIDDEN, SHAPE = 6, (5, 2)


def config_of(**choices: object) -> TransformerConfig:
    given = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_experts": 4}
    return TransformerConfig.resolve(**{**given, "moe_ffn_hidden_size": 10, **choices})


def layer_of(config: TransformerConfig) -> MoELayer:
    mesh, dtype = Mesh.serial(), torch.float64
    backends = choose_backends(config, mesh.device, dtype)
    saving = Saving(config.recompute, config.offload, mesh)
    layer = MoELayer(config, 0, mesh, dtype, backends, saving)
    sharding.name_parameters(layer)
    rng.initialize(layer, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():  # biases too, which start as zeros
            parameter.add_(torch.randn(parameter.shape, generator=generator).double() / 3)
    return layer


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*SHAPE, HIDDEN, generator=generator).double().requires_grad_()


def by_hand(layer: MoELayer, config: TransformerConfig, x_SBH: Tensor, context: Context) -> Tensor:
    """Return what the routed experts make of every token, one choice after the other."""
    experts = layer.experts
    routing = layer.router(x_SBH.flatten(0, 1), context, SHAPE)
    rows = []
    down, up = layer.fc1_latent_proj, layer.fc2_latent_proj
    for t, x_H in enumerate(x_SBH.flatten(0, 1)):
        if config.moe.moe_latent_size is not None:
            x_H = down.weight @ x_H + down.bias
        y_H = torch.zeros_like(x_H)
        for k in range(routing.experts_TK.shape[1]):
            if routing.kept_TK is not None and not routing.kept_TK[t, k]:
                continue
            e = int(routing.experts_TK[t, k])
            h = experts.linear_fc1.weight[e] @ x_H
            h = h if experts.linear_fc1.bias is None else h + experts.linear_fc1.bias[e]
            if config.mlp.swiglu:
                gate, value = h.chunk(2)
                bound = config.mlp.activation_func_clamp_value
                if bound is not None:
                    gate, value = gate.clamp(max=bound), value.clamp(-bound, bound)
                h = torch.nn.functional.silu(gate) * (value + config.mlp.glu_linear_offset)
            else:
                h = torch.nn.functional.gelu(h)
            out = experts.linear_fc2.weight[e] @ h
            out = out if experts.linear_fc2.bias is None else out + experts.linear_fc2.bias[e]
            y_H = y_H + routing.weights_TK[t, k] * out
        if config.moe.moe_latent_size is not None:
            y_H = up.weight @ y_H + up.bias
        rows.append(y_H)
    return torch.stack(rows).view_as(x_SBH)


@pytest.mark.parametrize(
    "choices",
    [
        {"bias_gelu_fusion": False},
        {"swiglu": True, "add_bias_linear": False, "moe_router_topk": 3},
        {"bias_gelu_fusion": False, "moe_expert_capacity_factor": 0.6},
        {"swiglu": True, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
        {"swiglu": True, "moe_latent_size": 4},
    ],
)
def test_a_layer_is_the_sum_over_its_tokens_experts(choices: dict[str, object]) -> None:
    config = config_of(**choices)
    layer, context = layer_of(config), Context()
    results = []
    for compute in (layer, lambda x, c: by_hand(layer, config, x, c)):
        x_SBH = inputs()
        layer.zero_grad()
        y_SBH = compute(x_SBH, context)
        (y_SBH * torch.linspace(-1, 2, y_SBH.numel()).double().view_as(y_SBH)).sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y_SBH, "x": x_SBH.grad, **grads})
    ours, expected = results
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-13, msg=name)


def test_shared_experts_are_added_through_their_gate() -> None:
    config = config_of(moe_shared_expert_intermediate_size=4, moe_shared_expert_gate=True)
    layer, x_SBH = layer_of(config), inputs()
    shared = layer.shared_experts
    assert shared is not None and shared.gate_weight is not None
    gates = torch.sigmoid(x_SBH @ shared.gate_weight.t())
    mlp = super(type(shared), shared).forward(x_SBH, Context())
    whole = layer(x_SBH, Context())
    layer.shared_experts = None
    torch.testing.assert_close(whole, layer(x_SBH, Context()) + gates * mlp, rtol=1e-13, atol=1e-13)


def test_losses_join_the_backward_once_with_their_weights() -> None:
    config = config_of(moe_aux_loss_coeff=(0.5,), moe_z_loss_coeff=0.25)
    layer, start = layer_of(config), torch.tensor(3.0).double()
    weights = config.router.loss_weights
    assert weights == {"load_balancing_loss": 0.5, "z_loss": 0.25}
    losses = layer.router(inputs().flatten(0, 1), Context(), SHAPE).losses
    total = 3.0 * sum(weights[name] * loss for name, loss in losses.items())
    (expected,) = torch.autograd.grad(total, layer.router.weight)
    balance = Balance(None, weights, start)
    y_SBH = layer(inputs(), Context(balance=balance))
    (found,) = torch.autograd.grad((0.0 * y_SBH).sum(), layer.router.weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert {name: float(x) for name, x in balance.sums().items()} == pytest.approx(
        {name: x.item() for name, x in losses.items()}
    )


def test_sorting_has_the_gradients_of_its_sums() -> None:
    generator = torch.Generator().manual_seed(3)
    experts_TK = torch.tensor([[2, 0], [1, 2], [2, 1]])
    kept_TK = torch.tensor([[True, True], [False, True], [True, True]])
    by = permute.sort_choices(experts_TK, kept_TK, 5)
    assert by.tokens_N.tolist() == [0, 2, 0, 1, 2]
    x_TH = torch.randn(3, 4, generator=generator).double().requires_grad_()
    weights_TK = torch.randn(3, 2, generator=generator).double().requires_grad_()

    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        rows = permute.permute(x, by) * torch.arange(1, 6).double()[:, None]
        return permute.unpermute(rows, weights, by)

    assert torch.autograd.gradcheck(there_and_back, (x_TH, weights_TK))
    order = torch.tensor([2, 0, 1])
    assert torch.autograd.gradcheck(lambda x: permute.rearrange(x, order), (x_TH,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", ["all", "some", "none"])
def test_moves_that_know_places_alone_equal_the_reference(kept: str, dtype: torch.dtype) -> None:
    """Values, gradients of tokens, rows and weights; a backward keeps no order of rows."""
    generator = torch.Generator().manual_seed(5)
    experts_TK = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(6)])
    kept_TK = None
    if kept != "all":
        kept_TK = (torch.rand(6, 3, generator=generator) < 0.5) & (kept == "some")
    count = 18 if kept_TK is None else int(kept_TK.sum())
    by = permute.sort_choices(experts_TK, kept_TK, count)
    wide = torch.promote_types(dtype, torch.float32)
    results, saved = [], list[Tensor]()
    for moves in (permute_in_places.MOVES, permute.REFERENCE):
        generator.manual_seed(6)
        x_TH = torch.randn(6, 5, generator=generator).to(dtype).requires_grad_()
        weights_TK = torch.rand(6, 3, generator=generator).to(wide).requires_grad_()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            rows_NH = moves.permute(x_TH, by)
            y_TH = moves.unpermute(rows_NH, weights_TK, by)
        if not results:
            assert [x.shape for x in saved] == [(6, 3), (count, 5), (6, 3), (6, 3)]
        grads = torch.autograd.grad(y_TH.square().sum(), (x_TH, rows_NH, weights_TK))
        results.append((rows_NH, y_TH, *grads))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected)


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"),
    reason="this torch has no torch.nn.functional.grouped_mm; the one of requirements.txt has",
)
def test_one_call_multiplies_as_the_loop_does() -> None:
    generator, sizes = torch.Generator().manual_seed(4), [3, 0, 5]
    x_NI, grad_NO = torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)
    matrices = torch.randn(3, 16, 8, generator=generator)
    ours = grouped.TORCH.product(x_NI, matrices, sizes)
    torch.testing.assert_close(ours, grouped.LOOP.product(x_NI, matrices, sizes))
    totals = [torch.ones(3, 8, 16), torch.ones(3, 8, 16)]
    for products, total in zip((grouped.TORCH, grouped.LOOP), totals, strict=True):
        products.accumulate(total, grad_NO, x_NI, sizes)
    torch.testing.assert_close(*totals)
    assert torch.equal(totals[1][1], torch.ones(8, 16))


def test_layers_with_experts_go_by_number_or_pattern() -> None:
    def kinds(**choices: object) -> list[str]:
        config = config_of(num_layers=4, **choices)
        return [layer.sublayers[-1].kind for layer in layer_plan(config)]

    assert kinds() == ["moe"] * 4
    assert kinds(moe_layer_freq=2) == ["moe", "mlp", "moe", "mlp"]
    assert kinds(moe_layer_freq=(0, 1, 1, 0)) == ["mlp", "moe", "moe", "mlp"]
    assert kinds(num_experts=None) == ["mlp"] * 4
    last = mtp_layer_plan(config_of(num_layers=4, moe_layer_freq=(0, 0, 0, 1)), 0)
    assert last.sublayers[-1].kind == "moe"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-experts 4 --moe-layer-freq [1]*3", "names 3 layers, --num-layers is 4"),
        ("--num-experts 4 --moe-layer-freq [2]*4", "a pattern holds 0 and 1 only"),
        ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq"),
        ("--num-experts 4 --moe-layer-freq [0]*4", "leaves no layer for --num-experts (4)"),
        ("--num-experts 4 --moe-n-hash-layers 5", "must not exceed --num-layers (4)"),
        (
            "--num-experts 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-num-sms 0",
            "--moe-flex-dispatcher-num-sms (0)",
        ),
        ("--num-experts 4 --activation-func-clamp-value 7", "add --swiglu or --quick-geglu"),
        ("--num-experts 4 --moe-shared-expert-gate", "--moe-shared-expert-intermediate-size"),
        ("--num-experts 4 --moe-router-topk 5", "must not exceed --num-experts (4)"),
        ("--num-experts 4 --moe-latent-size 0", "--moe-latent-size"),
        (
            "--num-experts 4 --expert-model-parallel-size 4 --use-distributed-optimizer "
            "--num-distributed-optimizer-instances 2 --dry-run-world-size 4",
            "the 1 replicas of experts",
        ),
        ("--num-experts 4 --use-torch-fsdp2 --dry-run-world-size 2", "use --use-megatron-fsdp"),
        (
            "--num-experts 4 --moe-shared-expert-intermediate-size 9 --dry-run-world-size 2 "
            "--tensor-model-parallel-size 2",
            "try 8 or 10",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words: str, said: str) -> None:
    assert said in refused(words)


def test_a_package_that_is_missing_is_named_with_the_way_out() -> None:
    group = Axis("etp_ep", (0, 1), 0, None)
    mesh = Mesh({**Mesh.serial().axes, "etp_ep": group}, 0, torch.device("cpu"))
    with pytest.raises(
        UserError, match="flex: deep_ep.*DeepEP.*--moe-token-dispatcher-type alltoa"
    ):
        build_dispatcher("flex", 4, mesh, torch.bfloat16)


def test_a_plan_needs_no_package() -> None:
    """On the CPU the exchange stands for it, and a line says so; other dispatchers need none."""
    words = "--num-experts 4 --expert-model-parallel-size 2 --dry-run-world-size 2"
    run = plan(f"{words} --moe-token-dispatcher-type flex --moe-enable-deepep --bf16")
    assert run.config.model.moe.moe_token_dispatcher_type == "flex"
    assert not any("flex" in line for line in run.lines() if "no effect" in line)
    here = plan(f"{words} --moe-token-dispatcher-type flex --device cpu")
    assert here.config.model.moe.moe_token_dispatcher_type == "alltoall"
    stands = "stands in for --moe-token-dispatcher-type flex (alltoall)"
    assert any(stands in line for line in here.lines())
    needs = "--moe-token-dispatcher-type flex needs CUDA, --bf16 and the package deep_ep"
    assert any(needs in line for line in run.lines())
    assert not any(needs in line for line in here.lines())
    here = plan(f"{words} --moe-token-dispatcher-type flex --moe-enable-deepep --device cpu")
    assert any("--moe-flex-dispatcher-backend (--device is cpu)" in line for line in here.lines())
    assert not any("no --moe-token-dispatcher-type flex" in line for line in here.lines())
    idle = plan(f"{words} --moe-flex-dispatcher-num-sms 24")
    assert any("no --moe-token-dispatcher-type flex" in line for line in idle.lines())


def test_settings_of_experts_without_experts_are_named() -> None:
    run = plan("--moe-grouped-gemm --moe-ffn-hidden-size 8")
    named = [line for line in run.lines() if "no --num-experts" in line]
    assert any("--moe-grouped-gemm" in line for line in named)
    alone = plan("--num-experts 4 --moe-token-dispatcher-type alltoall")
    assert any("every rank holds all experts" in line for line in alone.lines())
    sigmoid = plan("--num-experts 4 --moe-router-pre-softmax --moe-router-score-function sigmoid")
    assert any("score-function is sigmoid" in line for line in sigmoid.lines())
    with pytest.raises(UserError):
        TransformerConfig.resolve(num_layers=1, hidden_size=4, num_attention_heads=1, num_experts=0)


def test_a_plan_counts_the_latents_of_experts() -> None:
    """Matrices down and up once, experts from and to the latent (NVIDIA, 2025: LatentMoE)."""
    sizes = {
        "swiglu": True,
        "add_bias_linear": False,
        "moe_router_topk": 3,
        "num_layers": 1,
        "position_embedding_type": "rope",
    }
    config = config_of(**sizes, moe_latent_size=4)
    kinds = parameter_shapes.parameters_by_kind(config, 8)
    assert kinds["latents of experts"] == 2 * HIDDEN * 4
    assert kinds["experts"] == 4 * 3 * 4 * 10
    adds = operations_gpt.layer_multiply_adds(config, 16, layer_plan(config)[0])
    assert adds["moe"] == HIDDEN * 4 + 2 * HIDDEN * 4 + 3 * 3 * 4 * 10


def test_a_plan_of_mixtral_counts_its_parameters() -> None:
    """Mixtral 8x7B has 46.7B parameters, of which 12.9B work on a token (2401.04088, table 1)."""
    config = TransformerConfig.resolve(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        num_experts=8,
    )
    kinds = parameter_shapes.parameters_by_kind(config, 32000)
    assert sum(kinds.values()) == 46_702_792_704
    assert kinds["experts"] == 32 * 8 * 3 * 4096 * 14336
    assert round(parameter_shapes.active_parameters(config, 32000) / 1e9, 1) == 12.9
    adds = operations_gpt.layer_multiply_adds(config, 4096, layer_plan(config)[0])
    assert adds["moe"] == 4096 * 8 + 2 * 3 * 4096 * 14336


def test_the_order_of_rows_is_made_without_their_number_on_the_host() -> None:
    """On the meta device nothing can be read, so that whatever waits for a value fails."""
    coming_Ge = torch.tensor([[2, 0, 1], [1, 3, 0]])
    assert _by_expert(coming_Ge, 7).tolist() == [0, 1, 3, 4, 5, 6, 2]
    assert _by_expert(coming_Ge.to("meta"), 7).shape == (7,)
