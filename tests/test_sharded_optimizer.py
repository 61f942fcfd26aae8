"""DTensors in the optimizer and in clip_grad_norm: FSDP2 over gloo trains as one process does; other wrappers raise."""

import math
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import ridgeline
import ridgeline.nn
from ridgeline import optim
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels


def rank(world: int) -> None:
    """Trains one rank's shards beside a whole copy of the model, and compares both."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    def model() -> nn.Module:
        torch.manual_seed(1)
        # Shards of 5 rows are uneven, and of one row empty on the second rank.
        return nn.Sequential(nn.Linear(13, 40), ridgeline.nn.RMSNorm(40, eps=1e-6), nn.Linear(40, 5), nn.Linear(5, 1))

    whole, sharded = model(), model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ours = optim.AdamW(sharded.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(8, 13, generator=torch.Generator().manual_seed(step))
        for net in (whole, sharded):
            net.zero_grad()
            net(x).square().mean().backward()
        for limit, order in ((0.05, 2.0), (1e6, 2.0), (0.02, math.inf), (0.01, 3.0)):
            wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), limit, order)
            found = ridgeline.clip_grad_norm(sharded.parameters(), limit, order)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
        theirs.step()
        ours.step()
    for name, p in sharded.named_parameters():
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), whole.get_parameter(name), rtol=2e-5, atol=2e-6)
        assert {type(s) for k, s in ours.state[p].items() if k != "step"} == {DTensor}
    ours.load_state_dict(ours.state_dict())
    ours.step()

    # Replicas count once beside shards, and plain tensors beside both.
    full = torch.arange(12.0).view(4, 3)
    grads = [distribute_tensor(full.clone(), mesh, [p]) for p in (Shard(0), Replicate())] + [full.clone()]
    norm = ridgeline.clip_grad_norm(grads, 1.0)
    torch.testing.assert_close(norm, (3 * full.square().sum()).sqrt())
    torch.testing.assert_close(grads[0].full_tensor(), full / (norm + 1e-6))
    torch.testing.assert_close(grads[2], full / (norm + 1e-6))
    for dtype in (torch.float32, torch.float64):  # on the second rank all shards are empty
        row = distribute_tensor(torch.full((1, 4), 3.0, dtype=dtype), mesh, [Shard(0)])
        norm = ridgeline.clip_grad_norm([row], math.inf)
        assert norm == 6
        assert norm.dtype == dtype
    # Each rank has another kind first; the collectives have one order nevertheless.
    kinds = (Shard(0), torch.float32), (Shard(1), torch.float64)
    grads = [distribute_tensor(full.to(dtype), mesh, [where]) for where, dtype in kinds]
    norm = ridgeline.clip_grad_norm(grads[:: 1 - 2 * dist.get_rank()], math.inf)
    torch.testing.assert_close(norm, (2 * full.double().square().sum()).sqrt(), rtol=1e-6, atol=0)
    with pytest.raises(RidgelineError, match="partial sums"):
        ridgeline.clip_grad_norm([DTensor.from_local(full.clone(), mesh, [Partial()])], 1.0)
    p, m, v = (distribute_tensor(full.clone(), mesh, [Shard(0)]) for _ in range(3))
    with pytest.raises(RidgelineError, match="sharded alike"):
        ridgeline.adamw([p], [full.clone()], [m], [v], 1)
    # Autograd knows that a DTensor has changed since it was saved.
    p.requires_grad_()
    saved = (p * p).sum()
    ridgeline.adamw([p], [m.clone()], [m], [v], 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    dist.destroy_process_group()


@pytest.mark.skipif(not INTERPRETED, reason="its ranks are processes on the CPU")
def test_two_ranks_train_as_one_process() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    paths = os.pathsep.join(["src", "tests", os.environ.get("PYTHONPATH", "")])
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": paths}
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", "import test_sharded_optimizer as t; t.rank(2)"]
    ranks = [subprocess.Popen(command, env=common | {"RANK": str(n)}, cwd=root, stderr=subprocess.PIPE) for n in (0, 1)]
    errors = [r.communicate(timeout=240)[1].decode() for r in ranks]
    assert not any(r.returncode for r in ranks), "\n".join(errors)


class Wrapped(torch.Tensor):
    """A wrapper subclass that is no DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_other_wrappers_raise_one_sentence(device: str) -> None:
    wrong = Wrapped(torch.ones(8, device=device))
    for call in (
        lambda: ridgeline.clip_grad_norm([wrong], 1.0),
        lambda: ridgeline.adamw([wrong], [wrong], [wrong], [wrong], 1),
    ):
        with pytest.raises(RidgelineError, match="Wrapped, a wrapper subclass"):
            call()
