"""Patched models under DistributedDataParallel and FSDP2, in a group of one process on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import pair, step, tokens
from torch.distributed.fsdp import fully_shard

from ridgeline import hf
from ridgeline.parallel.fp8_gathering import Shard
from ridgeline.parallel.fsdp2 import apply, blocks


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def assert_same_gradients(own: Any, ours: Any) -> None:
    for (name, p), q in zip(own.named_parameters(), ours.named_parameters(), strict=True):
        grad = q[1].grad.full_tensor() if hasattr(q[1].grad, "full_tensor") else q[1].grad
        torch.testing.assert_close(grad, p.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_data_parallel(options: dict[str, bool], mesh: Any) -> None:
    own, ours = pair("Llama")
    hf.patch(ours, memory="recompute")
    ids = tokens()
    step(own, input_ids=ids, labels=ids)
    step(torch.nn.parallel.DistributedDataParallel(ours, **options), input_ids=ids, labels=ids)
    assert_same_gradients(own, ours)


@pytest.mark.parametrize("memory", [None, "recompute", "products"])
@pytest.mark.parametrize("head_apart", [False, True])
def test_fsdp(memory: str | None, head_apart: bool, mesh: Any) -> None:
    own, ours = pair("Llama")
    hf.patch(ours, memory=memory)
    for module in (*ours.model.layers, *([ours.lm_head] if head_apart else [])):
        fully_shard(module, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    ids = tokens()
    step(own, input_ids=ids, labels=ids)
    ours(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients(own, ours)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_apply(architecture: str, checkpointing: bool, mesh: Any) -> None:
    own, ours = pair(architecture)
    hf.patch(ours)
    assert blocks(ours) == [*ours.model.layers]
    apply(ours.train(), mesh, checkpointing=checkpointing)
    seen: list[int] = []
    ours.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    ids = tokens()
    step(own, input_ids=ids, labels=ids)
    ours(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients(own, ours)
    assert len(seen) == 1 + checkpointing


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_in_8_bits_gathers_8_bits(checkpointing: bool, mesh: Any) -> None:
    """The same bits as the patched model without ranks."""
    own, ours = pair("Llama")
    for model in (own, ours):
        hf.patch(model.train(), quantize="fp8-training")
    apply(ours, mesh, checkpointing=checkpointing, fp8_gather=True)
    shards = [p for p in ours.parameters() if isinstance(p._local_tensor, Shard)]
    assert len(shards) == 7 * len(own.model.layers)
    ids = tokens()
    for _ in range(2):
        losses = [step(model, input_ids=ids, labels=ids)[1] for model in (own, ours)]
        assert torch.equal(*losses)
        for (name, p), q in zip(own.named_parameters(), ours.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad.full_tensor()), name
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
                q.sub_(q.grad, alpha=0.1)
