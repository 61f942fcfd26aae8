"""The language model: Hugging Face's Llama and Qwen3, its sizes, and the ways of keeping less for backward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.lm import folder
from ridgeline.lm.model import Transformer, load
from ridgeline.lm.sizes import SIZES, Size, size
from ridgeline.op import RidgelineError

LLAMA = Size(3, 48, 80, 4, 2, 16, vocabulary=61, theta=500.0)
STRETCHED = Size(2, 48, 80, 4, 2, 16, vocabulary=61, theta=5e5, tied=True, stretch=(8.0, 1.0, 4.0, 64.0))
QWEN = Size(2, 48, 80, 4, 2, 16, vocabulary=61, theta=1e4, eps=1e-6, qk_norm=True, tied=True)
SHAPES = {"llama": LLAMA, "llama3.1": STRETCHED, "qwen3": QWEN}
Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def turned(x: torch.Tensor, s: Size) -> torch.Tensor:
    """Rotary positions as Hugging Face writes them: x cos + rotate_half(x) sin, over angles repeated twice."""
    turns = 1.0 / s.theta ** (torch.arange(0, s.dim, 2).float() / s.dim)
    if s.stretch:
        factor, low, high, old = s.stretch
        made = []
        for turn in turns.tolist():
            length = 2 * math.pi / turn
            if length < old / high:
                made.append(turn)
            elif length > old / low:
                made.append(turn / factor)
            else:
                smooth = (old / length - low) / (high - low)
                made.append((1 - smooth) * turn / factor + smooth * turn)
        turns = torch.tensor(made)
    angles = torch.outer(torch.arange(x.shape[2]).float(), turns)
    angles = torch.cat([angles, angles], -1)
    a, b = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-b, a], -1) * angles.sin().to(x.dtype)


def logits(p: Weights, tokens: torch.Tensor, s: Size) -> torch.Tensor:
    """The formulas of Llama and Qwen3 in plain PyTorch."""
    x = p["model.embed_tokens.weight"][tokens]
    for n in range(s.layers):
        w = {name.removeprefix(f"model.layers.{n}."): t for name, t in p.items()}
        h = norm(x, w["input_layernorm.weight"], s.eps)
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj.weight"].T).view(*tokens.shape, -1, s.dim).transpose(1, 2) for name in "qkv"
        )
        if s.qk_norm:
            q = norm(q, w["self_attn.q_norm.weight"], s.eps)
            k = norm(k, w["self_attn.k_norm.weight"], s.eps)
        q, k = turned(q, s), turned(k, s)
        k, v = (t.repeat_interleave(s.heads // s.groups, 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(s.dim)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"], s.eps)
        gate, up = (h @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, p["model.norm.weight"], s.eps) @ p["lm_head.weight"].T


def data(s: Size, context: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(s.vocabulary, (2, context + 1))
    target = tokens[:, 1:].clone()
    target[0, :4] = -100
    return tokens[:, :-1], target


def made(s: Size, dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
    """Returns a model whose norms have weights other than 1."""
    torch.manual_seed(3)
    model = Transformer(s, **options).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def gradients(model: torch.nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(tokens, target), list(model.parameters())))


@pytest.mark.parametrize("impl", ["ridgeline", "torch", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape: str, dtype: torch.dtype, impl: str) -> None:
    s = SHAPES[shape]
    model, (tokens, target) = made(s, dtype, impl=impl), data(s)
    near: Any = {"rtol": 2e-4, "atol": 2e-5}
    if dtype == torch.float64:  # angles are in float32, and Llama 3.1's are made in another order
        near = {"rtol": 1e-5, "atol": 1e-6} if s.stretch else {"rtol": 1e-9, "atol": 1e-9}
    plain = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    named = plain | ({"lm_head.weight": plain["model.embed_tokens.weight"]} if s.tied else {})
    wanted = logits(named, tokens, s)
    torch.testing.assert_close(model(tokens), wanted, **near)
    loss = F.cross_entropy(wanted.flatten(0, 1), target.flatten())
    torch.testing.assert_close(model(tokens, target), loss.float(), rtol=1e-6, atol=1e-6)
    found = gradients(model, tokens, target)
    for name, one, two in zip(plain, found, torch.autograd.grad(loss, list(plain.values())), strict=True):
        torch.testing.assert_close(one, two, **near, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "options",
    [{"every": 1}, {"every": 2}, {"nested": True}, {"every": 2, "nested": True}, {"remake": "cheap"}],
    ids=str,
)
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_keeping_less_gives_equal_gradients(shape: Size, options: dict[str, Any]) -> None:
    s = Size(5, 48, 80, 4, 2, 16, vocabulary=61, qk_norm=shape.qk_norm)
    tokens, target = data(s)
    wanted = gradients(made(s, torch.float32), tokens, target)
    found = gradients(made(s, torch.float32, **options), tokens, target)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def saved_bytes(**options: Any) -> int:
    """Returns the bytes that a model keeps for backward, without parameters."""
    s = Size(4, 64, 256, 4, vocabulary=50)
    model, kept = made(s, torch.float32, **options), {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        if options.get("remake"):
            from ridgeline.lm import model as module

            plain = module.Remade.pack

            def seen(self: Any, t: torch.Tensor) -> Any:
                out = plain(self, t)
                return pack(out) if isinstance(out, torch.Tensor) else out

            module.Remade.pack = seen  # type: ignore[method-assign]
            try:
                model(*data(s))
            finally:
                module.Remade.pack = plain  # type: ignore[method-assign]
        else:
            model(*data(s))
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


def test_remaking_keeps_less() -> None:
    """Two norms of width 64 and one product of width 256 for each of 4 layers and 42 tokens."""
    assert saved_bytes() - saved_bytes(remake="cheap") == 4 * 42 * (2 * 64 + 256) * 4


def test_two_backwards_of_one_forward() -> None:
    tokens, target = data(LLAMA)
    model = made(LLAMA, torch.float32, remake="cheap")
    loss = model(tokens, target)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for one, two in zip(torch.autograd.grad(loss, list(model.parameters())), first, strict=True):
        assert torch.equal(one, two)


def test_autocast_makes_again_in_the_same_dtype() -> None:
    tokens, target = data(LLAMA)
    found = []
    for options in ({}, {"remake": "cheap"}, {"every": 1}):
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(LLAMA, torch.float32, **options)(tokens, target)
        loss.backward()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] == pytest.approx(found[2], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": -1}, "at least 0"),
        ({"remake": "dear"}, "cheap"),
        ({"remake": "cheap", "every": 2}, "give either remake or a checkpoint"),
        ({"impl": "cuda"}, "impl must be"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RidgelineError, match=words):
        Transformer(LLAMA, **options)


# Parameters in millions, by the assignment's table, and published for the others.
COUNTS = {"small": 128.6, "medium": 423.2, "large": 969.4, "xl": 3407, "10b": 12830, "leaderboard": 8126,
          "llama-1b": 1236, "llama-8b": 8030, "qwen3-0.6b": 596}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == SIZES[name].parameters
    assert SIZES[name].parameters / 1e6 == pytest.approx(COUNTS.get(name, SIZES[name].parameters / 1e6), rel=6e-4)


@pytest.mark.parametrize("options", [{}, {"every": 1}, {"nested": True}, {"remake": "cheap"}], ids=str)
def test_meta_device(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Transformer(size("small", layers=3), **options)
        tokens = torch.randint(10_000, (2, 64))
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.is_meta
    assert all(p.grad.shape == p.shape for p in model.parameters())
    assert model(tokens).shape == (2, 64, 10_000)


def test_compiles_whole() -> None:
    model, (tokens, target) = made(LLAMA, torch.float32), data(LLAMA)
    wanted = gradients(model, tokens, target)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = torch.autograd.grad(compiled(tokens, target), list(model.parameters()))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


# --- folders


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    folder.write(made(LLAMA, torch.float32), tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_comes_back(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = made(SHAPES[shape], torch.bfloat16)
    folder.write(model, tmp_path)
    again = load(tmp_path)
    assert again.size == SHAPES[shape]
    assert {n: t.dtype for n, t in again.state_dict().items()} == {n: t.dtype for n, t in model.state_dict().items()}
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is again.size.tied
    assert not list(tmp_path.glob("*.part"))


def test_names_are_hugging_faces() -> None:
    names = set(made(QWEN).state_dict())
    layer = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))]
    layer += [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    wanted = {f"model.layers.{n}.{name}.weight" for n in range(2) for name in layer}
    assert names == wanted | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), r"lacks the tensor model\.norm\.weight"),
        (lambda w: w.update({"bias": torch.ones(1)}), "unknown tensor bias"),
        (lambda w: w.update({"lm_head.weight": torch.ones(2, 2)}), r"lm_head\.weight .*\(2, 2\).*\(61, 48\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_tensor_that_does_not_fit(kept: Path, change: Any, words: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(kept / folder.WEIGHTS)
    change(weights)
    save_file(weights, kept / folder.WEIGHTS)
    with pytest.raises(RidgelineError, match=words):
        load(kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2.*llama, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(kept: Path, change: dict[str, Any], words: str) -> None:
    config = json.loads((kept / folder.CONFIG).read_text()) | change
    config = {name: value for name, value in config.items() if value is not None}
    (kept / folder.CONFIG).write_text(json.dumps(config))
    with pytest.raises(RidgelineError, match=words):
        load(kept)


def test_damaged_folders(kept: Path) -> None:
    with pytest.raises(RidgelineError, match=r"holds no config\.json"):
        load(kept / "elsewhere")
    path = kept / folder.WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RidgelineError, match="damaged"):
        load(kept)
    path.unlink()
    with pytest.raises(RidgelineError, match=r"no \*\.safetensors"):
        load(kept)
    (kept / folder.CONFIG).write_text("{")
    with pytest.raises(RidgelineError, match="JSON"):
        load(kept)
