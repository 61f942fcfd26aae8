"""patch, unpatch and explain: finds the modules of a model whose forms are known, and sets their forwards."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline import few_bits
from ridgeline.hf import attention, experts, forms, logits, modules, positions, recurrent, syntax
from ridgeline.hf.report import PARTS, Report, Row
from ridgeline.nn import fp8_forward
from ridgeline.op import RidgelineError

MEMORY = (None, "recompute", "products")
PART = re.compile(r"products:([1-9]\d*)")  # a policy for the first layers
AGAIN = "backward makes its products again"
INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj")  # products of a normalised input
OURS = (
    modules.rms_norm,
    modules.layer_norm,
    modules.linear,
    fp8_forward,
    modules.joint_linear,
    modules.gated_mlp,
    modules.merged_mlp,
    modules.attention,
    experts.experts,
    experts.router,
    modules.gated_rms_norm,
    recurrent.layer,
    logits.lm_head,
)
Plan = tuple[Row, Callable[[], None]]


def _ours(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func in OURS


def _set(module: nn.Module, function: Callable[..., Any], **facts: Any) -> Callable[[], None]:
    return lambda: setattr(module, "forward", partial(function, module, **facts))


def _replaced(module: nn.Module) -> str | None:
    """Returns why a module's forward is not its class's, or None."""
    if "forward" in module.__dict__ and not _ours(module):
        return "its forward has been replaced already"
    return None


def _options(name: str) -> Any:
    return inspect.signature(getattr(ridgeline, name)).parameters


class _Planner:
    """Goes through a model and notes for each module what would be done, or why nothing."""

    def __init__(self, model: nn.Module, only: frozenset[str], memory: str | None, quantize: str | None = None):
        self.model, self.only, self.memory, self.quantize = model, only, memory, quantize
        self.plans: list[Plan] = []
        self.models = _models(model)
        config: Any = getattr(self.models[0], "config", None)
        self.config: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.facts: dict[str, Any] = self.config.to_dict()  # where a value per layer is a list
        self.width = 2  # bytes of an element in training
        self.turned = frozenset(_to_quantize(model, quantize)) if quantize else frozenset()
        self.turned_experts = frozenset(experts_to_quantize(model, quantize)) if quantize else frozenset()
        part = PART.fullmatch(memory or "")
        # How many layers make their products again; None: all.
        self.again = int(part[1]) if part else None if memory == "products" else 0
        self.layers: list[str] = []  # of feed-forward layers, in the model's order

    def note(
        self, name: str, module: Any, part: str, op: str | None, reason: str = "", act: Any = None, **cost: float
    ) -> None:
        if op is not None and part not in self.only:
            op, reason, act = None, "not asked for", None
        self.plans.append((Row(name, type(module).__name__, part, op, reason, **cost), act or (lambda: None)))

    def run(self) -> list[Plan]:
        inside: set[str] = set()
        head = self.models[0].get_output_embeddings() if hasattr(self.models[0], "get_output_embeddings") else None
        module: Any
        for name, module in self.model.named_modules():
            kind: Any = type(module)
            if module is head:
                self.head(name, module)
            elif type(module) is experts.FewBitExperts:
                self.few_bit_experts(name, module, module.kind)
            elif hasattr(module, "gate_up_proj") and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
                self.experts(name, module)
            elif kind.__name__.endswith("Router"):
                self.router(name, module)
            elif "Norm" in kind.__name__:
                self.norm(name, module)
            elif kind.__name__.endswith("MLP") or self.is_mlp(kind):
                self.mlp(name, module)
                inside.add(name)
            elif syntax.interface_keywords(kind) is not None or forms.calls_rotary(kind):
                self.rotary(name, module)
                self.attention(name, module)
            elif forms.recurrent(kind):
                self.recurrent(name, module)
            elif type(module) in few_bits.LAYERS:
                self.few_bits(name, module, few_bits.LAYERS[type(module)])
            elif self.quantize == few_bits.TRAINING and name in self.turned:
                self.few_bits(name, module, "fp8_linear", _set(module, fp8_forward, recipe="tensor"))
            elif self.quantize and isinstance(module, nn.Linear) and name in self.turned:
                self.few_bits(name, module, few_bits.KINDS[self.quantize])
            elif isinstance(module, nn.Linear) and not any(name.startswith(f"{n}.") for n in inside):
                self.linear(name, module)
        self.settle_attention()
        return self.plans

    def few_bits(self, name: str, module: Any, op: str, act: Callable[[], None] = lambda: None) -> None:
        flops, group = 2.0 * module.in_features * module.out_features, getattr(module, "group", None)
        remark = f"groups of {group} columns" if group else ""
        self.plans.append((Row(name, type(module).__name__, "linear", op, remark, flops=flops), act))

    def linear(self, name: str, module: nn.Linear) -> None:
        remark, flops = "torch's product", 2.0 * module.weight.numel()
        parent, _, own = name.rpartition(".")
        if self.quantize:
            remark += f", in full: {few_bits.refusal(module, self.quantize) or 'it is in no repeated layer'}"
        again = self.memory is not None and own in INPUTS and "norm" in self.only
        owner = self.model.get_submodule(parent)
        names = syntax.layers_of_one_input(type(owner).forward) if "attention" in self.only else ()
        if own in names and not _replaced(module):
            others = ", ".join([n for n in names if n != own])
            remark += f"; backward sums the gradients of its input with those of {others}"
            facts = {"owner": owner, "names": names}
            self.plans.append((Row("", "", "", None), _set(module, modules.joint_linear, **facts)))
        elif again and not _replaced(module):
            self.plans.append((Row("", "", "", None), _set(module, modules.linear)))
        if again and not _replaced(module):
            remark += "; backward makes its normalised input again"
        self.note(name, module, "linear", None, remark, flops=flops)

    def is_mlp(self, kind: type) -> bool:
        found = syntax.class_form(kind)
        return found is not None and found.digest in forms.MLPS

    def norm(self, name: str, module: Any) -> None:
        found = syntax.class_form(type(module))
        facts = forms.NORMS.get(found.digest) if found else None
        size = module.weight.numel() if getattr(module, "weight", None) is not None else self.number("hidden_size")
        cost = {"nbytes": 2.0 * size * self.width}
        if found and found.digest in forms.GATED_NORMS:
            return self.gated_norm(name, module, forms.GATED_NORMS[found.digest], found.attributes)
        if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and not _replaced(module):
            return self.note(name, module, "norm", "layer_norm", "", _set(module, modules.layer_norm), **cost)
        if facts is None or found is None:
            return self.note(name, module, "norm", None, "its form is not known", **cost)
        names = forms.named(facts.roles, found.attributes)
        if reason := _replaced(module):
            return self.note(name, module, "norm", None, reason, **cost)
        options = {"offset": facts.offset, "rounding": facts.rounding}
        usual = {"offset": 0.0, "rounding": "once"}
        lacking = [o for o, v in options.items() if v != usual[o] and o not in _options("rms_norm")]
        if lacking:
            return self.note(name, module, "norm", None, f"rms_norm has no option {lacking[0]}", **cost)
        options = {o: v for o, v in options.items() if v != usual[o]}
        given = {
            "eps": names["eps"],
            "weight": names.get("weight"),
            "options": options,
            "again": self.memory is not None,
        }
        return self.note(name, module, "norm", "rms_norm", "", _set(module, modules.rms_norm, **given), **cost)

    def gated_norm(self, name: str, module: Any, facts: forms.GatedNorm, attributes: tuple[str, ...]) -> None:
        names, cost = forms.named(facts.roles, attributes), {"nbytes": 3.0 * module.weight.numel() * self.width}
        reason = _replaced(module)
        if "activation" in names and getattr(module, names["activation"]) not in ("silu", "sigmoid"):
            reason = f"its activation is {getattr(module, names['activation'])}"
        act = _set(module, modules.gated_rms_norm, names=names, norm_before_gate=facts.norm_before_gate)
        self.note(name, module, "norm", None if reason else "gated_rms_norm", reason or "", act, **cost)

    def recurrent(self, name: str, module: Any) -> None:
        """A layer keeps its forward, which finds our functions in the place of its file's."""
        kind, reason = type(module), _replaced(module)
        found = recurrent.served(kind)
        ops = ", ".join(sorted({op for op in found.values() if op}))
        left = sorted(n for n, op in found.items() if op is None)
        conv = getattr(module, "conv1d", None)
        cost = {"nbytes": 2.0 * conv.weight.shape[0] * self.width if isinstance(conv, nn.Conv1d) else 0.0}
        if not ops:
            reason = reason or "the forms of its functions are not known"
        elif not all(modules.can_rebind(kind, n) for n in found):
            reason = reason or "its forward is wrapped in a way that hides it"
        if reason:
            return self.note(name, module, "recurrent", None, reason, **cost)
        recurrent.prepare(kind)
        remark = f"{' and '.join(left)} stay the model's own" if left else ""
        return self.note(name, module, "recurrent", ops, remark, _set(module, recurrent.layer), **cost)

    def mlp(self, name: str, module: Any) -> None:
        found = syntax.class_form(type(module))
        facts = forms.MLPS.get(found.digest) if found else None
        inside = [(f"{name}.{n}", m) for n, m in module.named_modules()]
        layers = [m for _, m in inside if isinstance(m, nn.Linear) or type(m) in few_bits.LAYERS]
        own = [m for n, m in inside if isinstance(m, nn.Linear) and n not in self.turned]  # others have their own rows
        cost = {"flops": 2.0 * sum([m.weight.numel() for m in own])}
        cost["nbytes"] = 3.0 * max([m.in_features for m in layers], default=0) * self.width
        if facts is None or found is None:
            return self.note(name, module, "mlp", None, "its form is not known", **cost)
        names = forms.named(facts.roles, found.attributes)
        activation = modules.activation_name(getattr(module, names.pop("activation")))
        reason = _replaced(module) or (None if activation else "its activation is not known")
        if reason:
            return self.note(name, module, "mlp", None, reason, **cost)
        self.layers.append(name)
        gate = "silu_mul" if activation == "silu" else "gelu_mul"
        again = self.again is None or len(self.layers) <= self.again
        made = AGAIN if again else ""
        remark = "gate or up has a bias or is no plain nn.Linear, so their products are its own", made
        if facts.merged:
            no_bias = getattr(module, names["gate_up"]).bias is None
            fused = no_bias and all(modules.plain_linear(m) and m in own for m in layers)
            act = _set(module, modules.merged_mlp, **names, activation=activation, again=again)
            return self.note(name, module, "mlp", "gated_linear" if fused else gate, remark[fused], act, **cost)
        first, second = getattr(module, names["gate"]), getattr(module, names["up"])
        fused = all(modules.plain_linear(m) and m in own and m.bias is None for m in (first, second))
        act = _set(module, modules.gated_mlp, **names, activation=activation, again=again)
        return self.note(name, module, "mlp", "gated_linear" if fused else gate, remark[fused], act, **cost)

    def experts(self, name: str, module: Any) -> None:
        cost, remark = {"flops": _experts(module, self.config)}, ""
        if name in self.turned_experts and self.quantize:
            return self.few_bit_experts(name, module, self.quantize)
        found = _expert_form(module)
        if isinstance(found, str) or (reason := _replaced(module)):
            return self.note(name, module, "experts", None, found if isinstance(found, str) else reason, **cost)  # type: ignore[arg-type]
        if self.quantize and self.quantize != few_bits.TRAINING:
            remark = f"in full: {experts.refusal(module, self.quantize, **found) or 'it is in no repeated layer'}"
        return self.note(name, module, "experts", "moe", remark, _set(module, experts.experts, **found), **cost)

    def few_bit_experts(self, name: str, module: Any, kind: str) -> None:
        flops = _experts(module, self.config)
        row = Row(name, type(module).__name__, "experts", "moe", f"weights of {kind}", flops=flops)
        self.plans.append((row, lambda: None))

    def router(self, name: str, module: Any) -> None:
        form = syntax.class_form(type(module))
        facts = forms.ROUTERS.get(form.digest) if form else None
        reason = "the form of its router is not known" if facts is None or form is None else _replaced(module)
        if reason or facts is None or form is None:
            return self.note(name, module, "experts", None, reason or "")
        given: dict[str, Any] = {"names": forms.named(facts.roles, form.attributes), "score": facts.score}
        given |= {"wide": facts.wide, "cast": facts.cast}
        return self.note(name, module, "experts", "topk_gate", "", _set(module, experts.router, **given))

    def rotary(self, name: str, module: Any) -> None:
        if not forms.calls_rotary(type(module)):
            return None
        heads = self.number("num_attention_heads") + self.number("num_key_value_heads")
        cost = {"nbytes": 2.0 * heads * self.head_dim(module) * self.width}
        facts, tables = forms.rotary(type(module)), self.tables()
        reason = _replaced(module)
        if facts is None:
            reason = "the form of its rotary function is not known"
        elif tables != {facts.table}:
            reason = "the form of its rotary tables is not known"
        elif not modules.can_rebind(type(module)):
            reason = "its forward is wrapped in a way that hides it"
        if reason:
            return self.note(name, module, "rotary", None, reason, **cost)
        modules.prepare_attention(type(module))
        return self.note(name, module, "rotary", "rope", "", _set(module, modules.attention), **cost)

    def head_dim(self, module: Any) -> int:
        found = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
        return found or self.number("hidden_size") // max(1, self.number("num_attention_heads"))

    def number(self, name: str) -> int:
        """Returns a number of the configuration; 0 if it has none or one per layer."""
        value = self.facts.get(name)
        return value if isinstance(value, int) else 0

    def tables(self) -> set[str]:
        kinds = {type(m) for m in self.model.modules() if type(m).__name__.endswith("RotaryEmbedding")}
        found = [syntax.class_form(k) for k in kinds]
        return {forms.TABLES.get(f.digest, "") if f else "" for f in found}

    def attention(self, name: str, module: Any) -> None:
        width, heads = self.head_dim(module), self.number("num_attention_heads")
        length = min(4096, self.number("max_position_embeddings") or 4096)
        q_width, v_width = getattr(module, "qk_head_dim", width), getattr(module, "v_head_dim", width)
        window = getattr(module, "sliding_window", None)
        keys = min(length / 2, window) if isinstance(window, int) and window else length / 2
        cost = {"flops": 4.0 * heads * width * keys}
        keywords = syntax.interface_keywords(type(module))
        reason = None
        if keywords is None:
            reason = "it does not call the attention interface"
        elif unknown := sorted(keywords - attention.KEYWORDS):
            reason = f"it gives {unknown[0]} to attention, which has no such option"
        elif _windows(self.config) and "sliding_window" not in keywords:
            reason = "it does not give its window to attention"
        elif not syntax.only_passes_on(type(module).forward, "attention_mask"):
            reason = "it reads the attention mask itself"
        elif not all(m._can_set_attn_implementation() for m in self.models):
            reason = "the model does not let its attention be chosen after it is built"
        elif q_width != v_width:
            reason = f"its heads have {q_width} dimensions in q and {v_width} in v; attention takes one number"
        elif width % 8 or not 16 <= width <= 256:
            reason = f"its heads have {width} dimensions; attention takes multiples of 8 from 16 to 256"
        self.note(name, module, "attention", None if reason else "attention", reason or "", **cost)

    def settle_attention(self) -> None:
        """Attention is chosen by the model's configuration, so for all layers or none."""
        rows = [r for r, _ in self.plans if r.part == "attention"]
        wanted = [r for r in rows if r.op]
        if not wanted:
            return
        left = [r for r in rows if not r.op]
        if left and "attention" in self.only:
            for r in wanted:
                r.op, r.reason = None, f"{left[0].name} is left alone, and the choice is the whole model's"
        elif not left:
            self.plans.append((Row("", "", "", None), partial(_choose_attention, self.model, self.models)))

    def head(self, name: str, module: Any) -> None:
        owner = self.models[0]
        weight = getattr(module, "weight", None)
        if weight is None:
            return self.note(name, module, "loss", None, "it has no weight")
        cost = {"flops": 2.0 * weight.numel(), "nbytes": 4.0 * weight.shape[0] * self.width}
        reason = _replaced(module) or (
            None if modules.plain_linear(module) or _ours(module) else "it is no plain nn.Linear"
        )
        if not reason and not _uses_loss(type(owner)):
            reason = "the model computes its loss itself"
        original = _original_loss(owner)
        if not reason and not forms.known_loss(original):
            reason = "the form of its loss is not known"

        def act() -> None:
            module.forward = partial(logits.lm_head, module)
            owner.loss_function = partial(logits.causal_loss, original)

        return self.note(name, module, "loss", None if reason else "linear_cross_entropy", reason or "", act, **cost)


