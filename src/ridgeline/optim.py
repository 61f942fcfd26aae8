"""`torch.optim` optimizers that call Ridgeline's functions: same constructors, and state_dicts that load both ways."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch

from ridgeline.op import RidgelineError, get

# Options that torch's AdamW lacks.
OWN: dict[str, Any] = {"moment_dtype": None, "master_weights": False, "rounding": "nearest", "seed": 0}


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, by `ridgeline.adamw`: one kernel launch for all parameters of a group with the same dtypes.

    The constructor is torch's, with four options more. A step never synchronises with the GPU.
    moment_dtype: the dtype of both moments; torch.float32 keeps them precise beside narrower parameters.
    master_weights: keeps float32 weights beside narrower parameters, as the state "master". A step updates them and
        casts them in the same pass. Load a model's weights before its optimizer's state.
    rounding, seed: "stochastic" rounds bfloat16 results up or down at random, by the bits of `seed`, so that updates
        under half an ulp are not lost; see `ridgeline.adamw`.
    foreach, fused: accepted but without effect on results, since they choose among torch's implementations. With
        `fused` or `capturable`, the GPU counts the steps.
    CPU tensors and float64 run torch's fused kernel.
    Raises RidgelineError for amsgrad, differentiable, sparse gradients and complex parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        *args: Any,
        moment_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        rounding: str = "nearest",
        seed: int = 0,
        **kwargs: Any,
    ):
        if moment_dtype is not None and not moment_dtype.is_floating_point:
            raise RidgelineError(f"AdamW: moment_dtype must be floating point, and is {moment_dtype}")
        if rounding not in ("nearest", "stochastic"):
            raise RidgelineError(f'AdamW: rounding must be "nearest" or "stochastic", and is {rounding!r}')
        super().__init__(params, lr, *args, **kwargs)
        own = {"moment_dtype": moment_dtype, "master_weights": master_weights, "rounding": rounding, "seed": seed}
        self.defaults |= own
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, value)
        self._prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in OWN.items():
                group.setdefault(name, self.defaults.get(name, value))
        self._prepare()

    def _prepare(self) -> None:
        """Does once what need not be repeated at every step."""
        for group in self.param_groups:
            self._refuse(group)
        self._step_supports_amp_scaling = False  # a GradScaler unscales the gradients itself
        self._function = get("adamw").function
        self._counts: dict[Any, tuple[list[torch.Tensor], torch.Tensor]] = {}

    @staticmethod
    def _refuse(group: dict[str, Any]) -> None:
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise RidgelineError(f"AdamW: {option}=True is not supported; torch.optim.AdamW supports it")
        for p in group["params"]:
            if p.is_complex():
                raise RidgelineError(
                    f"AdamW: parameters must be real, and one is {str(p.dtype)[6:]}; torch.optim.AdamW takes it"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._refuse(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch does, but keeps the dtypes of moments (`moment_dtype`) and of master weights.

        Options that a saved group lacks, as in torch's state_dicts, stay the group's own."""
        own = [{name: g[name] for name in OWN} for g in self.param_groups]
        super().load_state_dict(state_dict)
        for group, saved, options in zip(self.param_groups, state_dict["param_groups"], own, strict=True):
            group |= {name: saved.get(name, value) for name, value in options.items()}
        numbers = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        groups = [(g["moment_dtype"], p) for g in self.param_groups for p in g["params"]]
        for number, (dtype, p) in zip(numbers, groups, strict=True):
            saved = state_dict["state"].get(number, {})
            wide = {"exp_avg": dtype, "exp_avg_sq": dtype, "master": torch.float32}
            for name in wide.keys() & saved.keys():
                if wide[name] is not None:
                    self.state[p][name] = saved[name].to(p.device, wide[name], copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient. closure: re-evaluates the model and returns the loss."""
        self._cuda_graph_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(group, params)
        return loss

    def _cuda_graph_check(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            for group in self.param_groups:
                if not (group["capturable"] or group["fused"]):
                    raise RidgelineError(
                        "AdamW: a step in a CUDA graph needs capturable=True, or the graph would repeat one step number"
                    )

    def _step(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        grads: list[Any] = [p.grad for p in params]
        states = [self.state[p] for p in params]
        for p, g, state in zip(params, grads, states, strict=True):
            if not state:
                if g.layout != torch.strided:
                    raise RidgelineError(
                        "AdamW: gradients must be dense, and one is sparse; torch.optim.SparseAdam takes sparse ones"
                    )
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=p.device if group["capturable"] or group["fused"] else "cpu"
                )
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p, dtype=group["moment_dtype"], memory_format=torch.preserve_format)
            if group["master_weights"] and "master" not in state and p.dtype in (torch.float16, torch.bfloat16):
                state["master"] = p.detach().to(torch.float32, memory_format=torch.preserve_format)
        if group["master_weights"]:
            has = ["master" in s for s in states]
            if not all(has) and any(has):  # the kernel's lists are of one kind
                for kind in (True, False):
                    self._update(
                        group, *[[x for x, h in zip(some, has) if h is kind] for some in (params, grads, states)]
                    )
                return
        self._update(group, params, grads, states)

    def _update(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]]
    ) -> None:
        """Starts the step of these parameters: one call for each step number among them."""
        lists = [params, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]]
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize", "rounding", "seed")}
        masters = [s["master"] for s in states] if "master" in states[0] else None
        steps = [s["step"] for s in states]
        if not all([s.is_cpu for s in steps]):
            self._move_steps(params, states)
            steps = [s["step"] for s in states]
            torch._foreach_add_(steps, 1)
            self._function(*lists, steps, masters=masters, **options)
            return
        numbers = self._count((id(group), masters is None), steps, states)
        if numbers.count(numbers[0]) == len(numbers):
            self._function(*lists, int(numbers[0]), masters=masters, **options)
            return
        for number in dict.fromkeys(numbers):  # parameters without a gradient skip steps
            chosen = [n for n, other in enumerate(numbers) if other == number]
            some = [masters[n] for n in chosen] if masters else None
            self._function(*[[one[n] for n in chosen] for one in lists], int(number), masters=some, **options)

    @staticmethod
    def _move_steps(params: list[torch.Tensor], states: list[dict[str, Any]]) -> None:
        """Moves step counts to their parameters' devices: a checkpoint may leave some there and others on the CPU."""
        for p, state in zip(params, states, strict=True):
            if state["step"].device != p.device or state["step"].dtype != torch.float32:
                state["step"] = state["step"].to(p.device, torch.float32)

    def _count(self, group: Any, steps: list[torch.Tensor], states: list[dict[str, Any]]) -> list[float]:
        """Adds one to every parameter's step and returns them. Steps are views of one tensor: one operation."""
        known, counts = self._counts.get(group, ([], steps[0]))
        if len(known) != len(steps) or not all(map(is_, known, steps)):
            counts = torch.stack(steps)
            known = [counts[n] for n in range(len(steps))]
            for state, view in zip(states, known, strict=True):
                state["step"] = view
            self._counts[group] = known, counts
        counts += 1
        return counts.tolist()
