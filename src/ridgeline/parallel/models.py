"""Tensor and sequence parallelism of whole models: ours (`nn`, `lm`) and those of Hugging Face, patched or not.

A plan names linear layers by their places in the model, as `_tp_plan` of Hugging Face's models does: "colwise" layers
and the "rowwise" one that closes them make a block. Weights become this rank's part in place, under their old names;
hooks on the block sum its results, so that it does not matter how its forward uses the weights.

Experts are spread over the same ranks: a rank has whole experts, and tokens travel (`experts.moe`). With sequence a
rank sends its tokens; else, where all ranks have all tokens, each sends its share, and the results are summed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import ridgeline.nn
from ridgeline.op import RidgelineError
from ridgeline.parallel import experts as spread
from ridgeline.parallel import groups, loss
from ridgeline.parallel.tensor import gathered, looked_up, piece, scattered, shared, summed

OURS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise")
OURS |= {"o_proj": "rowwise", "down_proj": "rowwise"}
WHOLE = ("colwise_rep", "colwise_gather_output", "replicated_with_grad_allreduce", "embedding_rowwise")  # heads, norms
TOKENS = 1  # the dimension of tokens, (batch, tokens, width)


class TensorParallel:
    """What `parallelize` did to a model: the parameters of which each rank has a part, and along which dimension."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.model, self.group = model, group
        self.splits: dict[str, int] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the whole model's state on every rank, under its own names."""
        found = dict(self.model.state_dict())
        for name, dim in self.splits.items():
            found[name] = gathered(found[name], self.group, dim)
        return found


def parallelize(
    model: nn.Module, group: Any = None, *, sequence: bool = False, vocab: bool = False, experts: bool = False,
    plan: dict[str, str] | None = None,
) -> TensorParallel:  # fmt: skip
    """Splits a model's blocks over the ranks of a group, in place. Every rank gives the same whole model and inputs.

    plan: styles ("colwise", "rowwise") by places such as "layers.*.mlp.up_proj"; None takes the model's `_tp_plan` or
    its configuration's `base_model_tp_plan`, else the layers that Llama's names mark. Heads and embeddings stay whole.
    sequence: between the blocks a rank has its part of the tokens: the model has a list of layers followed by a norm,
    and its tokens are a multiple of the ranks.
    vocab: splits the embedding and the last layer of a `lm.Transformer` too; its loss is then that of `loss`.
    experts: gives each rank whole experts of every `nn.MoE` and of experts of Hugging Face's models that `hf.patch`
    has taken. Routers and `nn.MoE`'s shared unit stay whole. With sequence, `counts` are of a rank's tokens: sum them
    before `update_bias`.
    Raises RidgelineError, on every rank, if the ranks do not divide heads, hidden units, experts or the vocabulary, or
    if a style is unknown.
    """
    made, world = TensorParallel(model, group), groups.size(group)
    mixtures = _mixtures(model, world, sequence) if experts else {}
    blocks = _blocks(model, plan, mixtures)
    for name, (columns, rows) in blocks.items():
        _check_block(name, model.get_submodule(name), columns, rows, world)
    if vocab:
        _check_vocab(model, world)
    if getattr(model, "remake", None):
        raise RidgelineError("parallelize: the model must be made with remake=None: remake works outside split blocks")
    layers, norm = _stack(model, {**blocks, **mixtures}) if sequence else (None, None)
    inside = _split_experts(made, mixtures, sequence)
    for name, (columns, rows) in blocks.items():
        block = model.get_submodule(name)
        for child in columns:
            _split(made, f"{name}.{child}", 0)
        for child in rows:
            _split(made, f"{name}.{child}", 1)
        split = {id(p) for c in (*columns, *rows) for p in block.get_submodule(c).parameters()}
        inside |= {id(p) for p in block.parameters()}
        for p in block.parameters():
            if id(p) not in split:  # norms of heads: each rank has the gradient of its own heads
                _sum_gradient(p, group)
        block.register_forward_pre_hook(partial(_enter, group, sequence), with_kwargs=True)
        block.register_forward_hook(partial(_leave, group, sequence))
    if layers is not None and norm is not None:
        layers[0].register_forward_pre_hook(partial(_into_pieces, group), with_kwargs=True)
        norm.register_forward_hook(partial(_whole_again, group))
        for p in {*layers.parameters(), *norm.parameters()}:
            if id(p) not in inside:  # these see this rank's tokens
                _sum_gradient(p, group)
    if vocab:
        _split_vocab(made)
    return made