def _original_loss(model: Any) -> Callable[..., Any]:
    found = model.loss_function
    return found.args[0] if isinstance(found, partial) and found.func is logits.causal_loss else found


def _uses_loss(kind: type) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and "loss_function" in code.co_names


def _windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or []
    return bool(getattr(config, "sliding_window", None)) or "sliding_attention" in kinds


def _experts(module: Any, config: Any) -> float:
    used = getattr(config, "num_experts_per_tok", 1) or 1
    few = isinstance(module, experts.FewBitExperts)
    numel = module.numel() if few else module.gate_up_proj.numel() + module.down_proj.numel()
    return 2.0 * numel * used / module.gate_up_proj.shape[0]


def _expert_form(module: Any) -> dict[str, Any] | str:
    """Returns how `experts.experts` computes a module, or why it does not."""
    form = syntax.class_form(type(module))
    facts = forms.EXPERTS.get(form.digest) if form else None
    if facts is None or form is None:
        return "the form of its experts is not known"
    names = forms.named(facts.roles, form.attributes)
    activation = None if facts.oai else modules.activation_name(getattr(module, names["activation"]))
    unit = {"activation": "swiglu_oai", "interleaved": True} if facts.oai else {"activation": "silu"}
    return experts.fault(module, names, activation, facts.oai) or {
        "names": names,
        "unit": unit,
        "transposed": facts.oai,
    }


