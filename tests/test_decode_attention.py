"""decode_attention beyond its cases: quantised caches, lengths at every edge, memory that no key owns, many parts."""

import itertools

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError
from ridgeline.ops.decode import _split_keys

pytestmark = pytest.mark.kernels
B, S, HEADS, SHARED, D, BLOCK, MOST = 4, 2, 4, 2, 32, 16, 6
KINDS = ("int8", "int4", "float8_e4m3fn")


def scales(shape: tuple[int, ...], per: str, zeros: bool, kind: str, device: str) -> dict[str, torch.Tensor]:
    """Scales of about the size of normal data in so many levels."""
    size = {"tensor": (), "one": (1,), "head": (shape[2],), "token": shape[:3]}[per]
    one = {"int8": 0.02, "int4": 0.3, "float8_e4m3fn": 0.01}[kind]
    made = {f"{n}_scale": one * (1 + torch.rand(size, device=device)) for n in "kv"}
    if zeros:
        made |= {f"{n}_zero": torch.randint(3, 9, size, device=device).float() for n in "kv"}
    return made


def cache(shape: tuple[int, ...], kind: str, device: str) -> torch.Tensor:
    if kind == "int8":
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    if kind == "int4":
        return torch.randint(0, 256, (*shape[:3], shape[3] // 2), dtype=torch.uint8, device=device)
    return (100 * torch.randn(shape, device=device)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("kind", "per", "zeros"),
    [
        (k, p, z)
        for k, p, z in itertools.product(KINDS, ("tensor", "one", "head", "token"), (False, True))
        if not (z and k == "float8_e4m3fn")
    ],
)
def test_quantised_caches(device: str, kind: str, per: str, zeros: bool, paged: bool) -> None:
    """Levels, scales and results are the reference's; a level may differ by one where rounding ties."""
    torch.manual_seed(0)
    shape = (B * MOST, BLOCK, SHARED, D) if paged else (B, 90, SHARED, D)
    k_cache, v_cache = (cache(shape, kind, device) for _ in range(2))
    facts = scales(shape, per, zeros, kind, device)
    q, k, v = (torch.randn(B, S, h, D, device=device) for h in (HEADS, SHARED, SHARED))
    lengths = torch.tensor([0, 5, -1, 80], dtype=torch.int32, device=device)
    more = {"block_table": torch.randperm(B * MOST, device=device).int().view(B, MOST)} if paged else {}
    found = []
    for impl in ("torch", "triton"):
        mine = [k_cache.clone(), v_cache.clone()], {n: t.clone() for n, t in facts.items()}
        o = ridgeline.decode_attention(q, *mine[0], lengths, k=k, v=v, **mine[1], **more, impl=impl)
        found.append((o, *mine[0], *mine[1].values()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2, atol=2e-2 if kind == "int4" else 1e-2)
    for expected, got in zip(found[0][1:3], found[1][1:3], strict=True):
        different = expected.view(torch.uint8) != got.view(torch.uint8)
        assert different.float().mean() < 0.01
    for expected, got in zip(found[0][3:], found[1][3:], strict=True):
        torch.testing.assert_close(got, expected)
    assert (found[1][0][2] == 0).all()


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 95])
def test_every_length(device: str, length: int) -> None:
    """Lengths around every edge of a block, in a table that is garbage past the end, over memory that is NaN there."""
    torch.manual_seed(length)
    shape = (MOST + 1, BLOCK, SHARED, D)
    k_cache, v_cache = (torch.full(shape, float("nan"), device=device) for _ in range(2))
    table = torch.full((1, MOST + 3), 1 << 30, dtype=torch.int32, device=device)
    used = -(-(length + 1) // BLOCK)
    table[0, :used] = torch.randperm(MOST + 1, device=device)[:used].int()
    for n in range(length):
        for t in (k_cache, v_cache):
            t[table[0, n // BLOCK], n % BLOCK] = torch.randn(SHARED, D, device=device)
    q, k, v = (torch.randn(1, 1, h, D, device=device) for h in (HEADS, SHARED, SHARED))
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    found = []
    for impl in ("naive", "triton"):
        caches = k_cache.clone(), v_cache.clone()
        o = ridgeline.decode_attention(q, *caches, lengths, k=k, v=v, block_table=table, impl=impl)
        found.append((o, *caches))
    assert found[1][0].isfinite().all()
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_many_parts(device: str, sinks: bool, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of different lengths in up to nine parts each, empty ones among them."""
    monkeypatch.setattr(_split_keys, "parts_of", lambda *_: 9)
    torch.manual_seed(1)
    q = torch.randn(3, 1, HEADS, D, device=device)
    caches = [torch.randn(3, 400, SHARED, D, device=device) for _ in range(2)]
    lengths = torch.tensor([0, 399, 130], dtype=torch.int32, device=device)
    given = {"sinks": torch.randn(HEADS, device=device) if sinks else None, "return_lse": True, "invariant": invariant}
    expected = ridgeline.decode_attention(q, *caches, lengths, **given, impl="torch")
    got = ridgeline.decode_attention(q, *caches, lengths, **given, impl="triton")
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_a_sequence_gets_the_same_bits_in_any_batch(device: str) -> None:
    torch.manual_seed(2)
    q = torch.randn(3, 1, HEADS, D, device=device)
    caches = [torch.randn(3, 600, SHARED, D, device=device) for _ in range(2)]
    lengths = torch.tensor([600, 31, 333], dtype=torch.int32, device=device)
    call = ridgeline.decode_attention
    together = call(q, *caches, lengths, invariant=True, impl="triton")
    for b in range(3):
        one = slice(b, b + 1)
        alone = call(q[one], caches[0][one], caches[1][one], lengths[one], invariant=True, impl="triton")
        assert torch.equal(alone[0], together[b])
        short = [t[one, : max(16, int(lengths[b]))] for t in caches]  # another capacity, perhaps one part
        assert torch.equal(call(q[one], *short, lengths[one], invariant=True, impl="triton")[0], together[b])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tokens_past_the_end_are_seen_and_not_written(device: str, kind: str) -> None:
    torch.manual_seed(3)
    shape = (2, 16, SHARED, D)
    caches = [cache(shape, kind, device) for _ in range(2)]
    facts = scales(shape, "head", False, kind, device)
    q, k, v = (torch.randn(2, 2, h, D, device=device) for h in (HEADS, SHARED, SHARED))
    lengths = torch.tensor([15, 16], dtype=torch.int32, device=device)
    found = [
        ridgeline.decode_attention(q, *[c.clone() for c in caches], lengths, k=k, v=v, **facts, impl=impl)
        for impl in ("torch", "triton")
    ]
    # The reference sees such a token unquantised.
    torch.testing.assert_close(found[1], found[0], rtol=5e-2, atol=2e-1 if kind == "int4" else 2e-2)


@pytest.mark.parametrize("sink", [-float("inf"), -50.0, 300.0])
@pytest.mark.parametrize("length", [0, 700])
def test_sinks_of_any_size(device: str, sink: float, length: int) -> None:
    q = torch.randn(1, 1, HEADS, D, device=device)
    caches = [torch.randn(1, 1024, SHARED, D, device=device) for _ in range(2)]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    given = {"sinks": torch.full((HEADS,), sink, device=device), "return_lse": True}
    expected = ridgeline.decode_attention(q, *caches, lengths, **given, impl="torch")
    got = ridgeline.decode_attention(q, *caches, lengths, **given, impl="triton")
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_autograd_learns_what_is_written(device: str) -> None:
    """A cache that was saved for backward and appended to since is an error, as after any change in place."""
    q, k = torch.randn(2, 1, 4, 32, device=device), torch.randn(2, 1, 2, 32, device=device)
    cache, other = (torch.randn(2, 64, 2, 32, device=device) for _ in range(2))
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    before = cache._version
    ridgeline.decode_attention(q, cache, other, lengths)
    assert cache._version == before
    ridgeline.decode_attention(q, cache, other, lengths, k=k, v=k)
    assert cache._version > before


def test_bad_input(device: str) -> None:
    q, k = torch.randn(2, 1, 4, 32, device=device), torch.randn(2, 1, 2, 32, device=device)
    cache, lengths = torch.randn(2, 64, 2, 32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    bad = {
        "lengths must be": (q, cache, cache, lengths.long()),
        "multiple of the caches' heads": (q[:, :, :3], cache, cache, lengths),
        "1 to 16": (q.expand(2, 17, 4, 32), cache, cache, lengths),
        "the caches must both be": (q, cache, cache[:, :3], lengths),
        "q's dtype": (q, cache.half(), cache.half(), lengths),
        "needs k_scale": (q, cache.to(torch.int8), cache.to(torch.int8), lengths),
    }
    for words, args in bad.items():
        with pytest.raises(RidgelineError, match=words):
            ridgeline.decode_attention(*args)
    options = {
        "given together": {"k": k},
        "multiple of 16 tokens": {"block_table": table},
        "window and tree": {"window": 3, "tree": torch.ones(2, 1, 1, dtype=torch.bool, device=device)},
        "k_scale is for a quantised cache": {"k_scale": torch.ones((), device=device)},
        "window must be": {"window": -2},
        "softcap must be": {"softcap": 0.0},
        "sinks must be": {"sinks": torch.randn(3, device=device)},
        "positions must be": {"positions": torch.zeros(2, 2, dtype=torch.int64, device=device)},
    }
    for words, given in options.items():
        caches = cache[:, :40] if "block_table" in given else cache
        with pytest.raises(RidgelineError, match=words):
            ridgeline.decode_attention(q, caches, caches, lengths, **given)
    if device == "cpu":
        with pytest.raises(RidgelineError, match="from -1 to the cache's 64"):
            ridgeline.decode_attention(q, cache, cache, lengths + 70)
