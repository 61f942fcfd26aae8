"""optim.AdamW and its functions, beside torch's: ten steps in float64, state_dicts both ways, refusals."""

import copy
import io
import math
import threading
from importlib import import_module

import pytest
import torch

import ridgeline
from graphs import captured
from ridgeline.boundary import INTERPRETED
from ridgeline.lab.measurement.calls import forward
from ridgeline.lab.measurement.clock import prepare
from ridgeline.lab.measurement.law import Law
from ridgeline.op import RidgelineError, get, tensors_of
from ridgeline.optim import AdamW

pytestmark = pytest.mark.kernels
SHAPES = [(33, 17), (5,), (), (0, 4), (9000,), (64, 64), (3, 5, 7)]


def parameters(device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    """Returns parameters of mixed shapes and sizes; one is an unaligned view, one transposed, one strided."""
    torch.manual_seed(seed)
    flat, wide = torch.randn(1001), torch.randn(12, 20)
    made = [torch.randn(shape) for shape in SHAPES]
    made = [t.to(device, dtype) for t in (*made, flat, torch.randn(20, 30), wide)]
    made[-3:] = [made[-3][1:], made[-2].mT, made[-1][:, ::2]]
    return [torch.nn.Parameter(t) for t in made]


def gradient(p: torch.Tensor, step: int, number: int) -> torch.Tensor | None:
    if number == 1 and step == 3:
        return None
    dice = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(p.shape, generator=dice).to(p.device, p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for number, p in enumerate(params):
            p.grad = gradient(p, step, number)
        optimizer.step()


def kinds(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


OPTIONS = [{}, {"maximize": True, "weight_decay": 0.1}, {"capturable": True}, {"betas": (0.0, 0.5), "eps": 1e-4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ten_steps(options: dict, device: str) -> None:
    """The error against float64 is at most twice torch's own, plus half an ulp for each time that a parameter was
    stored.

    Torch's are not capturable: those count in float32, so that even beside float64 parameters 1 - 0.999^t is 1e-5 too
    small."""
    theirs = {k: v for k, v in options.items() if k != "capturable"}
    ours, own, exact = (
        parameters(device),
        parameters(device),
        [torch.nn.Parameter(p.detach().double()) for p in parameters(device)],
    )
    for p, twin in zip(exact, ours, strict=True):
        assert torch.equal(p, twin.double())
    train(AdamW(ours, lr=0.03, **options), ours, range(10))
    train(torch.optim.AdamW(own, lr=0.03, **theirs), own, range(10))
    oracle, squares = torch.optim.AdamW(exact, lr=0.03, **theirs), [0.0] * len(exact)
    for step in range(10):
        for number, p in enumerate(exact):
            g = gradient(ours[number], step, number)
            p.grad = None if g is None else g.double()
        oracle.step()
        squares = [s + p.detach().square().sum().item() for s, p in zip(squares, exact, strict=True)]
    for a, b, e, square in zip(ours, own, exact, squares, strict=True):
        error, allowed = (a - e).norm(), 2 * (b - e).norm() + torch.finfo(torch.float32).eps / 2 * math.sqrt(square)
        assert error <= allowed, (tuple(a.shape), a.stride(), error.item(), allowed.item())


def test_narrow_parameters_with_wide_moments(device: str) -> None:
    """Moments are float32, and parameters are rounded to nearest; a state_dict keeps both."""
    for dtype in kinds(device)[1:]:
        params = parameters(device, dtype)
        optimizer = AdamW(params, lr=0.03, moment_dtype=torch.float32)
        exact = [torch.nn.Parameter(p.detach().float()) for p in params]
        for number, (p, e) in enumerate(zip(params, exact, strict=True)):
            p.grad = gradient(p, 0, number)
            e.grad = p.grad.float()
        optimizer.step()
        torch.optim.AdamW(exact, lr=0.03).step()
        for p, e in zip(params, exact, strict=True):
            torch.testing.assert_close(p.detach(), e.detach().to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)
        again = AdamW(params, lr=0.03, moment_dtype=torch.float32)
        again.load_state_dict(optimizer.state_dict())
        for p in params:
            assert again.state[p]["exp_avg"].dtype == torch.float32
            assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def saved(state: dict) -> dict:
    """Saves and loads through a file, as users do."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("way", ["ours to torch", "torch to ours", "ours to ours"])
@pytest.mark.parametrize("disk", [False, True])
def test_state_dicts_load_both_ways(way: str, disk: bool, device: str) -> None:
    """Five steps, the state moved into the other's optimizer, five more: the same as ten steps of torch."""
    ours = lambda *args, **kwargs: AdamW(*args, moment_dtype=torch.float32, **kwargs)  # noqa: E731
    first, second = ({"ours": ours, "torch": torch.optim.AdamW}[name] for name in way.split(" to "))
    params, whole = parameters(device), parameters(device)
    groups = lambda some: [{"params": some[:3], "weight_decay": 0.0}, {"params": some[3:], "lr": 0.01}]  # noqa: E731
    one = first(groups(params), lr=0.03)
    train(one, params, range(5))
    other = second(groups(params), lr=0.5)
    other.load_state_dict(saved(one.state_dict()) if disk else one.state_dict())
    assert [g["lr"] for g in other.param_groups] == [0.03, 0.01]
    if second is ours:
        assert [g["moment_dtype"] for g in other.param_groups] == [torch.float32] * 2
    train(other, params, range(5, 10))
    train(torch.optim.AdamW(groups(whole), lr=0.03), whole, range(10))
    for p, w in zip(params, whole, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-6)
    assert other.state[params[0]]["step"] == 10
    assert other.state[params[1]]["step"] == 9  # it lacked a gradient once


def test_torch_states_keep_wide_moments(device: str) -> None:
    """Torch's state_dict has no moment_dtype: each group keeps its own, and float32 moments stay as they are."""
    params = parameters(device, torch.float16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    one = torch.optim.AdamW(wide)
    train(one, wide, range(1))
    ours = AdamW(
        [{"params": params[:3], "moment_dtype": torch.float64}, {"params": params[3:]}], moment_dtype=torch.float32
    )
    state = one.state_dict()
    state["param_groups"] = copy.deepcopy(ours.state_dict()["param_groups"])
    for group in state["param_groups"]:
        assert group.pop("moment_dtype")
    ours.load_state_dict(state)
    assert [g["moment_dtype"] for g in ours.param_groups] == [torch.float64, torch.float32]
    for p, w in zip(params[3:], wide[3:], strict=True):
        assert torch.equal(ours.state[p]["exp_avg"], one.state[w]["exp_avg"])


def test_steps_in_two_places() -> None:
    """Step counts from a checkpoint on the device, and of a later parameter on the CPU, move beside the parameters."""
    params = [torch.nn.Parameter(torch.ones(4, device="meta")) for _ in range(3)]
    optimizer, seen = AdamW(params), []
    optimizer._function = lambda *args, **_: seen.append(args[4])
    for p, step in zip(
        params, (torch.zeros(()), torch.zeros((), device="meta"), torch.zeros((), dtype=torch.int64)), strict=True
    ):
        p.grad = torch.ones_like(p)
        optimizer.state[p].update(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    optimizer.step()
    assert [(t.device.type, t.dtype) for t in seen[0]] == [("meta", torch.float32)] * 3
    assert all(optimizer.state[p]["step"] is t for p, t in zip(params, seen[0], strict=True))


def test_copies_go_their_own_way(device: str) -> None:
    params = parameters(device)
    optimizer = AdamW(params)
    train(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    theirs = [p for g in twin.param_groups for p in g["params"]]
    train(twin, theirs, range(2, 4))
    assert optimizer.state[params[0]]["step"] == 2
    assert twin.state[theirs[0]]["step"] == 4


def test_parameters_that_move(device: str) -> None:
    """New memory for a parameter, or a gradient with another layout at the same address: only the current addresses
    count."""
    p, q = (
        torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(device)) for _ in range(2)
    )
    ours, theirs = AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
    g = torch.randn(6, 6, device=device)
    for step in range(4):
        if step == 2:
            p.data, q.data = p.data.clone(), q.data.clone()
        p.grad = g if step % 2 else g.mT
        q.grad = p.grad
        ours.step()
        theirs.step()
        torch.testing.assert_close(p, q)


def test_learning_rate_as_a_tensor_and_schedulers(device: str) -> None:
    params, own = parameters(device), parameters(device)
    ours, theirs = AdamW(params, lr=torch.tensor(0.03)), torch.optim.AdamW(own, lr=0.03)
    for optimizer, some in ((ours, params), (theirs, own)):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(4):
            train(optimizer, some, range(step, step + 1))
            schedule.step()
    for p, w in zip(params, own, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-6)


def test_closure(device: str) -> None:
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = AdamW([p])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert (p < 1).all()


def test_autograd_sees_the_change(device: str) -> None:
    p = torch.nn.Parameter(torch.ones(4, device=device))
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_sees_all_that_is_written(device: str) -> None:
    p = torch.ones(4, device=device, dtype=torch.float16)
    g, m, v, master = p.clone(), torch.zeros_like(p), torch.zeros_like(p), p.float()
    for _ in range(2):  # the second call finds its table
        before = [t._version for t in (p, g, m, v, master)]
        ridgeline.adamw([p], [g], [m], [v], 1, masters=[master])
        after = [t._version for t in (p, g, m, v, master)]
        assert [a > b for a, b in zip(after, before, strict=True)] == [True, False, True, True, True]


def test_refusals(device: str) -> None:
    p = torch.nn.Parameter(torch.ones(4, 6, device=device))
    with pytest.raises(RidgelineError, match="amsgrad=True"):
        AdamW([p], amsgrad=True)
    with pytest.raises(RidgelineError, match="differentiable=True"):
        AdamW([p], differentiable=True)
    with pytest.raises(RidgelineError, match="complex64"):
        AdamW([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    p.grad = torch.ones(4, 6, device=device).to_sparse()
    with pytest.raises(RidgelineError, match="sparse"):
        AdamW([p]).step()
    x, g = p.detach(), torch.ones(4, 6, device=device)
    for args, said in {
        (x, torch.ones(4, 5, device=device), g, g, 1): r"grads is \(4, 5\), but of params \(4, 6\)",
        (x, g.int(), g, g, 1): "grads must be floating point, but number 0 is int32",
        (x, g, g, g, 0): "step counts from 1, but is 0",
        (x, g, g[:1].expand(4, 6), g, 1): "expanded",
        (x, g, g, g.to("meta"), 1): "exp_avg_sqs is on meta",
    }.items():
        with pytest.raises(RidgelineError, match=said):
            ridgeline.adamw(*args)
    one, where = torch.ones((), device=device), str(torch.zeros(0, device=device).device)
    for step, said in {
        (): "step must be one for all params or a list of 1, but has 0",
        (1,): f"0-d float32 tensors on {where}, their param's device, but one is 1$",
        (one.long(),): rf"0-d float32 tensors on {where}.*one is torch.int64 \(\) on {where}",
        (one.view(1),): rf"one is torch.float32 \(1,\) on {where}",
        (one.to("meta"),): r"one is torch.float32 \(\) on meta",
        one.to("meta"): "one is .* on meta",
        "3": "step must be a number, but is '3'",
        torch.ones(2): "step must be a number, but is a tensor of 2 elements",
        None: "step must be a number, but is None",
        math.nan: "step counts from 1, but is nan",
        math.inf: "step counts from 1, but is inf",
    }.items():
        with pytest.raises(RidgelineError, match=said):
            ridgeline.adamw([x], [g], [g], [g], list(step) if isinstance(step, tuple) else step)
    for options, said in (
        ({"betas": 0.9}, "betas must be two numbers, but are 0.9"),
        ({"betas": (0.9,)}, r"betas must be two numbers, but are \(0.9,\)"),
        ({"betas": (0.9, "b")}, "betas must be a number, but is 'b'"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), .* but are \(0.9, 1.0\)"),
        ({"betas": (math.nan, 0.9)}, r"betas must be in \[0, 1\)"),
        ({"lr": None}, "lr must be a number, but is None"),
        ({"lr": "a"}, "lr must be a number, but is 'a'"),
        ({"lr": torch.ones(2)}, "lr must be a number, but is a tensor of 2 elements"),
        *(({"lr": lr}, f"lr must be finite and at least 0, but is {lr}") for lr in (-1.0, math.nan, math.inf)),
        *(
            ({"eps": eps}, f"eps and weight_decay finite and at least 0, but are .*, {eps} and 0.01")
            for eps in (-1.0, math.nan, math.inf)
        ),
        ({"eps": None}, "eps must be a number, but is None"),
        ({"weight_decay": math.inf}, "weight_decay finite and at least 0"),
    ):
        with pytest.raises(RidgelineError, match=said):
            ridgeline.adamw(x, g, g, g, 1, **options)
    for lists, said in (
        (([x], None, [g], [g]), "grads must be a list of tensors .a single tensor only if all are., but is NoneType"),
        (([x], g, [g], [g]), "grads must be a list of tensors .a single tensor only if all are., but is Tensor"),
        ((None, None, None, None), "params must be a list of tensors"),
        ((x, None, g, g), "grads must be tensors, but number 0 is NoneType"),
        (([None], [g], [g], [g]), "params must be tensors, but number 0 is NoneType"),
        (([x], [g, g], [g], [g]), "equally long lists, but have 1, 2, 1, 1 tensors"),
    ):
        with pytest.raises(RidgelineError, match=said):
            ridgeline.adamw(*lists, 1)
    for given, said in (
        ((None, 1.0), "tensors must be a list of tensors .a single tensor only if all are., but is NoneType"),
        ((3, 1.0), "but is int"),
        (([1.0], 1.0), "tensors must be tensors, but number 0 is float"),
        (([g], "a"), "max_norm must be a number, but is 'a'"),
        (([g], None), "max_norm must be a number, but is None"),
        (([g], math.nan), "max_norm must be at least 0, but is nan"),
        (([g], 1.0, "b"), "norm_type must be a number, but is 'b'"),
        (([g], 1.0, math.nan), "norm_type must be above 0"),
    ):
        with pytest.raises(RidgelineError, match=said):
            ridgeline.clip_grad_norm(*given)
    with pytest.raises(RidgelineError, match="max_norm must be at least 0, but is -1"):
        ridgeline.clip_grad_norm([g], -1)
    with pytest.raises(RidgelineError, match="impl='triton' cannot run this call: it takes norm_type 2 and inf"):
        ridgeline.clip_grad_norm([g], 1, 3, impl="triton")


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e4, math.inf])
def test_clip_grad_norm(norm_type: float, max_norm: float, device: str) -> None:
    params, own = parameters(device), parameters(device)
    for number, (p, w) in enumerate(zip(params, own, strict=True)):
        p.grad, w.grad = gradient(p, 3, number), gradient(p, 3, number)  # one has none
    norm = ridgeline.clip_grad_norm(iter(params), max_norm, norm_type)
    theirs = torch.nn.utils.clip_grad_norm_(
        [w for w in own if w.numel()], max_norm, norm_type
    )  # it does not support empty ones
    torch.testing.assert_close(norm, theirs)
    for p, w in zip(params, own, strict=True):
        torch.testing.assert_close(p.grad, w.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_what_is_not_finite(value: float, norm_type: float, device: str) -> None:
    ours = [torch.ones(9000, device=device), torch.ones(5, device=device)]
    ours[0][8999] = value
    theirs = [torch.nn.Parameter(t.clone()) for t in ours]
    for p in theirs:
        p.grad = p.detach().clone()
    norm = ridgeline.clip_grad_norm(ours, 1.0, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type), equal_nan=True)
    for g, p in zip(ours, theirs, strict=True):
        torch.testing.assert_close(g, p.grad, equal_nan=True)


def test_frozen_parameters_are_no_gradients(device: str) -> None:
    """A parameter without a gradient is skipped, and its values stay, whether it is frozen or unused."""
    layer = torch.nn.Linear(3, 2, device=device)
    layer.weight.requires_grad_(False)
    before = layer.weight.clone()
    layer(torch.ones(1, 3, device=device)).sum().backward()
    norm = ridgeline.clip_grad_norm(layer.parameters(), 0.1)
    torch.testing.assert_close(norm, torch.full_like(norm, 2**0.5))
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", ["adamw", "clip_grad_norm"])
def test_the_law_judges_what_is_changed_in_place(name: str, device: str) -> None:
    """Each result that is 1% off fails; the arguments stay unchanged, also before each timed run."""
    for case in ("33x129", "lists"):
        law = Law.of(get(name), case, "float32", device)
        before = [t.clone() for t in tensors_of(law.args)]
        outputs, grads = law.run(get(name).implementations["torch"])
        assert law.judge(outputs, grads).ok
        for index, output in enumerate(outputs):
            if output.numel() > 1:
                assert not law.judge([o * 1.01 if n == index else o for n, o in enumerate(outputs)], grads).ok
        function = forward(law, get(name).implementations["torch"])
        first = function()
        prepare(function)
        second = function()
        assert first is second is None or torch.equal(first, second)
        assert all(map(torch.equal, before, tensors_of(law.args)))


@pytest.mark.parametrize("name", ["adamw", "clip_grad_norm"])
def test_the_same_bits_again(name: str, device: str) -> None:
    op = get(name)
    for implementation in op.implementations.values():
        args, kwargs = op.case("lists").make("float32", device)
        one, other = op.fresh(args), op.fresh(args)
        results = [[t for t in (implementation(*some, **kwargs),) if t is not None] for some in (one, other)]
        for a, b in zip(tensors_of([results[0], one]), tensors_of([results[1], other]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "clip_grad_norm"])
def test_opcheck(name: str, device: str) -> None:
    some = [torch.rand(33, 17, device=device), torch.rand(9000, device=device)]
    lists = [[t.clone() for t in some] for _ in range(4)]
    given = (
        (*lists, [], [], 3, None, 0.1, 0.9, 0.999, 1e-8, 0.01, False, False, 0, None)
        if name == "adamw"
        else (some, 1.0, False, None)
    )
    results = torch.library.opcheck(getattr(torch.ops.ridgeline, name).default, given)
    assert set(results.values()) == {"SUCCESS"}, results


def test_what_kernels_do_not_take(device: str) -> None:
    """Without `impl` PyTorch serves float64, also if only one moment has it; a named kernel refuses it."""
    for wide in ((0, 1, 2, 3), (3,)):
        lists = [[torch.rand(9, device=device, dtype=torch.float64 if n in wide else torch.float32)] for n in range(4)]
        with pytest.raises(RidgelineError, match="impl='triton' cannot run this call: it takes float32"):
            ridgeline.adamw(*lists, 1, impl="triton")
        before = lists[0][0].clone()
        ridgeline.adamw(*lists, 1)
        assert not torch.equal(before, lists[0][0])


def test_tensors_of_another_kind_at_the_same_addresses(device: str) -> None:
    """Cached tables check the dtypes, shapes and strides of every list."""
    square = lambda: [torch.rand(16, 16, device=device) for _ in range(4)]  # noqa: E731
    p, g, m, v = square()
    narrow = g.view(torch.float16)[:8].view(16, 16)  # half precision where float32 was
    for others in (
        [p, narrow, m, v],
        [p.t(), g, m, v],
        [p, g, m.t(), v],
        [p, g.flatten().as_strided((16, 16), (1, 16)), m, v],
    ):
        ridgeline.adamw(p, g, m, v, 1, lr=0.1)
        others[1].copy_(torch.rand(16, 16))
        twins = [t.double() for t in others]
        ridgeline.adamw(*others, 2, lr=0.1)
        get("adamw").reference(*twins, 2, lr=0.1)
        torch.testing.assert_close(others[0], twins[0].float(), rtol=1e-4, atol=1e-5)
        g.copy_(torch.rand(16, 16))
    ridgeline.adamw(p, g, m, v, 1, lr=0.1)
    for others in ([p, g.flatten(), m, v], [p, g, m, v.view(4, 64)], [p, g.view(torch.int32), m, v]):
        with pytest.raises(RidgelineError, match="number 0 of|number 0 is int32"):
            ridgeline.adamw(*others, 2, lr=0.1)
    ridgeline.clip_grad_norm([g], 1.0)
    halves = g.view(torch.float16).fill_(1.0)
    torch.testing.assert_close(ridgeline.clip_grad_norm([halves], 1.0), torch.tensor(math.sqrt(512), device=device))


def test_gradients_that_moved(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose gradients alone are new tensors writes only their addresses, also past one launch's 128."""
    lists = [[torch.rand(n % 7, 5, device=device) for n in range(150)] for _ in range(4)]
    twins = [[t.double() for t in some] for some in lists]
    made: list[int] = []
    module = import_module("ridgeline.ops.optimizer.adamw")
    whole = module.tabled
    monkeypatch.setattr(module, "tabled", lambda *given: made.append(1) or whole(*given))
    kept = []
    for step in (1, 2, 3):
        kept.append(lists[1])  # or the next ones may lie at the same addresses
        lists[1] = [torch.rand_like(t) for t in lists[0]]
        twins[1] = [t.double() for t in lists[1]]
        ridgeline.adamw(*lists, step, lr=0.1)  # type: ignore[arg-type]
        get("adamw").reference(*twins, step, lr=0.1)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in lists[1]))
        assert float(ridgeline.clip_grad_norm(lists[1], math.inf)) == pytest.approx(norm, rel=1e-5)
    assert len(made) == 1
    for mine, exact in zip((*lists[0], *lists[3]), (*twins[0], *twins[3]), strict=True):
        torch.testing.assert_close(mine, exact.float(), rtol=1e-4, atol=1e-5)
    odd = torch.rand(4 * 5 + 1, device=device)[1:].view(4, 5)  # begins at no multiple of 16 bytes
    lists[1][4], twins[1][4] = odd, odd.double()
    ridgeline.adamw(*lists, 4, lr=0.1)  # type: ignore[arg-type]
    get("adamw").reference(*twins, 4, lr=0.1)
    torch.testing.assert_close(lists[0][4], twins[0][4].float(), rtol=1e-4, atol=1e-5)


def test_each_thread_has_its_own_tables(device: str) -> None:
    """One thread would else rewrite addresses that another is about to launch with."""
    module = import_module("ridgeline.ops.optimizer._tensors")
    shelf, grads = module.Shelf(0), [torch.rand(3, 7, device=device)]
    found = []
    shelf.keep(None, grads, module.tabled([(g,) for g in grads]))
    thread = threading.Thread(target=lambda: found.append(shelf.find(None, grads)))
    thread.start()
    thread.join()
    assert found == [None]
    assert shelf.find(None, grads) is not None
    for n in range(100):
        shelf.keep(n, grads, [])
    assert len(shelf.known) == 64


def test_an_interrupted_rewrite_leaves_no_table(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ridgeline.ops.optimizer._tensors")
    shelf, whole, started = module.Shelf(0), module.launch, []
    first, second = ([torch.rand(4, 4, device=device) for _ in range(150)] for _ in range(2))
    shelf.keep(None, first, module.tabled([(g,) for g in first]))

    def interrupted(*args: object, **facts: object) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(1)
        whole(*args, **facts)

    monkeypatch.setattr(module, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shelf.find(None, second)
    monkeypatch.setattr(module, "launch", whole)
    assert shelf.find(None, first) is None  # its table holds addresses of both
    shelf.keep(None, first, module.tabled([(g,) for g in first]))
    assert shelf.find(None, second) is not None
    assert shelf.find(None, second) is not None


@pytest.mark.parametrize("name", ["adamw", "clip_grad_norm"])
def test_compiles_in_one_graph(name: str, device: str) -> None:
    torch._dynamo.reset()
    op = get(name)
    for case in ("33x129", "lists"):
        args, kwargs = op.case(case).make("float32", device)
        ours, theirs = op.fresh(args), op.fresh(args)
        call = torch.compile(
            lambda args, kwargs=kwargs: op.function(*args, **kwargs, impl="triton"), backend="aot_eager", fullgraph=True
        )
        torch.testing.assert_close(call(ours), op.function(*theirs, **kwargs, impl="triton"))
        for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """Replayed steps count: step number, learning rate and norm are read on the device."""
    p, q = (torch.nn.Parameter(torch.ones(9001, device="cuda")) for _ in range(2))
    rate = torch.tensor(0.03, device="cuda")
    ours, theirs = AdamW([p], lr=rate, capturable=True), torch.optim.AdamW([q], lr=0.03)
    p.grad, q.grad = torch.empty_like(p), torch.empty_like(q)

    def step() -> None:
        ridgeline.clip_grad_norm([p], 1.0)
        ours.step()

    p.grad.fill_(1)
    replay = captured(step)
    for number in range(4):
        g = torch.randn(9001, device="cuda") if number else torch.ones(9001, device="cuda")
        if number == 3:
            rate.fill_(0.01)
            theirs.param_groups[0]["lr"] = 0.01
        q.grad.copy_(g)
        torch.nn.utils.clip_grad_norm_([q], 1.0)
        theirs.step()
        if number:
            p.grad.copy_(g)
            replay()
    torch.testing.assert_close(p, q)


@pytest.mark.gpu
def test_steps_on_both_sides() -> None:
    """A fused checkpoint, then a parameter that is unfrozen: the same as torch's."""
    (p, r), (q, s) = ([torch.nn.Parameter(torch.ones(9001, device="cuda")) for _ in range(2)] for _ in range(2))
    ours, theirs = AdamW([p, r], lr=0.1, fused=True), torch.optim.AdamW([q, s], lr=0.1, fused=True)
    for step in range(4):
        for one, later in ((p, r), (q, s)):
            one.grad = torch.full_like(one, 0.5 + step)
            later.grad = torch.full_like(one, 0.5 - step) if step > 1 else None
        if step == 2:
            ours.param_groups[0]["fused"] = False
        ours.step()
        theirs.step()
    torch.testing.assert_close([p, r], [q, s])


@pytest.mark.gpu
def test_nothing_waits() -> None:
    params = parameters("cuda")
    optimizer = AdamW(params)
    train(optimizer, params, range(2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        ridgeline.clip_grad_norm(params, 1.0)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
