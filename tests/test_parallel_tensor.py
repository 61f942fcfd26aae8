"""Tensor and sequence parallelism: layers, overlapped products and whole models against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ridgeline
import ridgeline.nn
from ranks import run_ranks
from ridgeline.lm.model import Transformer
from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError
from ridgeline.parallel import collectives, groups, rooms, splits, symmetric, tensor
from ridgeline.parallel import models as split_models
from ridgeline.parallel.rung import observed
from shared_memory import Threads

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def mine(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.chunk(groups.size(), dim)[groups.rank()]


def overlapped(
    rank: int, x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, do: list[torch.Tensor], over: str = "engine"
) -> Any:
    own, ww, uu = [t.clone().requires_grad_() for t in (mine(x, -2), mine(w, 0), mine(u, 1))]
    first: Any = tensor.all_gather_linear(own, [ww, ww * 2], over=over)
    y = tensor.linear_reduce_scatter(first[0] * first[1], uu, over=over)
    y.backward(mine(do[0], -2))
    return y.detach(), own.grad, ww.grad, uu.grad


def check_products(world: int, over: str, lead: int = 2) -> None:
    x, w, u, do = [torch.randn(s, dtype=torch.float64) for s in ((lead, 8, 6), (16, 6), (5, 16), (lead, 8, 5))]
    whole = [t.clone().requires_grad_() for t in (x, w, u)]
    y = ((whole[0] @ whole[1].mT) * (whole[0] @ whole[1].mT * 2)) @ whole[2].mT
    y.backward(do)
    found = run_ranks(world, overlapped, x, w, u, [do], over)
    for n, (wanted, dim) in enumerate(((y.detach(), -2), (whole[0].grad, -2), (whole[1].grad, 0), (whole[2].grad, 1))):
        torch.testing.assert_close(torch.cat([f[n] for f in found], dim), wanted, **EXACT)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_products_under_transfers(world: int) -> None:
    check_products(world, "engine")


@pytest.mark.parametrize("lead", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_products_under_copies_of_shared_memory(world: int, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process stand for GPUs: a stream runs in the order of its calls."""
    threads = Threads(world)
    monkeypatch.setattr(rooms, "room", threads.room)
    for _ in range(2):  # what lies there from the first time is overwritten only when all have read it
        check_products(world, "symmetric", lead)
    tokens, width = lead * 8 // world, 8
    asked = {("gathers", tokens * width * 6), ("gathers", tokens * width * 5)}
    sizes = [-(-tokens * width * n // 256) * 256 for n in (5, 6)]
    asked |= {("scatters", (world - 1) * size) for size in sizes}
    assert set(threads.asked) == (asked if world > 1 else set())


def refused_over(rank: int) -> list[str]:
    found = []
    x, w = torch.zeros(4, 4), torch.zeros(4, 4)
    for call in (
        lambda: tensor.all_gather_linear(x, w, over="symmetric"),
        lambda: tensor.linear_reduce_scatter(x, w, over="air"),
        lambda: tensor.all_gather_linear(x, w, over=tensor.OVER[rank]),
        lambda: tensor.summed(x, over="air"),
        lambda: tensor.summed(x, over="symmetric"),
    ):
        try:
            call()
        except RidgelineError as error:
            found.append(str(error))
    return found


def test_symmetric_memory_is_refused_in_one_sentence() -> None:
    said = run_ranks(2, refused_over)
    cpu = "parallel: symmetric memory needs GPUs, but the tensors are on the cpu"
    assert said[0] == said[1]
    assert said[0] == [
        cpu,
        "linear_reduce_scatter: over must be 'engine' or 'symmetric', but is 'air'",
        "all_gather_linear: all ranks must have the same over, but rank 0 has engine and rank 1 symmetric",
        "summed: over must be 'engine' or 'symmetric', but is 'air'",
        cpu,
    ]


class Ours(nn.Module):
    """Our modules, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = ridgeline.nn.Attention(32, 4, 4, 16, bias=True, dtype=torch.float64)
        self.norm = ridgeline.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
        self.mlp = ridgeline.nn.GatedMLP(32, 48, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(self.norm(x))


class Theirs(nn.Module):
    """A model in the form of Hugging Face's, with a `_tp_plan`."""

    _tp_plan = {"model.layers.*.self_attn.q_proj": "colwise", "lm_head": "colwise_rep"} | {
        f"model.layers.*.{name}": style
        for name, style in (
            ("self_attn.k_proj", "colwise"),
            ("self_attn.v_proj", "colwise"),
            ("self_attn.o_proj", "rowwise"),
            ("mlp.gate_proj", "colwise"),
            ("mlp.up_proj", "colwise"),
            ("mlp.down_proj", "rowwise"),
        )
    }

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = ridgeline.nn.Attention(32, 4, 4, 16, dtype=torch.float64)
            self.input_layernorm = ridgeline.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
            self.mlp = ridgeline.nn.GatedMLP(32, 48, dtype=torch.float64)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            hidden_states = hidden_states + self.self_attn(x=self.input_layernorm(hidden_states))
            return hidden_states + self.mlp(hidden_states)

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([self.Layer(), self.Layer()])
        self.model.norm = ridgeline.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
        self.lm_head = nn.Linear(32, 8, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            x = layer(hidden_states=x)
        return self.lm_head(self.model.norm(x))


class Mixed(nn.Module):
    """Layers with our mixtures of experts. Their routers see tokens whose scores are far apart."""

    class Layer(nn.Module):
        def __init__(self, shared: int) -> None:
            super().__init__()
            self.attn = ridgeline.nn.Attention(32, 4, 4, 16, dtype=torch.float64)
            self.norm = ridgeline.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
            self.mlp = ridgeline.nn.MoE(32, 6, 8, 3, shared=shared, score="sigmoid", dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(x)
            return x + self.mlp(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(0), self.Layer(5)])
        self.norm = ridgeline.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


SIZE = Size(2, 32, 48, 4, 4, 16, vocabulary=24, qk_norm=True)
TIED = Size(2, 32, 48, 4, 4, 16, vocabulary=24, tied=True)


def trained(net: nn.Module, inputs: list[torch.Tensor]) -> list[Any]:
    found: Any = net(*inputs)
    (found if found.dim() == 0 else found.square().mean()).backward()
    return [found.detach(), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}]


def split_model(rank: int, net: nn.Module, inputs: list[torch.Tensor], options: dict[str, Any]) -> list[Any]:
    net = copy.deepcopy(net)
    made = split_models.parallelize(net, **options)
    loss, grads = trained(net, inputs)
    whole = {n: tensor.gathered(g, None, made.splits[n]) if n in made.splits else g for n, g in grads.items()}
    return [loss, whole, made.state_dict()]


def models() -> dict[str, Any]:
    tokens, target = torch.randint(24, (2, 8)), torch.randint(24, (2, 8))
    target[:, 5:] = -100
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    own = Transformer(SIZE).double()
    return {
        "nn": (Ours(), [x], {}),
        "hugging face": (Theirs(), [x], {}),
        "hugging face, sequence": (Theirs(), [x], {"sequence": True}),
        "experts": (Mixed(), [x], {"experts": True}),
        "experts, uneven": (Mixed(), [x[:1, :3]], {"experts": True}),  # of four ranks, one has no token
        "experts, sequence": (Mixed(), [x], {"experts": True, "sequence": True}),
        "lm": (own, [tokens, target], {}),
        "lm, sequence": (own, [tokens, target], {"sequence": True}),
        "lm, vocabulary": (own, [tokens, target], {"vocab": True}),
        "lm, sequence, vocabulary": (own, [tokens, target], {"sequence": True, "vocab": True}),
        "lm, tied": (
            Transformer(Size(2, 32, 48, 4, 4, 16, vocabulary=24, tied=True)).double(),
            [tokens, target],
            {"vocab": True},
        ),
        "lm, logits": (own, [tokens], {"vocab": True}),
        "lm, checkpoints": (Transformer(SIZE, every=1).double(), [tokens, target], {"sequence": True}),
    }


@pytest.mark.parametrize("name", list(models()))
def test_models_equal_one_process(name: str) -> None:
    net, inputs, options = models()[name]
    loss, grads = trained(copy.deepcopy(net), inputs)
    near = {"rtol": 1e-5, "atol": 1e-7} if name.startswith("lm") else EXACT  # the loss is in float32
    for world in (2, 4):
        for found, theirs, state in run_ranks(world, split_model, net, inputs, options):
            torch.testing.assert_close(found, loss, **near)
            assert theirs.keys() == grads.keys()
            for n, g in grads.items():
                torch.testing.assert_close(theirs[n], g, **near, msg=lambda m, n=n: f"{n}: {m}")
            assert state.keys() == net.state_dict().keys()
            torch.testing.assert_close(state, dict(net.state_dict()), rtol=0, atol=0)


def layers(
    rank: int, x: torch.Tensor, up: nn.Linear, down: nn.Linear, embed: nn.Embedding, sequence: bool, over: str
) -> Any:
    first, second = tensor.Column(up, sequence=sequence, over=over), tensor.Row(down, sequence=sequence, over=over)
    table = tensor.Vocab(embed, sequence=sequence)
    tokens = torch.arange(16).view(2, 8) % 12
    own = mine(x, 1).clone().requires_grad_() if sequence else x.clone().requires_grad_()
    y = second(first(own).relu()) + table(tokens)
    y.square().sum().backward()
    y, dx = [tensor.gathered(t.detach(), None, 1) if sequence else t.detach() for t in (y, own.grad)]
    parts = [(first.weight, 0), (first.bias, 0), (second.weight, 1), (table.weight, 0)]
    return y, dx, second.bias.grad, *[tensor.gathered(p.grad, None, dim) for p, dim in parts if p.grad is not None]


@pytest.mark.parametrize("over", tensor.OVER)
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_equal_one_process(sequence: bool, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[torch.Size] = []

    def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        summed.append(x.shape)
        return collectives.engine_all_reduce(x, group)

    monkeypatch.setattr(rooms, "room", Threads(4).room)
    monkeypatch.setattr(symmetric, "all_reduce", all_reduce)
    up, down, embed = nn.Linear(8, 12).double(), nn.Linear(12, 8).double(), nn.Embedding(12, 8).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    own = x.clone().requires_grad_()
    y = down(up(own).relu()) + embed(torch.arange(16).view(2, 8) % 12)
    y.square().sum().backward()
    wanted = [y.detach(), own.grad, down.bias.grad, up.weight.grad, up.bias.grad, down.weight.grad, embed.weight.grad]
    for found in run_ranks(4, layers, x, up, down, embed, sequence, over):
        torch.testing.assert_close(list(found), wanted, **EXACT)
    assert len(summed) == (2 * 4 if over == "symmetric" and not sequence else 0)  # y, and the gradient of x


def on_gloo(net: nn.Module, inputs: list[torch.Tensor]) -> list[Any]:
    return split_model(0, net, inputs, {"sequence": True, "vocab": True})[:2]


def test_a_model_on_gloo() -> None:
    torch.manual_seed(1)
    net, inputs, _ = models()["lm"]
    loss, grads = trained(copy.deepcopy(net), inputs)
    for found, theirs in groups.spawn(on_gloo, 2, net, inputs):
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(theirs, grads, rtol=1e-5, atol=1e-7)


def refused(rank: int, net: nn.Module, options: dict[str, Any]) -> str:
    try:
        split_models.parallelize(net, **options)
    except RidgelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "options", "says"),
    [
        (Size(1, 32, 48, 4, 2, 16), {}, "4 ranks must divide the 2 heads of model.layers.0.self_attn.k_proj"),
        (Size(1, 32, 50, 4, 4, 16), {}, "4 ranks must divide the 50 outputs of model.layers.0.mlp.gate_proj"),
        (Size(1, 32, 48, 4, 4, 16, vocabulary=30), {"vocab": True}, "4 ranks must divide the vocabulary of 30"),
        (Size(1, 32, 48, 4), {"plan": {"model.layers.*.mlp.up_proj": "diagonal"}}, "got 'diagonal' for Linear"),
        (Size(1, 32, 48, 4), {"plan": {"model.layers.*.mlp.up_proj": "colwise"}}, "one by rows, got up_proj"),
    ],
)
def test_every_rank_says_what_does_not_divide(size: Size, options: dict[str, Any], says: str) -> None:
    said = run_ranks(4, refused, Transformer(size), options)
    assert len(set(said)) == 1
    assert says in said[0]


@pytest.mark.parametrize(
    ("net", "options", "says"),
    [
        (ridgeline.nn.MoE(8, 4, 6, 2), {}, "parallelize: 4 ranks must divide the 6 experts of the model"),
        (
            nn.Sequential(ridgeline.nn.MoE(8, 4, 8, 2, auxiliary=0.1)),
            {"sequence": True},
            "the auxiliary loss of 0 would see this rank's tokens only",
        ),
        (
            nn.Sequential(ridgeline.nn.QuantizedMoE(32, 32, 4, 2, kind="int8")),
            {},
            "quantised experts cannot be split over ranks, and 0 has them",
        ),
        (Ours(), {}, "experts=True needs nn.MoE, or experts that hf.patch has patched"),
    ],
)
def test_every_rank_says_which_experts_do_not_divide(net: nn.Module, options: dict[str, Any], says: str) -> None:
    said = run_ranks(4, refused, net, {"experts": True, **options})
    assert len(set(said)) == 1
    assert says in said[0]


def misshapen(rank: int) -> str:
    try:
        tensor.linear_reduce_scatter(torch.zeros(1, 4 + rank, 4), torch.zeros(2, 4))
    except RidgelineError as error:
        return str(error)
    return ""


def test_unlike_shapes_are_one_sentence_on_every_rank() -> None:
    said = run_ranks(2, misshapen)
    assert (
        said[0]
        == said[1]
        == "linear_reduce_scatter: on rank 1: x must have a multiple of 2 tokens, one part for each rank, got 5"
    )


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rung", splits.LADDER, ids=lambda rung: rung.name)
def test_calls_and_bytes_of_split_models_in_a_world_of_16(rung: splits.Split, qk_norm: bool) -> None:
    size = Size(3, 64, 48, 16, 16, 16, vocabulary=32, qk_norm=qk_norm)
    tokens = torch.randint(32, (2, 16))
    with groups.pretend(16, 3):
        plain, own = Transformer(size, "torch"), Transformer(size, "torch")
        rung.wrap(own)
        with observed() as seen:
            own(tokens, tokens).backward()
        formula = rung.traffic(plain, 16, 2, 16)
        assert seen == formula, f"{seen} against {formula}"
        held = sum(p.nbytes for p in own.parameters())
        assert held == rung.held(plain, 16).weights
    assert 1 / 16 <= rung.share(plain, 16) < 1
    assert len(rung.idea) <= 100
    assert rung.refuses(plain, 16, 16) is None
    assert rung.refuses(plain, 3, 16) == "3 ranks must divide the 16 heads of keys"