def expert_facts(module: Any) -> dict[str, Any]:
    """Returns how `experts.experts` computes a module. Raises RidgelineError if it does not."""
    found = _expert_form(module)
    if isinstance(found, str):
        raise RidgelineError(f"{type(module).__name__}: {found}")
    return found


def _models(model: nn.Module) -> list[Any]:
    """Returns transformers' models in a model, the outermost first; those of peft and the like only wrap one."""
    from transformers import PreTrainedModel

    return [m for m in model.modules() if isinstance(m, PreTrainedModel)]


def _configs(config: Any) -> list[Any]:
    """Returns a configuration and those in it."""
    inner = [getattr(config, key, None) for key in getattr(config, "sub_configs", None) or ()]
    return [config, *(c for each in inner if each is not None for c in _configs(each))]


def _choose_attention(model: nn.Module, models: list[Any]) -> None:
    """Chooses our attention in a configuration of the model's own, so that others who share it keep theirs."""
    attention.register()
    old = models[0].config
    memo: dict[int, Any] = {}
    new = copy.deepcopy(old, memo)
    copies = {id(a): b for a, b in zip(_configs(old), _configs(new), strict=True)}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if id(value) in copies:
                module.__dict__[name] = copies[id(value)]
    before = [c._attn_implementation_internal for c in _configs(new)]
    models[0].set_attn_implementation(attention.NAME)
    if new._attn_implementation != attention.NAME:
        raise RidgelineError(f"{type(models[0]).__name__} does not let its attention be chosen after it is built")
    models[0].__dict__["_ridgeline_attention"] = before
    for inner in models:
        positions.watch(inner)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise RidgelineError("ridgeline.hf needs transformers; install it with: pip install 'ridgeline[hf]'") from None
    return transformers


