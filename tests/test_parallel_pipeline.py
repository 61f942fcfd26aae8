"""Pipelines over `lm`'s model: gradients as one process has them, messages as the formula says."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from ridgeline.lm.model import Transformer
from ridgeline.op import RidgelineError
from ridgeline.parallel import context, groups, pipeline
from ridgeline.parallel.rung import observed
from test_parallel_ladders import SIZE, batch


def model(layers: int = 4, tied: bool = False) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(SIZE, layers=layers, tied=tied), "torch")


def trained(name: str) -> None:
    [rung] = [r for r in pipeline.LADDER if r.name == name]
    one, own = model(), model()
    pipe = rung.wrap(own, 4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    plain = torch.optim.SGD(one.parameters(), lr=0.1)
    for n in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        wanted = one(*batch(n))
        wanted.backward()
        with observed() as seen:
            loss = pipe.step(*batch(n))
        assert (loss is not None) == (groups.rank() == groups.size() - 1)
        if loss is not None:
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
        if n:  # the first step also exchanges shapes
            formula = rung.traffic(own, groups.rank(), groups.size(), 8, 6, 4)
            assert (seen.calls["send"], seen.bytes["send"]) == (formula.calls["send"], formula.bytes["send"])
            assert pipe.live.most == rung.live(groups.rank(), groups.size(), 4)
            assert pipe.live.now == 0
        for (key, p), q in zip(own.named_parameters(), one.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}")
        optimizer.step()
        plain.step()
    held = sum(p.grad is not None for p in own.parameters())
    assert held == sum(1 for _ in pipe.parameters())
    assert sum(p.nbytes for p in pipe.parameters()) == rung.held(own, groups.rank(), groups.size()).weights


@pytest.mark.parametrize("name", [rung.name for rung in pipeline.LADDER])
def test_a_pipeline_trains_as_one_process(name: str) -> None:
    groups.spawn(trained, 2, name)


def test_1f1b_keeps_fewer_activations() -> None:
    kept = {rung.name: [rung.live(here, 4, 8) for here in range(4)] for rung in pipeline.LADDER}
    assert kept == {
        "gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1], "interleaved": [11, 9, 7, 5], "zero-bubble": [8, 7, 6, 5],
    }  # fmt: skip


def refused() -> None:
    gpipe, _, interleaved, _ = pipeline.LADDER
    with pytest.raises(RidgelineError, match="3 layers cannot be divided among 2 ranks of 1 stages"):
        gpipe.wrap(model(3), 2)
    with pytest.raises(RidgelineError, match="cannot share a tied weight"):
        gpipe.wrap(model(tied=True), 2)
    with pytest.raises(RidgelineError, match="multiples of the 2 ranks, but got 3"):
        interleaved.wrap(model(), 3)


def loses_a_rank(what: str) -> None:
    """Rank 1 is killed between two steps; rank 0 waits for it in the middle of its own."""
    pipe = pipeline.LADDER[1].wrap(model(), 4)
    q = torch.ones(1, 2, 4, 16)

    def run() -> None:
        if what == "pipeline":
            pipe.step(*batch(0))
        else:
            with groups.answered("attention"):
                context.ring_attention(q, q, q, causal=True)

    run()
    if groups.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run()


@pytest.mark.parametrize(("what", "says"), [("pipeline", "the pipeline"), ("ring", "attention")])
def test_a_lost_rank_is_one_sentence(what: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GRACE", 1.0)
    start = time.monotonic()
    zero, one = groups.spawn(loses_a_rank, 2, what, timeout=5, check=False)
    assert time.monotonic() - start < 20
    assert "exit code -9" in one.error
    assert zero.error == (
        f"parallel: rank 0 of 2 cannot go on with {says}, because another rank has ended or did not answer in time"
    )


def test_refusals() -> None:
    groups.spawn(refused, 2)


def test_idle_shares_fall_along_the_ladder() -> None:
    shares = [rung.idle(4, 8) for rung in pipeline.LADDER]
    assert shares[:3] == [3 / 11, 3 / 11, 3 / 19]
    assert shares[3] < shares[2]
