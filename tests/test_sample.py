"""sample beyond its cases: the distribution of its draws, ties, bad rows, limits of filters, seeds on the device."""

import math
from typing import Any

import pytest
import torch

import ridgeline
from graphs import captured

pytestmark = pytest.mark.kernels
INTERPRETED = not torch.cuda.is_available()
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
]


def distribution(row: list[float], temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0,
                 min_p: float = 0.0) -> list[float]:  # fmt: skip
    """The exact distribution of a row, in plain Python."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top_k]
    weight = {i: math.exp((row[i] - max(row)) / temperature) for i in ranked}
    total, sums, kept = sum(weight.values()), 0.0, []
    for i in ranked:
        if sums >= top_p * total and kept:
            break
        kept.append(i)
        sums += weight[i]
    kept = [i for i in kept if weight[i] >= min_p]
    mass = sum(weight[i] for i in kept)
    return [weight[i] / mass if i in kept else 0.0 for i in range(len(row))]


def agree(impl: str, device: str, draws: int, given: dict[str, Any]) -> None:
    """Fails if the draws of equal rows differ from the exact distribution more than one time in 10^6."""
    torch.manual_seed(3)
    row = torch.randn(13) * 2
    tokens = ridgeline.sample(row.to(device).expand(draws, 13), seed=17, offset=2, impl=impl, **given)
    counts = tokens.bincount(minlength=13).cpu().tolist()
    chances = distribution(row.tolist(), **given)
    assert [c for c, p in zip(counts, chances, strict=True) if p == 0 and c] == []
    found = sum((c - draws * p) ** 2 / (draws * p) for c, p in zip(counts, chances, strict=True) if p)
    freedom = sum(p > 0 for p in chances) - 1
    a = 2 / (9 * max(freedom, 1))  # Wilson and Hilferty's normal approximation of chi-square
    assert (found / max(freedom, 1)) ** (1 / 3) < 1 - a + 4.75 * math.sqrt(a)


def draw(x: torch.Tensor, impl: str = "triton", **given: Any) -> list[int]:
    """Tokens of a rung, which must be the definition's."""
    given = {"seed": 5, "offset": 3} | given
    tokens, chances = ridgeline.sample(x, impl=impl, return_logprobs=True, **given)
    expected, logs = ridgeline.sample(x, impl="naive", return_logprobs=True, **given)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(chances, logs.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
    return tokens.tolist()


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_distribution_in_pytorch(given: dict[str, Any]) -> None:
    agree("torch", "cpu", 10**6 // len(SETTINGS), given)


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_distribution_of_kernels(device: str, given: dict[str, Any]) -> None:
    agree("triton", device, 8 if INTERPRETED else 10**6, given)


def test_the_rows_of_a_batch_and_offsets_draw_apart(device: str) -> None:
    x = torch.zeros(6, 64, device=device)
    found = [tuple(draw(x, seed=s, offset=o)) for s, o in ((1, 0), (1, 1), (2, 0), (1 << 32, 0))]
    assert len(set(found)) == 4
    assert len(set(found[0])) > 1
    assert draw(x, seed=1, offset=1 << 32) == list(found[0])


@pytest.mark.parametrize("k", [2, 5])
def test_ties_at_the_cut_stay_by_index(device: str, k: int) -> None:
    x = torch.tensor([[0.0, 2, -0.0, 2, 0, 2, 2, 1]], device=device).expand(12, 8)
    assert set(draw(x, top_k=k)) <= set([1, 3, 5, 6, 7][:k])
    assert set(draw(x, top_k=k, temperature=100.0)) == set([1, 3, 5, 6, 7][:k])
    even = torch.zeros(4, 10, device=device)
    assert set(draw(even, top_p=0.35)) <= {0, 1, 2, 3}  # a mass of 3.5 takes four
    assert set(draw(even, top_k=4, top_p=0.5)) <= {0, 1}


def test_rows_without_a_token(device: str) -> None:
    x = torch.randn(6, 33, device=device)
    clean = draw(x)
    x[1, 7], x[3], x[4, 32] = math.nan, -math.inf, -math.nan
    found = draw(x)
    assert [found[n] for n in (1, 3, 4)] == [-1] * 3
    assert [found[n] for n in (0, 2, 5)] == [clean[n] for n in (0, 2, 5)]
    assert draw(x, top_k=4, top_p=0.5)[1] == -1
    hot = torch.tensor([1.0, 1, math.nan, 1, 1, 1], device=device)
    assert draw(x, temperature=hot)[2] == -1


@pytest.mark.parametrize("shape", [(4, 29), (29,)])
def test_masks(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(4, 29, device=device)
    mask = torch.arange(29, device=device).expand(shape) % 3 == 1
    x[:, 0] = math.nan  # not allowed, and so ignored
    x[2, 3] = math.inf
    assert all(token % 3 == 1 for token in draw(x, mask=mask, top_k=50))
    assert draw(x, mask=mask & False) == [-1] * 4
    wide = torch.zeros(29, 4, dtype=torch.bool, device=device)
    wide[5] = True
    assert draw(x, mask=wide.T, top_p=0.9) == [5] * 4


def test_parameters_of_rows(device: str) -> None:
    x = torch.randn(5, 40, device=device)
    x[1] = x[0]
    given = {
        "temperature": torch.tensor([0.0, 1, 0.5, 2, 1], device=device),
        "top_k": torch.tensor([9, 1, 40, 1000, 0], device=device),
        "top_p": torch.tensor([0.5, 1, 0.3, 0, 1], device=device, dtype=torch.float64),
        "min_p": torch.tensor([0.0, 1, 0.1, 0.5, 0], device=device),
    }
    found = draw(x, **given)
    assert [found[n] for n in (0, 1, 3, 4)] == x.argmax(1)[[0, 1, 3, 4]].tolist()
    one = {name: value[2] for name, value in given.items()}
    assert draw(x, **one)[2] == found[2]


def test_limits_of_the_filters(device: str) -> None:
    x = torch.randn(8, 31, device=device)
    best, free = x.argmax(1).tolist(), draw(x)
    for given in ({"top_k": 31}, {"top_k": 1 << 40}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0.0}):
        assert draw(x, **given) == free
    for given in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": 1e-38}):
        assert draw(x, **given) == best
    assert draw(torch.zeros(2, 9, device=device), temperature=0) == [0, 0]


def test_infinities(device: str) -> None:
    x = torch.randn(12, 17, device=device)
    x[:, 4] = -math.inf
    assert 4 not in draw(x)
    x[:, [3, 9, 11]] = math.inf
    assert set(draw(x)) == {3, 9, 11}
    assert set(draw(x, top_k=2)) == {3, 9}
    assert set(draw(x, top_p=0.3, min_p=0.5)) == {3}
    x[:, 3] = 3e38
    assert set(draw(x, temperature=1e-30)) == {9, 11}


@pytest.mark.parametrize(("B", "V"), [(1, 1), (1, 2), (1, 77), (3, 1025)])
def test_sizes_and_strides(device: str, B: int, V: int) -> None:
    x = torch.randn(B, V, device=device)
    given: dict[str, Any] = {"top_k": 40, "top_p": 0.8, "min_p": 0.01}
    found = draw(x, **given)
    assert draw(x.T.contiguous().T, **given) == found
    wide = torch.zeros(2 * B, 2 * V, device=device)
    wide[::2, ::2] = x
    assert draw(wide[::2, ::2], **given) == found
    assert draw(x.half(), top_k=3)


def test_seeds_from_pytorch(device: str) -> None:
    x = torch.zeros(8, 512, device=device)
    torch.manual_seed(1)
    found = [ridgeline.sample(x).tolist() for _ in range(2)]
    torch.manual_seed(1)
    assert found == [ridgeline.sample(x).tolist() for _ in range(2)]
    assert found[0] != found[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "dtype"), [(77, torch.float32), (32000, torch.bfloat16), (128256, torch.float32)])
def test_served_kernels_agree(V: int, dtype: torch.dtype) -> None:
    """Every kernel that serves draws the same tokens, row by row, under every setting."""
    x = (torch.randn(64, V, device="cuda") * 3).to(dtype)
    x[5, 3], x[7], x[9] = math.nan, -math.inf, 1.0
    x[11, 1::2] = math.inf
    for given in (*SETTINGS, {"top_k": 50, "top_p": 0.9}, {"top_k": 3000}, {"top_p": 0.999}, {"temperature": 0.0}):
        expected = ridgeline.sample(x, seed=9, offset=4, impl="triton", return_logprobs=True, **given)
        found = ridgeline.sample(x, seed=9, offset=4, return_logprobs=True, **given)
        assert found[0].tolist() == expected[0].tolist(), given
        torch.testing.assert_close(found[1], expected[1], equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_graphs_read_seed_and_offset_anew() -> None:
    x = torch.randn(16, 4096, device="cuda")
    seed, offset = torch.tensor(3, device="cuda"), torch.tensor(0, device="cuda")
    replay = captured(lambda: ridgeline.sample(x, top_k=50, top_p=0.9, seed=seed, offset=offset))
    for s, o in ((3, 0), (3, 1), (-(2**62), 1), (3, 0)):
        seed.fill_(s), offset.fill_(o)
        assert replay().tolist() == ridgeline.sample(x, top_k=50, top_p=0.9, seed=s, offset=o).tolist()
    fresh = captured(lambda: ridgeline.sample(x * 0))
    assert fresh().tolist() != fresh().tolist()