def _to_quantize(model: nn.Module, kind: str) -> list[str]:
    """Returns the names of the linear layers that quantize replaces: those of the repeated layers that fit.

    The output embedding and what shares its weight with an embedding stay, and so do layers outside the repetition."""
    heads = [m.get_output_embeddings() for m in _models(model) if hasattr(m, "get_output_embeddings")]
    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m not in heads and id(m.weight) not in shared
        and any(part.isdecimal() for part in name.split(".")) and few_bits.refusal(m, kind) is None
        and _replaced(m) is None
    ]  # fmt: skip


def experts_to_quantize(model: nn.Module, kind: str) -> dict[str, dict[str, Any]]:
    """Returns the experts in the repeated layers that quantize replaces, and how `experts.experts` computes them."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        held = isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
        form = _expert_form(module) if held and _replaced(module) is None else ""
        repeated = any(part.isdecimal() for part in name.split("."))
        if not isinstance(form, str) and repeated and experts.refusal(module, kind, **form) is None:
            found[name] = form
    return found


def plan(
    model: nn.Module, only: Iterable[str] | None, memory: str | None = None, quantize: str | None = None
) -> tuple[Report, list[Plan]]:
    _transformers()
    if not isinstance(model, nn.Module) or not _models(model):
        raise RidgelineError(f"hf.patch takes a model of transformers, got {type(model).__name__}")
    parts = frozenset(PARTS if only is None else [only] if isinstance(only, str) else only)
    if not parts <= set(PARTS):
        raise RidgelineError(f"only must be among {', '.join(PARTS)}, got {', '.join(sorted(parts - set(PARTS)))}")
    plans = _Planner(model, parts, memory, quantize).run()
    found = _models(model)[0]
    config = found.config.get_text_config() if hasattr(found.config, "get_text_config") else found.config
    length = min(4096, getattr(config, "max_position_embeddings", 4096) or 4096)
    rows = [r for r, _ in plans if r.name]
    return Report(type(found).__name__, rows, length, memory=memory, notes=_lacking(memory, rows)), plans


def _lacking(memory: str | None, rows: list[Row]) -> list[str]:
    """Returns a sentence if fewer layers make their products again than memory asks for."""
    part, took = PART.fullmatch(memory or ""), len([r for r in rows if r.op and r.reason == AGAIN])
    asked = int(part[1]) if part else 1 if memory == "products" else 0
    if took >= asked:
        return []
    if not took:
        return [f"memory={memory!r} holds for no layer: none of those asked for can make its products again."]
    return [f"memory={memory!r} holds for {took} of {asked} layers: no other can make its products again."]


def patch(
    model: nn.Module, *, only: Iterable[str] | None = None, memory: str | None = None, quantize: str | None = None,
    strict: bool = False,
) -> Report:  # fmt: skip
    """Lets Ridgeline compute the parts of a transformers model whose forms it knows. Returns a report of what it did.

    Only this instance changes, and `unpatch` takes it back. Without quantize, parameters, state_dict and classes stay
    as they are.
    only: which of "norm", "rotary", "mlp", "experts", "attention", "recurrent" and "loss"; None means all.
    memory: what backward makes again instead of saving it. None: the gated product of feed-forward layers, which costs
    next to nothing. "recompute": also the normalised inputs of products. "products": also the gate's and up's products;
    "products:4": those of the first four layers, where the memory is freed last.
    strict: raises RidgelineError if a module of these parts is left alone.
    quantize: "int8", "int4" or "fp8": replaces the linear layers inside the repeated layers by `nn.Int8Linear`,
    `nn.Int4Linear` or `nn.Fp8InferenceLinear`, for inference. Embeddings and the last layer stay. "int8", "int4" and
    "mxfp4", which leaves linear layers alone, also replace experts of known forms by codes that `ridgeline.moe` takes.
    The weights in full are dropped, so `unpatch` refuses such a model.
    "fp8-training": the same layers keep their weights and train in 8 bits, by `ridgeline.fp8_linear` with one scale for
    each matrix; `unpatch` takes that back.
    Raises RidgelineError if the model is none of transformers', or an argument is none of these.
    """
    if quantize is not None:
        few_bits.check_kind("hf.patch", quantize, models=True)
        if memory is not None:
            if quantize == few_bits.TRAINING:
                raise RidgelineError(f"hf.patch: layers of {quantize} keep 8-bit copies for backward: leave out memory")
            raise RidgelineError("hf.patch: memory is for training, and quantize for inference: give one of them")
    if memory not in MEMORY and not (isinstance(memory, str) and PART.fullmatch(memory)):
        known = ", ".join(map(repr, MEMORY))
        raise RidgelineError(
            f"hf.patch: memory must be one of {known}, or 'products:4' for four layers; got {memory!r}"
        )
    _restore(model)
    report, plans = plan(model, only, memory, quantize)
    left = [r for r in report.left() if r.part in PARTS and r.reason != "not asked for"]
    if strict and left:
        raise RidgelineError(f"{left[0].name} ({left[0].kind}) is left alone: {left[0].reason}; strict=True wants all")
    if quantize is not None and quantize != few_bits.TRAINING:
        for name in few_bits.quantize(model, quantize, frozenset(_to_quantize(model, quantize)).__contains__):
            model.get_submodule(name).__dict__["_ridgeline_of"] = quantize
        for name, form in experts_to_quantize(model, quantize).items():
            few_bits.replaced(model, name, experts.FewBitExperts.of(model.get_submodule(name), quantize, **form))
            model.get_submodule(name).__dict__["_ridgeline_of"] = quantize
        report, plans = plan(model, only)
    for row, act in plans:
        if row.op is not None or not row.name:
            act()
    for module in model.modules():
        if syntax.interface_keywords(type(module)) is not None:
            module.__dict__["_ridgeline_report"] = report
    return report


def unpatch(model: nn.Module) -> None:
    """Gives a patched model its own forwards, loss and attention back. Does nothing to a model that is not patched.

    Raises RidgelineError, and changes nothing, if `patch(model, quantize=...)` has dropped the weights in full.
    """
    for name, module in model.named_modules():
        if kind := module.__dict__.get("_ridgeline_of"):
            raise RidgelineError(
                f"hf.unpatch: {name} holds {kind} in place of the weight that it had, now gone; load the model again"
            )
    _restore(model)


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        if _ours(module):
            del module.forward
        module.__dict__.pop("_ridgeline_report", None)
        found = module.__dict__.get("_loss_function")
        if isinstance(found, partial) and found.func is logits.causal_loss:
            del module.__dict__["_loss_function"]
        positions.unwatch(module)
        before = module.__dict__.pop("_ridgeline_attention", None)
        for config, name in zip(_configs(module.config), before, strict=True) if before else ():
            config._attn_implementation_internal = name


def explain(model: nn.Module, *, only: Iterable[str] | None = None, quantize: str | None = None) -> Report:
    """Returns the report that `patch` would, and changes nothing."""
    if quantize is not None:
        few_bits.check_kind("hf.explain", quantize, models=True)
    with torch.no_grad():
        return plan(model, only, quantize=quantize)[0]


def on_meta(name: str) -> Any:
    """Returns a causal language model without weights, on the meta device, from a name on the hub or a folder.

    Raises RidgelineError if there is no configuration of that name, or none of a causal language model.
    """
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise RidgelineError(f"{name!r} gives no causal language model of transformers: {first}") from None
