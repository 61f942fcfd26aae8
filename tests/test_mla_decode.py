"""mla_decode beyond its cases: fp8 caches, lengths at every edge, memory that no token owns, parts, invariance."""

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError
from ridgeline.ops.decode import _latent

pytestmark = pytest.mark.kernels
HEADS, D, LATENT, BLOCK, MOST = 5, 48, 32, 16, 4
FACTS: dict[str, Any] = {"latent": LATENT, "scale": 0.2}


@pytest.mark.parametrize("per", ["none", "tensor", "token"])
@pytest.mark.parametrize("paged", [False, True])
def test_fp8(device: str, paged: bool, per: str) -> None:
    torch.manual_seed(0)
    shape = (4 * MOST, BLOCK) if paged else (4, 64)
    cache = torch.randn(*shape, D, device=device).to(torch.float8_e4m3fn)
    q, kv = torch.randn(4, 2, HEADS, D, device=device), torch.randn(4, 2, D, device=device)
    scale = {"none": None, "tensor": torch.tensor(0.5, device=device), "token": torch.rand(shape, device=device)}[per]
    lengths = torch.tensor([0, 5, -1, 60], dtype=torch.int32, device=device)
    table = torch.randperm(4 * MOST, device=device).int().view(4, MOST) if paged else None
    angles = {n: torch.randn(80, 8, device=device) for n in ("cos", "sin")}
    found = []
    for impl in ("naive", "torch", "triton"):
        mine, own = cache.clone(), None if scale is None else scale.clone()
        given = FACTS | angles | {"kv": kv, "block_table": table, "kv_scale": own, "return_lse": True, "impl": impl}
        o, lse = ridgeline.mla_decode(q, mine, lengths, **given)
        assert (o[2] == 0).all()
        found.append((o, lse, mine.float(), torch.zeros(()) if own is None else own))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("length", [0, 1, *range(15, 33), 62])
def test_every_length(device: str, length: int) -> None:
    """A table that is garbage past the end, over memory that is NaN where no token lies."""
    torch.manual_seed(length)
    cache = torch.full((MOST + 1, BLOCK, D), float("nan"), device=device)
    table = torch.full((1, MOST), 1 << 30, dtype=torch.int32, device=device)
    used = -(-(length + 2) // BLOCK)
    table[0, :used] = torch.randperm(MOST + 1, device=device)[:used].int()
    for n in range(length):
        cache[table[0, n // BLOCK], n % BLOCK] = torch.randn(D, device=device)
    q, kv = torch.randn(1, 2, HEADS, D, device=device), torch.randn(1, 2, D, device=device)
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    found = []
    for impl in ("naive", "triton"):
        mine = cache.clone()
        found.append((ridgeline.mla_decode(q, mine, lengths, kv=kv, block_table=table, impl=impl, **FACTS), mine))
    assert found[1][0].isfinite().all()
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("invariant", [False, True])
def test_many_parts(device: str, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_latent, "parts_of", lambda *_: 9)
    q, cache = torch.randn(3, 2, HEADS, D, device=device), torch.randn(3, 300, D, device=device)
    lengths = torch.tensor([0, 300, 130], dtype=torch.int32, device=device)
    given = FACTS | {"return_lse": True, "invariant": invariant}
    found = [ridgeline.mla_decode(q, cache, lengths, impl=impl, **given) for impl in ("torch", "triton")]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_a_sequence_gets_the_same_bits_in_any_batch(device: str) -> None:
    q, cache = torch.randn(3, 1, HEADS, D, device=device), torch.randn(3, 600, D, device=device)
    lengths = torch.tensor([600, 31, 333], dtype=torch.int32, device=device)
    given = FACTS | {"invariant": True, "impl": "triton"}
    together = ridgeline.mla_decode(q, cache, lengths, **given)
    for b in range(3):
        one = slice(b, b + 1)
        assert torch.equal(ridgeline.mla_decode(q[one], cache[one], lengths[one], **given)[0], together[b])


def test_bad_input(device: str) -> None:
    q, cache = torch.randn(2, 1, 4, D, device=device), torch.randn(2, 40, D, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    bad: dict[str, dict[str, Any]] = {
        "latent must be": {"latent": 30},
        "scale must be": {"scale": float("inf")},
        "kv must be": {"kv": torch.randn(2, 2, D, device=device)},
        "multiple of 16 tokens": {"block_table": torch.zeros(2, 2, dtype=torch.int32, device=device)},
        "given together": {"cos": torch.randn(9, 8, device=device)},
        "kv_scale is for": {"kv_scale": torch.ones((), device=device)},
    }
    for words, given in bad.items():
        with pytest.raises(RidgelineError, match=words):
            ridgeline.mla_decode(q, cache, lengths, **(FACTS | given))