def _blocks(
    model: nn.Module, plan: dict[str, str] | None, mixtures: dict[str, list[str]]
) -> dict[str, tuple[list[str], list[str]]]:
    """Returns the children that are split by columns and by rows, for each block by its name."""
    if plan is None:
        config = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
        plan = {**(config or {}), **(getattr(model, "_tp_plan", None) or {})} or None
    given = plan or {f"*{name}": style for name, style in OURS.items()}
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name, module in model.named_modules():
        for pattern, style in given.items():
            ends = pattern.startswith("*") and name.rpartition(".")[2] == pattern[1:]
            if not ends and not re.fullmatch(r"(.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+"), name):
                continue
            if style in WHOLE or name in mixtures:
                continue
            if style not in ("colwise", "rowwise") or not isinstance(module, nn.Linear):
                kind = type(module).__name__
                raise RidgelineError(
                    f"parallelize: {name} must be a linear layer split colwise or rowwise, got {style!r} for {kind}"
                )
            parent, _, child = name.rpartition(".")
            found.setdefault(parent, ([], []))[style == "rowwise"].append(child)
            break
    for name, (columns, rows) in found.items():
        if not columns or not rows:
            there = columns or rows
            raise RidgelineError(f"parallelize: {name} needs layers by columns and one by rows, got {', '.join(there)}")
    if not found and not mixtures:
        raise RidgelineError("parallelize: the model has none of the plan's layers")
    return found


def _linear(module: nn.Module, name: str) -> nn.Linear:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _check_block(name: str, block: nn.Module, columns: list[str], rows: list[str], world: int) -> None:
    dim: Any = getattr(block, "head_dim", None) or getattr(getattr(block, "size", None), "dim", None)
    for child in columns:
        outputs = _linear(block, child).weight.shape[0]
        heads = dim and len(columns) == 3 and child in ("q_proj", "k_proj", "v_proj")
        many, what = (outputs // dim, "heads") if heads else (outputs, "outputs")
        if many % world:
            raise RidgelineError(f"parallelize: {world} ranks must divide the {many} {what} of {name}.{child}")
    for child in rows:
        inputs = _linear(block, child).weight.shape[1]
        if inputs % world:
            raise RidgelineError(f"parallelize: {world} ranks must divide the {inputs} inputs of {name}.{child}")


def _split(made: TensorParallel, name: str, dim: int) -> None:
    """Makes a linear layer's parameters this rank's part. A bias of a layer by rows stays whole."""
    layer, world, rank = _linear(made.model, name), groups.size(made.group), groups.rank(made.group)
    layer.weight = _part(layer.weight, dim, world, rank)
    made.splits[f"{name}.weight"] = dim
    if layer.bias is not None and dim == 0:
        layer.bias = _part(layer.bias, 0, world, rank)
        made.splits[f"{name}.bias"] = 0
    elif layer.bias is not None:
        # The block's results are summed, so each rank adds its share of the bias, and all shares learn alike.
        layer.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=layer.bias.requires_grad)
        layer.forward = partial(_by_rows, layer, world)  # type: ignore[method-assign]
    if dim == 0:
        layer.out_features = layer.weight.shape[0]
    else:
        layer.in_features = layer.weight.shape[1]


