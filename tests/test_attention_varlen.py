"""attention_varlen beyond the law's cases: all options together, neighbouring sequences, reruns, invalid lengths."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import ridgeline
from attention_calls import DTYPES, HERE, kernels, lawful, make, near, options, outcome, qkv, sampled
from ridgeline.boundary import INTERPRETED


@kernels
def test_all_options_of_packed_sequences(device: str) -> None:
    """Checked against the law, and against attention sequence by sequence."""
    lengths = st.lists(
        st.tuples(*[st.integers(0, 30 if INTERPRETED else 400)] * 2), min_size=1, max_size=3 if INTERPRETED else 9
    )

    @sampled(device)
    @hypothesis.given(
        lengths,
        st.integers(1, 2),
        st.integers(1, 2),
        st.sampled_from([16, 24] if INTERPRETED else [16, 64, 80, 128]),
        options(),
    )
    def _(sizes: list[tuple[int, int]], Hkv: int, G: int, D: int, chosen: dict[str, Any]) -> None:
        cu = [
            torch.tensor([0, *n], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for n in zip(*sizes, strict=True)
        ]
        q, k, v = qkv((int(cu[0][-1]), Hkv * G, D), (int(cu[1][-1]), Hkv, D), device)
        packed = outcome(ridgeline.attention_varlen, [q, k, v, *cu], **chosen | {"return_lse": True}, impl="triton")
        single = []
        for n in range(len(sizes)):
            one, other = (slice(int(c[n]), int(c[n + 1])) for c in cu)
            args = [t.transpose(0, 1)[None] for t in (q[one], k[other], v[other])]
            o, lse = ridgeline.attention(*args, **chosen | {"return_lse": True}, impl="triton")
            single.append((o[0].transpose(0, 1), lse[0]))
        o, lse = (torch.cat(parts, n) for n, parts in enumerate(zip(*single, strict=True)))
        near(packed, outcome(lambda *_: (o, lse), [q, k, v]))
        lawful("attention_varlen", [q, k, v, *cu], chosen, ["triton"])


@kernels
def test_packed_sequences_in_half_precision(device: str) -> None:
    """Checked against the law, with sequences that are empty on one side."""
    lengths = st.lists(
        st.tuples(*[st.integers(0, 30 if INTERPRETED else 700)] * 2), min_size=1, max_size=3 if INTERPRETED else 9
    )
    D = st.sampled_from([16, 24] if INTERPRETED else [16, 40, 64, 80, 96, 128, 200, 256])

    @sampled(device)
    @hypothesis.given(lengths, st.integers(1, 2), st.integers(1, 3), D, st.sampled_from(DTYPES[1:]), options())
    def _(sizes: list[tuple[int, int]], Hkv: int, G: int, D: int, dtype: torch.dtype, chosen: dict[str, Any]) -> None:
        cu = [
            torch.tensor([0, *n], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for n in zip(*sizes, strict=True)
        ]
        args = qkv((int(cu[0][-1]), Hkv * G, D), (int(cu[1][-1]), Hkv, D), device, dtype=dtype)
        lawful("attention_varlen", [*args, *cu], chosen, HERE)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_nothing_comes_over_from_other_sequences(impl: str, device: str) -> None:
    """NaN in one sequence, or after the last one, does not spread, forward or backward."""
    size, dtype = (10, torch.float16) if INTERPRETED else (100, torch.bfloat16)
    cu = (
        torch.tensor([0, 2, 3, 5] + [6] * INTERPRETED, dtype=torch.int32, device=device) * size
    )  # a CPU validates it against the number of tokens
    wide = [
        (False, 128, None),
        (True, 128, False),
        (True, 64, None),
        (False, 64, False),
        (True, 80, None),
        (True, 256, None),
    ]
    for causal, D, same in ((False, 16, None), (True, 16, None), *wide * (not INTERPRETED)):
        q, k, v, do = (
            t.detach()
            for t in [
                *qkv((6 * size, 2, D), (6 * size, 1, D), device, dtype=dtype),
                make(6 * size, 2, D, device=device, dtype=dtype),
            ]
        )
        bad = [t.clone() for t in (q, k, v, do)]
        for t in bad:
            t[2 * size : 3 * size] = t[5 * size :] = torch.nan
        both = []
        for *args, incoming in ((q, k, v, do), bad):
            args = [t.requires_grad_() for t in args]
            o = ridgeline.attention_varlen(*args, cu, cu, causal=causal, deterministic=same, impl=impl)
            both.append([o, *torch.autograd.grad(o, args, incoming)])
        for one, other in zip(*both, strict=True):
            for part in (slice(0, 2 * size), slice(3 * size, 5 * size)):
                assert torch.equal(one[part], other[part])


@kernels
@pytest.mark.parametrize("given", [{"causal": True}, {}, {"causal": "bottom_right", "window": (300, None)}], ids=str)
@pytest.mark.parametrize("impl", HERE)
def test_reruns_of_packed_sequences_are_equal(impl: str, given: dict[str, Any], device: str) -> None:
    for D in (16,) if INTERPRETED else (64, 128, 256):
        lengths, times = ((13, 0, 20, 7), 2) if INTERPRETED else ((1500, 0, 130, 3000, 64, 700, 2100, 1, 505), 500)
        cu = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        args = [*qkv((sum(lengths), 4, D), (sum(lengths), 2, D), device, dtype=torch.float16), cu, cu]
        first = outcome(ridgeline.attention_varlen, args, **given, return_lse=True, impl=impl)
        for _ in range(times):
            again = outcome(ridgeline.attention_varlen, args, **given, return_lse=True, impl=impl)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("impl", HERE)
def test_wrong_lengths_touch_nothing_else(impl: str, D: int) -> None:
    """Invalid values of cu_seqlens access no illegal address and write nothing outside the results."""
    q, k, v = qkv((300, 4, D), (300, 4, D), "cuda", dtype=torch.bfloat16)
    for ends in (
        [5, -7, 1 << 30],
        [0, 200, 100],
        [0, 900, 1200],
        [-5, -5, -5],
        [300, 0, 300],
        [1 - (1 << 31), -(1 << 31), 300],
    ):
        cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for same in (None, False):
            ridgeline.attention_varlen(q, k, v, cu, cu, causal=True, deterministic=same, impl=impl).sum().backward()
            torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", HERE)
def test_tokens_after_the_last_sequence(impl: str) -> None:
    """Tokens after the last sequence see nothing and are unseen: zeros, as a buffer of fixed size needs."""
    args = qkv((300, 4, 64), (300, 2, 64), "cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 100, 140], dtype=torch.int32, device="cuda")
    o, lse, *grads = outcome(ridgeline.attention_varlen, [*args, cu, cu], return_lse=True, impl=impl)
    assert (lse[:, 140:] == -torch.inf).all()
    assert not any(t[140:].any() for t in (o, *grads))
