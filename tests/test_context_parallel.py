"""Ops beside DTensors and inside torch's context_parallel: what a kernel cannot do right raises, in one sentence."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import ridgeline
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels


@pytest.fixture
def mesh(tmp_path) -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif("LOCAL_RANK" in os.environ, reason="makes a process group of its own")
def test_attention_raises_while_the_sequence_is_sharded(mesh: object, device: str) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    q = torch.randn(1, 2, 16, 16, device=device)
    buffer = torch.zeros(16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: ridgeline.attention(q, q, q), backend="aot_eager")
    compiled(q)  # what is compiled outside the context is not used inside
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
        for call in (
            lambda: ridgeline.attention(q, q, q),
            lambda: compiled(q),
            lambda: ridgeline.attention(q.clone().requires_grad_(), q, q, causal=True),
        ):
            with pytest.raises(RidgelineError, match="context_parallel"):
                call()
    torch.testing.assert_close(ridgeline.attention(q, q, q), ridgeline.attention(q, q, q, impl="torch"))


def test_other_ops_say_that_they_take_no_dtensor(mesh: object, device: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    if device != "cpu":
        pytest.skip("the mesh is of CPUs")
    for call in (
        lambda: ridgeline.rms_norm(x),
        lambda: ridgeline.softmax(x),
        lambda: ridgeline.rms_norm(torch.randn(8, 16), x[0]),  # plain tensors and DTensors
        lambda: ridgeline.rms_norm(x.detach().requires_grad_()),
    ):
        with pytest.raises(RidgelineError, match=r"a tensor is a DTensor, and kernels take plain tensors; .*to_local"):
            call()