def _by_rows(layer: nn.Linear, world: int, x: torch.Tensor) -> torch.Tensor:
    bias = layer.bias / world
    bias.register_hook(lambda d: d * world) if bias.requires_grad else None
    return nn.functional.linear(x, layer.weight, bias)


def _part(p: torch.Tensor, dim: int, world: int, rank: int) -> nn.Parameter:
    return nn.Parameter(p.detach().chunk(world, dim)[rank].clone(), requires_grad=p.requires_grad)


def _sum_gradient(p: nn.Parameter, group: Any) -> None:
    if p.requires_grad and groups.size(group) > 1:
        p.register_hook(partial(_summed_gradient, group))


def _summed_gradient(group: Any, d: torch.Tensor) -> torch.Tensor:
    return summed(d, group)


# --- experts


def _mixtures(model: nn.Module, world: int, sequence: bool) -> dict[str, list[str]]:
    """Returns the names of the parameters with a row for each expert, for each module of experts by its name."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        given: dict[str, Any] = getattr(module.__dict__.get("forward"), "keywords", {})
        if isinstance(module, ridgeline.nn.QuantizedMoE):
            raise RidgelineError(f"parallelize: quantised experts cannot be split over ranks, and {name} has them")
        if isinstance(module, ridgeline.nn.MoE):
            found[name] = ["gate_up_proj", "down_proj"]
            if sequence and module.auxiliary:
                raise RidgelineError(
                    f"parallelize: with sequence=True the auxiliary loss of {name} would see this rank's tokens only"
                )
        elif "transposed" in given and {"gate_up", "down"} <= given.get("names", {}).keys():  # by hf.patch
            roles = "gate_up", "down", "gate_up_bias", "down_bias"
            found[name] = [given["names"][role] for role in roles if role in given["names"]]
        else:
            continue
        many = getattr(module, found[name][0]).shape[0]
        if many % world:
            raise RidgelineError(f"parallelize: {world} ranks must divide the {many} experts of {name or 'the model'}")
    if not found:
        raise RidgelineError("parallelize: experts=True needs nn.MoE, or experts that hf.patch has patched")
    return found


def _split_experts(made: TensorParallel, mixtures: dict[str, list[str]], sequence: bool) -> set[int]:
    """Makes the experts' parameters this rank's, and returns their ids: their gradients are sums of all tokens."""
    own: set[int] = set()
    for name, parameters in mixtures.items():
        module = made.model.get_submodule(name)
        for child in parameters:
            part = _part(getattr(module, child), 0, groups.size(made.group), groups.rank(made.group))
            setattr(module, child, part)
            made.splits[f"{name}.{child}".removeprefix(".")] = 0
            own.add(id(part))
        module.spread_moe = partial(_spread, made.group, sequence)  # type: ignore[assignment]
    return own


def _spread(
    group: Any, sequence: bool, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, **options: Any
) -> torch.Tensor:  # fmt: skip
    """`ridgeline.moe` with experts of all ranks. Without sequence, x is the same on all, and so is the result."""
    if sequence or groups.size(group) == 1:
        return spread.moe(x, weights, indices, gate_up, down, group=group, **options)
    world, rank, shape = groups.size(group), groups.rank(group), x.shape
    x, weights, indices = (t.reshape(-1, t.shape[-1]) for t in (shared(x, group), shared(weights, group), indices))
    many = len(x)
    first, last = (many * r // world for r in (rank, rank + 1))
    x, weights, indices = (t[first:last] for t in (x, weights, indices))
    y = spread.moe(x, weights, indices, gate_up, down, group=group, **options)
    return summed(nn.functional.pad(y, (0, 0, first, many - last)), group).view(shape)


# --- hooks


def _first(change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Changes the first tensor of a call: the hidden states."""
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    for name in ("hidden_states", "x"):
        if name in kwargs:
            return args, kwargs | {name: change(kwargs[name])}
    raise RidgelineError("parallelize: a block's first argument must be its input, a tensor, or hidden_states= or x=")


