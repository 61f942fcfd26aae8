"""ScoreMod: a user's own function of attention's scores, and the registry through which kernels find such functions.

Registered torch ops take tensors, numbers and strings. So a function passes through them as a key, and the launcher
looks the function up. A key holds the function's name and a digest of its source, so equal functions share a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from ridgeline.op import RidgelineError

MOST = 3  # tensors that a function reads
_functions: dict[str, Any] = {}


def key_of(function: Any) -> str:
    """Returns the key of a `triton.jit` function, and registers the function under it."""
    digest = str(id(function)) if isinstance(function, InterpretedFunction) else function.cache_key[:16]
    key = f"{getattr(function.fn, '__qualname__', function.__name__)}:{digest}"
    return key if _functions.setdefault(key, function) is not None else ""


def function_of(key: str | None) -> Any:
    """Returns the function of a key, None of None. Raises RidgelineError for a key that nobody registered here."""
    if key is None:
        return None
    if key not in _functions:
        name = key.partition(":")[0]
        raise RidgelineError(
            f"flex_attention: the function {name} is not known in this process, or has changed since the program was "
            "compiled; make its ScoreMod or block mask before you run the program"
        )
    return _functions[key]


def function_fault(what: str, function: Any, names: Sequence[str], tensors: Sequence[Any]) -> str | None:
    """Returns what is wrong with a function of these arguments, followed by the tensors', or None."""
    wanted = f"a triton.jit function of ({', '.join(names)}) and {len(tensors)} tensors"
    if not isinstance(function, triton.JITFunction | InterpretedFunction):
        return f"{what} must be {wanted}, got {type(function).__name__}"
    given = len(function.arg_names)
    wrong = given != len(names) + len(tensors)
    return f"{what} must be {wanted}, and {function.__name__} takes {given} arguments" if wrong else None


def tensors_fault(tensors: Any) -> str | None:
    """Returns what is wrong with the tensors of a function, or None."""
    if not isinstance(tensors, tuple | list) or not all([isinstance(t, torch.Tensor) for t in tensors]):
        return f"tensors must be a tuple of tensors, got {tensors!r}"
    if len(tensors) > MOST:
        return f"a function reads at most {MOST} tensors, got {len(tensors)}"
    for t in tensors:
        if t.layout is not torch.strided or not t.is_contiguous():
            return f"a function gets pointers, so its tensors must be contiguous; one has strides {t.stride()}"
        if t.device != tensors[0].device:
            return f"the tensors of a function must be on one device, got {tensors[0].device} and {t.device}"
    return None


class ScoreMod:
    """A function of attention's scores, for `attention(..., score_mod=)`. It takes part in forward and backward.

    forward: a `triton.jit` function (score, b, h, q, k, *tensors) that returns the new score. score: a block of
    scores, scaled, in float32. b, h: the numbers of batch and head of the queries, int32. q, k: positions of queries
    and keys within their sequences, int32, shaped to broadcast with score. They stay below the sequences' lengths. A
    key whose new score is -inf is not seen. The function must be elementwise: backward has blocks transposed.
    backward: a `triton.jit` function (grad, score, b, h, q, k, *tensors) that returns the gradient of the score that
    forward took, from that of the score it returned.
    additive: the new score is the old one plus terms without it, so the gradient passes unchanged. Without backward and
    additive=True the call has no gradient, and raises where one is asked for.
    tensors: at most three contiguous tensors that the functions read, given to them as pointers. They get no gradient.
    eager: forward in PyTorch, of tensors (score, b, h, q, k, *tensors) that broadcast. Plain PyTorch and the checks
    need it; kernels do not.
    Raises RidgelineError if a function takes other arguments, or a tensor is not contiguous.
    """

    def __init__(
        self, forward: Any, backward: Any = None, *, tensors: Sequence[torch.Tensor] = (), additive: bool = False,
        eager: Callable[..., torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        names = "score", "b", "h", "q", "k"
        wrong = tensors_fault(tensors) or function_fault("forward", forward, names, tensors)
        if wrong is None and backward is not None:
            wrong = function_fault("backward", backward, ("grad", *names), tensors)
            if additive:
                wrong = wrong or "backward is not used if additive is True; give one of them"
        if wrong:
            raise RidgelineError(f"ScoreMod: {wrong}")
        self.tensors, self.additive, self.eager = tuple(tensors), additive, eager
        self.forward, self.backward = key_of(forward), None if backward is None else key_of(backward)
        self.name = str(forward.__name__)

    @property
    def differentiable(self) -> bool:
        return self.additive or self.backward is not None


_bare: dict[int, tuple[Any, ScoreMod]] = {}


def as_score_mod(given: Any) -> ScoreMod | None:
    """Returns a ScoreMod: the given one, or that of a bare function without gradients; None for None.

    Raises RidgelineError for anything else."""
    if given is None or isinstance(given, ScoreMod):
        return given
    if id(given) not in _bare:
        try:
            made = ScoreMod(given)
        except RidgelineError as error:
            wanted = "a ridgeline.ScoreMod, or a triton.jit function of (score, b, h, q, k)"
            raise RidgelineError(f"flex_attention: score_mod must be {wanted}, got {given!r}") from error
        _bare[id(given)] = given, made
    return _bare[id(given)][1]
