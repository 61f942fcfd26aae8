"""Triton's interpreter changes its language once a launch, and leaves it as it was."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.kernels


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _twice(x):
    return _add(x, x)


@triton.jit
def _kernel(x, out, FAIL: tl.constexpr):
    at = tl.arange(0, 4)
    y = _twice(tl.load(x + at).to(tl.float16))
    if FAIL:
        y = y + tl.arange(0, 8)
    tl.store(out + at, _add(y, _twice(y)).to(tl.float32))


def test_the_language_is_changed_once_a_launch_and_restored(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cuda":
        pytest.skip("kernels are compiled here")
    from triton.runtime import interpreter

    from ridgeline import boundary

    assert boundary.INTERPRETED
    changes, change = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: (changes.append(args[0]), change(*args)))
    load = tl.load
    x, out = torch.arange(4.0), torch.empty(4)
    for _ in range(2):
        changes.clear()
        _kernel[(3,)](x, out, False)
        assert out.tolist() == [0, 6, 12, 18]
        assert changes.count(tl) == 1, "device functions change the language again"
        assert tl.load is load
        assert not hasattr(tl.tensor, "__index__")


def test_a_kernel_that_fails_restores_the_language(device: str) -> None:
    if device == "cuda":
        pytest.skip("kernels are compiled here")
    load = tl.load
    x, out = torch.arange(4.0), torch.empty(4)
    with pytest.raises(Exception, match="broadcast|incompatible|shape"):
        _kernel[(1,)](x, out, True)
    assert tl.load is load
    _kernel[(1,)](x, out, False)
    assert out.tolist() == [0, 6, 12, 18]