def _result(change: Callable[[torch.Tensor], torch.Tensor], found: Any) -> Any:
    """Changes a result, or the first of several."""
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)


def _enter(group: Any, sequence: bool, block: nn.Module, args: Any, kwargs: Any) -> Any:
    return _first(lambda x: gathered(x, group, TOKENS) if sequence else shared(x, group), args, kwargs)


def _leave(group: Any, sequence: bool, block: nn.Module, args: Any, found: Any) -> Any:
    return _result(lambda y: scattered(y, group, TOKENS) if sequence else summed(y, group), found)


def _into_pieces(group: Any, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    def cut(x: torch.Tensor) -> torch.Tensor:
        if x.shape[TOKENS] % groups.size(group):
            raise RidgelineError(
                f"parallelize: with sequence=True the number of tokens must be a multiple of the "
                f"{groups.size(group)} ranks, got {x.shape[TOKENS]}"
            )
        return piece(x, group, TOKENS)

    return _first(cut, args, kwargs)


def _whole_again(group: Any, norm: nn.Module, args: Any, found: Any) -> Any:
    return _result(lambda y: gathered(y, group, TOKENS, alike=True), found)


def _stack(model: nn.Module, blocks: dict[str, Any]) -> tuple[nn.ModuleList, nn.Module]:
    """Returns the list of layers that holds all blocks, and the norm after it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and all(block.startswith(f"{name}.") for block in blocks):
            norm = getattr(model.get_submodule(name.rpartition(".")[0]), "norm", None)
            if isinstance(norm, nn.Module):
                _check_mixing(name, module, blocks)
                return module, norm
    raise RidgelineError(
        "parallelize: sequence=True needs an nn.ModuleList that holds all blocks, and a `norm` in the same module"
    )


def _check_mixing(stack: str, layers: nn.ModuleList, blocks: dict[str, Any]) -> None:
    """Raises RidgelineError if attention, or a recurrence, is no block: it would see one rank's tokens alone."""
    for name, module in layers.named_modules(prefix=stack):
        kind = type(module).__name__
        if kind.endswith(("Attention", "DeltaNet", "Mixer")) and name not in blocks:
            raise RidgelineError(f"parallelize: sequence=True needs a plan that splits the {kind} {name}")


# --- the vocabulary


def _check_vocab(model: nn.Module, world: int) -> None:
    head, body = getattr(model, "lm_head", None), getattr(model, "model", None)
    ours = isinstance(head, nn.Linear) and isinstance(getattr(body, "embed_tokens", None), nn.Embedding)
    if not ours or not hasattr(model, "loss"):
        raise RidgelineError("parallelize: vocab needs a lm.Transformer: model.embed_tokens, lm_head and loss")
    assert isinstance(head, nn.Linear)
    if head.weight.shape[0] % world:
        raise RidgelineError(f"parallelize: {world} ranks must divide the vocabulary of {head.weight.shape[0]}")


def _split_vocab(made: TensorParallel) -> None:
    model: Any = made.model
    embed, head, world, rank = model.model.embed_tokens, model.lm_head, groups.size(made.group), groups.rank(made.group)
    tied = head.weight is embed.weight
    embed.weight = _part(embed.weight, 0, world, rank)
    head.weight = embed.weight if tied else _part(head.weight, 0, world, rank)
    made.splits |= {"model.embed_tokens.weight": 0, "lm_head.weight": 0}
    embed.forward = partial(_embedded, made.group, embed)
    head.forward = partial(_all_logits, made.group, head)
    model.loss = partial(loss.linear_cross_entropy, group=made.group)


def _embedded(group: Any, embed: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    assert isinstance(embed.weight, torch.Tensor)
    return summed(looked_up(tokens, embed.weight, group), group)


def _all_logits(group: Any, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(head.weight, torch.Tensor)
    return gathered(nn.functional.linear(shared(x, group), head.weight), group, -1, alike=True)
