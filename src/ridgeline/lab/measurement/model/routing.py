"""Which experts each token goes to in the first steps: noted in the reference, and followed by the other variants.

A router takes the k largest of its logits. In bfloat16 the k-th and the next are equal for 2% of random tokens, and
often an ulp apart, so any rounding on the way sends some tokens to other experts: 1 to 9% in each layer of a small
gpt-oss, 4 to 32% after a step, while in float32 none goes elsewhere. Unpatched runs whose weights differ by an ulp in
one of four then part by up to 1.6% of what the step has learnt. That hides errors which matter, so a wide tolerance is
no check. Instead a variant follows the reference's choice in the steps whose losses are compared, and the tolerance
stays. Its own choice is judged by itself: it may differ between logits that are nearly equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REGRET = 0.05  # of the logits' standard deviation, the mean over tokens; a near tie costs a hundredth of it
RULES: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda logits, chosen: logits.float().gather(1, chosen).softmax(1),
    lambda logits, chosen: logits.float().softmax(1).gather(1, chosen),
)  # the weights of chosen experts, from logits (tokens, experts)


def routers(model: Any) -> list[Any]:
    """The modules that give logits (tokens, experts), weights and indices (tokens, k)."""
    return [m for m in model.modules() if type(m).__name__.endswith("Router")]


def rule(logits: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> Any:
    """The rule that gives a router's weights, or None if none of RULES does."""
    close = 4 * torch.finfo(torch.bfloat16).eps
    return next((r for r in RULES if (r(logits, chosen) - weights.float()).abs().max() < close), None)


def _triple(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], torch.Tensor) and found[2].dim() == 2


class Noted:
    """Notes the choices of a model's routers, in the order of their calls.

    choices: (shape, bytes of int16) of each call; None once a router is of another kind."""

    def __init__(self, model: Any):
        self.choices: list[tuple[tuple[int, ...], bytes]] | None = []
        self.handles = [m.register_forward_hook(self._note) for m in routers(model)]

    def _note(self, module: Any, given: Any, found: Any) -> None:
        if self.choices is None or not _triple(found) or rule(*(t.detach() for t in found)) is None:
            self.choices = None
            return
        kept = found[2].detach().to(torch.int16).cpu().view(torch.uint8).flatten()
        self.choices.append((tuple(found[2].shape), bytes(kept.tolist())))

    def end(self) -> list[tuple[tuple[int, ...], bytes]]:
        for handle in self.handles:
            handle.remove()
        return self.choices or []


class Followed:
    """Lets a model's routers choose as `Noted` found, with weights from their own logits and gradients to these.

    A token whose own choice is the same, in the same order, keeps its own weights."""

    def __init__(self, model: Any, choices: list[tuple[tuple[int, ...], bytes]]):
        self.left, self.regrets, self.others = list(choices), [], []  # type: ignore[var-annotated]
        self.handles = [m.register_forward_hook(self._follow) for m in routers(model)]

    def _follow(self, module: Any, given: Any, found: Any) -> Any:
        if not _triple(found) or not self.left:
            raise ValueError("its routers are not called as the reference's are")
        logits, weights, own = found
        shape, kept = self.left.pop(0)
        if tuple(own.shape) != shape:
            raise ValueError(f"a router chooses {tuple(own.shape)} experts, and the reference's {shape}")
        chosen = torch.frombuffer(bytearray(kept), dtype=torch.int16).view(shape).to(own.device, torch.int64)
        given_by = rule(logits.detach(), weights.detach(), own.long())
        if given_by is None:
            raise ValueError("a router's weights are no softmax of its logits, as the reference's are")
        with torch.no_grad():
            at = [logits.float().gather(1, index.long()).sort(1)[0] for index in (own, chosen)]
            short = (at[0] - at[1]).abs().amax(1)
            self.regrets.append(float(short.mean() / logits.float().std()))
            self.others.append(float((own.long().sort(1)[0] != chosen.sort(1)[0]).any(1).float().mean()))
        same = (own == chosen).all(1, keepdim=True)
        return logits, torch.where(same, weights, given_by(logits, chosen).to(weights.dtype)), chosen.to(own.dtype)

    def end(self) -> dict[str, float]:
        """What the variant would have chosen: the share of tokens that it sends elsewhere, and what the others lack."""
        for handle in self.handles:
            handle.remove()
        count = max(len(self.regrets), 1)
        return {"elsewhere": sum(self.others) / count, "regret": max(self.regrets, default=0.0)}


def wrong(routing: dict[str, float] | None) -> str | None:
    """Why a variant's own choice of experts is not one of near ties, or None."""
    if not routing or routing["regret"] <= REGRET:
        return None
    return f"its routers' choice differs from the reference's by {routing['regret']:.3f} of the logits' deviation"
