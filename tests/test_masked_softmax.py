"""Dropout of masked_softmax: which seeds it accepts, and that replays of a CUDA graph differ."""

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("impl", ["naive", "torch", "triton"])
@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_seeds_of_64_bits(seed: int, impl: str, device: str) -> None:
    x, mask = torch.ones(3, 40, device=device), torch.ones(40, dtype=torch.bool, device=device)
    found = ridgeline.masked_softmax(x, mask, dropout_p=0.5, seed=seed, impl=impl)
    torch.testing.assert_close(
        found, ridgeline.masked_softmax(x, mask, dropout_p=0.5, seed=torch.tensor(seed, device=device), impl="naive")
    )


@pytest.mark.parametrize("seed", [2**63, 2**70, -(2**63) - 1])
def test_wider_seeds_are_refused(seed: int, device: str) -> None:
    x, mask = torch.ones(3, 40, device=device), torch.ones(40, dtype=torch.bool, device=device)
    with pytest.raises(RidgelineError, match=f"masked_softmax: seed must be an int of 64 bits, .* but is {seed}$"):
        ridgeline.masked_softmax(x, mask, dropout_p=0.5, seed=seed)


@pytest.mark.gpu
def test_replays_draw_anew() -> None:
    """Without a seed one is drawn on the device, so that every replay of a CUDA graph drops other elements."""
    x, mask = torch.ones(64, 256, device="cuda"), torch.ones(256, dtype=torch.bool, device="cuda")
    ridgeline.masked_softmax(x, mask, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ridgeline.masked_softmax(x, mask, dropout_p=0.5)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
