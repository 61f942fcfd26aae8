"""DTensor calls of every op by its rule, on ranks of one process: values and gradients against plain tensors."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.op import Case, Op, RidgelineError, Spec, registry

RANKS = 4
RULES = [name for name, op in registry().items() if op.sharding is not None]


@pytest.fixture(scope="module")
def sharding() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ridgeline.parallel import sharding

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    sharding.enable()
    try:
        yield sharding
    finally:
        sharding.disable()
        dist.destroy_process_group()


def bound(op: Op, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = inspect.signature(op.function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def names_of(sharding: Any, op: Op, given: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the names of each tensor's dimensions; None if the rule does not allow the call."""
    text = op.sharding(**given) if callable(op.sharding) else op.sharding
    if text is None:
        return None
    specs = dict(part.split() for part in text.partition("->")[0].split(","))
    return {n: sharding.named(specs[n], t, given) for n, t in given.items() if isinstance(t, torch.Tensor)}


def widened(sharding: Any, op: Op, case: Case, dtype: str) -> Case | None:
    """Returns a case whose dimensions divide by the ranks wherever ranks may split them."""
    args, kwargs = case.make(dtype)
    given = bound(op, args, kwargs)
    names = names_of(sharding, op, given)
    if names is None:
        return None
    specs = bound(op, list(case.args), case.kwargs)

    def wide(name: str, spec: Any) -> Any:
        if not isinstance(spec, Spec) or name not in names:
            return spec
        made = copy.copy(spec)
        sizes = zip(spec.shape, names[name], strict=True)
        object.__setattr__(made, "shape", tuple([s * RANKS if n and s > 1 else s for s, n in sizes]))
        return made

    return Case(case.name, (), {n: wide(n, s) for n, s in specs.items() if n != "impl"}, case.dtypes)


def flat(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)]


def slope(outputs: list[torch.Tensor]) -> torch.Tensor:
    total: Any = 0.0
    for n, t in enumerate(outputs):
        if t.is_floating_point() and t.requires_grad:
            factor = torch.linspace(-1, 1 + n, t.numel()).view(t.shape)
            total = total + (t.masked_fill(~t.isfinite(), 0).float() * factor).sum() / t.numel() ** 0.5
    return total


def settled(t: Any) -> torch.Tensor:
    """Returns what all ranks have alike, up to the order of sums."""
    ranks = [p.detach() for p in t._local_tensors.values()] if hasattr(t, "_local_tensors") else [t.detach()]
    for other in ranks[1:]:
        if other.dtype.itemsize > 1:
            torch.testing.assert_close(other, ranks[0], rtol=1e-2, atol=1e-5 * size(ranks[0]), equal_nan=True)
    return ranks[0]


def size(t: torch.Tensor) -> float:
    return float(t.nan_to_num(0, 0, 0).abs().max()) or 1.0 if t.numel() and t.is_floating_point() else 1.0


def compare(sharding: Any, op: Op, given: dict[str, Any], letter: str, names: dict[str, Any]) -> None:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    plain = {n: t.detach().clone().requires_grad_(t.requires_grad) if n in names else t for n, t in given.items()}
    wanted = flat(op.function(**plain))
    if any(t.requires_grad for t in wanted):
        slope(wanted).backward()
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        split = {}
        for name in names:
            t = given[name].detach()
            at = names[name].index(letter) if letter in names[name] else -1
            where = Shard(at) if at >= 0 and t.shape[at] > 1 else Replicate()
            split[name] = distribute_tensor(t, mesh, [where]).requires_grad_(given[name].requires_grad)
        found = flat(getattr(ridgeline, op.name)(**given | split))
        assert all(isinstance(t, DTensor) for t in found)
        whole: Any = [t.full_tensor() for t in found]
        if any(t.requires_grad for t in whole):
            slope(whole).backward()
        grads: Any = {n: t.grad.full_tensor() for n, t in split.items() if t.grad is not None}
        loose = 1e-4 if given[next(iter(names))].dtype in (torch.float32, torch.int64) else 2e-2
        for f, w in zip(whole, wanted, strict=True):
            f, w = settled(f), w.detach()
            if w.dtype.itemsize == 1:
                assert torch.equal(f.view(torch.uint8), w.view(torch.uint8))
            else:
                torch.testing.assert_close(f, w, rtol=loose, atol=loose * size(w), equal_nan=True)
        for name, t in plain.items():
            if isinstance(t, torch.Tensor) and t.grad is not None:
                torch.testing.assert_close(settled(grads[name]), t.grad, rtol=loose, atol=loose * size(t.grad))


