"""A patched training step as a CUDA graph: the host reads no value on the GPU, and results are an eager step's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import assert_same, build, pair, step, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ridgeline
from ridgeline import hf
from ridgeline.hf import attention, positions
from ridgeline.optim import AdamW

# What gives the host a value, or a tensor whose size only values tell.
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount")
MODELS = ("Llama", "Qwen3", "Gemma2", "GptOss")


class Reads(TorchDispatchMode):
    """Notes the operators that make the host wait: reads, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()}
        if kwargs.get("device") is not None and devices:
            devices.add(torch.device(kwargs["device"]).type)
        if name in READS or (name in ("copy_", "_to_copy") and len(devices) > 1):
            self.found.append(name)
        return func(*args, **kwargs)


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, a CUDA graph seems to be captured."""
    with monkeypatch.context() as inside:
        inside.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def faked(model: Any) -> None:
    """Takes a model's values away, inside FakeTensorMode: then reading one raises."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty_like(p, device="cpu"))
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty_like(b, device="cpu")
    model.tie_weights()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "memory"), [(1, None), (2, "recompute")])
def test_the_host_reads_no_value(name: str, batch: int, memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = build(name), []
    hf.patch(model, memory=memory)
    own = attention.mask

    def mask(*given: Any, **named: Any) -> Any:
        masks.append(own(*given, **named))
        return masks[-1]

    from transformers import AttentionMaskInterface

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, attention.NAME, mask)
    with FakeTensorMode(allow_non_fake_inputs=True), Reads() as reads:
        faked(model)
        ids = torch.empty(batch, 21, dtype=torch.int64)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert loss.dtype == torch.float32
    assert not reads.found
    assert all(p.grad is not None for p in model.parameters())
    assert masks
    assert all(m is None for m in masks), "a mask lies in memory, though no sequences are packed"


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_neither_padding_nor_positions_are_read(name: str) -> None:
    """Also by the kernels' launchers, where they are interpreted."""
    model = build(name)
    hf.patch(model)
    with FakeTensorMode(allow_non_fake_inputs=True), Reads() as reads:
        faked(model)
        ids, seen = torch.empty(2, 21, dtype=torch.int64), torch.empty(2, 21, dtype=torch.int64)
        for given in ({}, {"attention_mask": seen}, {"position_ids": ids}):
            model(input_ids=ids, labels=ids, use_cache=False, **given).loss.backward()
    assert not reads.found


def test_the_optimizer_reads_no_value() -> None:
    with FakeTensorMode(), Reads() as reads, torch.no_grad():
        weights = [torch.nn.Parameter(torch.empty(8, 4, device="cuda")) for _ in range(3)]
        for w in weights:
            w.grad = torch.empty_like(w)
        optimizer = AdamW(weights, capturable=True)
        for _ in range(2):
            ridgeline.clip_grad_norm(weights, 1.0)
            optimizer.step()
    assert not reads.found


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_a_capture_is_an_eager_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, padded and packed batches: what cannot be read is honoured by a mask in memory."""
    own, ours = pair(name)
    hf.patch(ours)
    ids, seen = tokens(), torch.tensor([[0] * 5 + [1] * 16, [1] * 21])
    packed = torch.cat([torch.arange(n) for n in (5, 9, 7)])[None]
    for given, live in (
        ({"labels": ids}, None),
        ({"labels": ids.masked_fill(seen.cumsum(1) < 2, -100), "attention_mask": seen}, seen == 1),
        ({"labels": ids, "position_ids": packed.expand(2, -1)}, None),
        ({"labels": ids, "position_ids": torch.arange(21)[None]}, None),
    ):
        wanted = step(own, input_ids=ids, use_cache=False, **given)
        with capturing(monkeypatch):
            assert_same(wanted, step(ours, input_ids=ids, use_cache=False, **given), live)


def test_positions_are_noted_for_the_innermost_call() -> None:
    model, noted = build("Llama"), []
    hf.patch(model)
    ids = tokens()
    place = torch.arange(ids.shape[1])[None]
    model.model.layers[0].register_forward_pre_hook(lambda *_: noted.append(positions.rise()))
    model(ids)
    model(ids, None, place)
    model(ids, position_ids=place)
    assert noted == [True, False, False]
    assert not positions.rise()
    with pytest.raises(AttributeError):
        model(ids, attention_mask=3.5)
    assert not positions._CALLS.models, "a call that raised is still noted"
    hf.unpatch(model)
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks_with_kwargs
    assert not model.model._forward_hooks_always_called


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_a_captured_step(name: str) -> None:
    """Three steps by one CUDA graph, after warm-up, against three eager ones: losses and weights agree."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
    eager, captured = (m.to("cuda", torch.bfloat16) for m in pair(name, **sizes))
    ids = torch.randint(3, 1000, (1, 128), device="cuda")
    steps = []
    for model in (eager, captured):
        hf.patch(model)
        optimizer = AdamW(model.parameters(), lr=1e-3, capturable=True)

        def one(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        steps.append(one)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            steps[1]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = steps[1]()
    losses = []
    for _ in range(3):
        graph.replay()
        losses.append(float(loss))
    found = [float(steps[0]()) for _ in range(6)][3:]
    assert losses == pytest.approx(found, rel=2e-3)
    for (n, a), b in zip(eager.named_parameters(), captured.parameters(), strict=True):
        apart, moved = float((a - b).float().norm()), float(a.float().norm())
        assert apart <= 0.02 * moved, f"{n} is {apart:.3g} off, of {moved:.3g}"
