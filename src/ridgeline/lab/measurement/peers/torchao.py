"""torchao: its linear layer of float8 training, by torch.compile, without which it quantises in many passes.

By rows, the scales are not rounded to powers of two, as torchao's recipe has it: the law allows no coarser scales.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "torchao", "torchao", "cuda"
RECIPES = {"tensor": "tensorwise", "row": "rowwise"}


@cache
def _layer(recipe: str, biased: bool) -> Any:
    """Returns the compiled layer as a function of x and of a dictionary of its parameters."""
    from dataclasses import replace

    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(RECIPES[recipe]), round_scales_to_power_of_2=False)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=biased, device="meta"))
    layer = convert_to_float8_training(plain, config=config)

    def call(x: torch.Tensor, given: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(layer, given, (x,))

    return torch.compile(call, dynamic=False)


def _fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, recipe: str = "tensor",
    main_grad: Any = None, quantized: Any = None
) -> torch.Tensor:  # fmt: skip
    if recipe not in RECIPES or main_grad is not None or quantized is not None:
        raise RidgelineError("torchao's layer scales tensors or rows, and has neither main_grad nor given codes")
    given = {"0.weight": weight} | ({} if bias is None else {"0.bias": bias})
    found: torch.Tensor = _layer(recipe, bias is not None)(x, given)
    return found


PEERS = {"fp8_linear": _fp8_linear}