def cost(case: Case) -> int:
    shapes = [s.shape for s in (*case.args, *case.kwargs.values()) if isinstance(s, Spec)]
    return sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize("name", RULES)
def test_every_rule(sharding: Any, name: str) -> None:
    """Each rule, with each letter split, in the smallest of the op's cases."""
    op, tried = registry()[name], 0
    most = 1 if op.family in ("recurrent", "matmul") else 3
    for case in sorted([c for c in op.cases if c.use == "check"], key=cost):
        dtype = "float32" if "float32" in case.dtypes else case.dtypes[0]
        wide = widened(sharding, op, case, dtype)
        if wide is None or tried == most or (tried and cost(wide) > 30000):
            continue
        args, kwargs = wide.make(dtype)
        given = bound(op, args, kwargs)
        names = names_of(sharding, op, given)
        assert names is not None
        try:
            op.function(**given)
        except RidgelineError:
            continue  # sizes that a case has for a reason
        sizes = [(n, s) for name, some in names.items() for n, s in zip(some, given[name].shape, strict=True)]
        letters = sorted({n for n, s in sizes if n and s > 1})
        for letter in letters:
            compare(sharding, op, given, letter, names)
        tried += bool(letters)
    assert tried, "no case of this op has a dimension that ranks may split"


def test_what_a_rule_does_not_allow_is_one_sentence(sharding: Any) -> None:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
        weight = torch.randn(16, requires_grad=True)
        wrong: list[tuple[Any, str]] = [
            (lambda: ridgeline.radix_sort(x), "radix_sort: it has no rule for DTensors; give local shards"),
            (lambda: ridgeline.quantize_int8(x), "quantize_int8: its rule for DTensors does not allow this call"),
            (
                lambda: ridgeline.rms_norm(x, weight),
                "rms_norm: weight needs a gradient and is a plain tensor",
            ),
            (lambda: ridgeline.dropout(x), "dropout: it has no rule"),
        ]
        for call, says in wrong:
            with pytest.raises(RidgelineError, match=re.escape(says)):
                call()
        # Uneven parts are gathered: the result is whole.
        uneven = distribute_tensor(torch.randn(6, 16), mesh, [Shard(0)])
        assert ridgeline.rms_norm(uneven).placements == (Replicate(),)
        assert ridgeline.rms_norm(x, weight.detach()).placements == (Shard(0),)


def test_a_mean_over_split_rows_counts_all_rows(sharding: Any) -> None:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    logits, target = torch.randn(8, 16, requires_grad=True), torch.randint(16, (8,))
    target[:3] = -100  # the first rank has no rows, the second one
    wanted = ridgeline.cross_entropy(logits, target, label_smoothing=0.1)
    wanted.backward()
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        x, labels = [distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in (logits, target)]
        x.requires_grad_()
        found: Any = ridgeline.cross_entropy(x, labels, label_smoothing=0.1)
        found.backward()
        torch.testing.assert_close(settled(found.full_tensor()), wanted.detach())
        assert x.grad is not None
        torch.testing.assert_close(settled(x.grad.full_tensor()), logits.grad)


def test_two_dimensions_of_a_mesh(sharding: Any) -> None:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (2, 2))
        x, weight = torch.randn(8, 6), torch.randn(4, 6)
        rows = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        found: Any = ridgeline.linear(rows, distribute_tensor(weight, mesh, [Replicate(), Shard(0)]))
        assert found.placements == (Shard(0), Shard(1))
        torch.testing.assert_close(settled(found.full_tensor()), x @ weight.T)
