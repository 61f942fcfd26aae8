"""Models of few bits: `patch(quantize=...)`, and folders of GPTQ and AWQ against the dequantised model."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, tokens
from safetensors.torch import save_file

from ridgeline import formats, hf, nn, quantize_int4
from ridgeline.op import RidgelineError

KINDS = {"int8": nn.Int8Linear, "int4": nn.Int4Linear, "fp8": nn.Fp8InferenceLinear}
BOUND = {"int8": 0.02, "int4": 0.2, "fp8": 0.1}


def layers(model: Any) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits + 0


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Phi3"])
@pytest.mark.parametrize("kind", KINDS)
def test_patch_quantizes_the_layers(name: str, kind: str) -> None:
    model = build(name, num_hidden_layers=1, **({"layer_types": ["full_attention"]} if name == "Qwen2" else {}))
    ids, names, before = tokens(), layers(model), str(hf.explain(model))
    own = logits(model, ids)
    told = hf.explain(model, quantize=kind)
    assert [r.name for r in told.rows if r.part == "linear"] == names
    assert str(hf.explain(model)) == before
    report = hf.patch(model, quantize=kind)
    assert {(r.name, r.op) for r in report.rows} == {(r.name, r.op) for r in told.rows}
    assert report.share_of_flops == pytest.approx(told.share_of_flops)
    assert all(type(model.get_submodule(n)) is KINDS[kind] for n in names)
    assert type(model.lm_head) is torch.nn.Linear
    off = (logits(model, ids) - own).norm() / own.norm()
    assert 0 < off < BOUND[kind]


def test_unpatch_refuses_what_is_gone() -> None:
    model = build("Llama")
    hf.patch(model, quantize="int8")
    ids = tokens()
    own = logits(model, ids)
    with pytest.raises(RidgelineError, match=r"q_proj holds int8 in place of the weight .* load the model again"):
        hf.unpatch(model)
    assert torch.equal(logits(model, ids), own)
    assert "int8_linear" in str(hf.patch(model))
    assert torch.equal(logits(copy.deepcopy(model), ids), own)


def test_layers_that_do_not_fit_stay() -> None:
    model = build("Llama", intermediate_size=88)
    report = hf.patch(model, quantize="int4")
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is nn.Int4Linear
    assert "silu_mul" in str(report)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"quantize": "int3"},
            "quantize must be None or one of 'int8', 'int4', 'fp8', 'mxfp4', 'fp8-training', got 'int3'",
        ),
        ({"quantize": "int8", "memory": "recompute"}, "memory is for training, and quantize for inference"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RidgelineError, match=said):
        hf.patch(build("Llama"), **options)


def write(folder: Path, name: str = "Llama", method: str = "gptq", **options: Any) -> Any:
    """Writes a tiny folder, and returns the model of transformers whose weights are the dequantised ones."""
    version, order, group = options.get("version", 1), options.get("order", False), options.get("group", 32)
    more = {"layer_types": ["full_attention"] * 2, "use_sliding_window": False} if name == "Qwen2" else {}
    model = build(name, seed=5, tie_word_embeddings=options.get("tied", False), **more).eval()
    torch.manual_seed(options.get("seed", 1))
    state = {n: t.clone() for n, t in model.state_dict().items()}
    if options.get("tied"):
        del state["lm_head.weight"]
    for layer in layers(model):
        w = model.get_submodule(layer).weight
        columns = w.shape[1]
        size = columns if group == -1 else group
        place = torch.randperm(columns) if order else torch.arange(columns)
        q, scale, zero = quantize_int4(w[:, place], group=size, symmetric=options.get("sym", False))
        if zero is not None and method == "gptq" and version == 1:
            zero = zero.clamp(1)
        codes, zeros = formats.nibbles(q), 8 if zero is None else zero.float().repeat_interleave(size, 1)
        full = (codes.float() - zeros) * scale.repeat_interleave(size, 1)
        back = place.argsort()
        w.data.copy_(full[:, back])
        if method == "awq":
            names, made = ("qweight", "qzeros", "scales"), formats.pack_awq(q, scale, zero)
        else:
            names = ("qweight", "qzeros", "scales", "g_idx")
            made = formats.pack_gptq(formats.pairs(codes[:, back]), scale, zero, (back // size).int(), version=version)
        del state[f"{layer}.weight"]
        state |= {f"{layer}.{n}": t for n, t in zip(names, made, strict=True)}
    folder.mkdir(exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": {
        "quant_method": method, "bits": 4, "group_size": group, "desc_act": order, "sym": options.get("sym", False),
        **({"version": "gemm"} if method == "awq" else {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}),
    }}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    store(folder, state, options.get("shards", 1))
    return model


def store(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> None:
    state = {n: t.contiguous() for n, t in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    places = {}
    for n in range(shards):
        part, file = dict(list(state.items())[n::shards]), f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


FOLDERS = {
    "gptq": {},
    "gptq v2": {"version": 2},
    "gptq act-order": {"order": True},
    "gptq symmetric": {"sym": True},
    "gptq whole rows": {"group": -1},
    "gptq sharded, tied": {"shards": 3, "tied": True},
    "awq": {"method": "awq"},
    "awq Qwen2 with bias": {"method": "awq", "name": "Qwen2"},
    "gptq Qwen3 v2 act-order": {"version": 2, "order": True, "name": "Qwen3"},
}


@pytest.mark.parametrize("which", FOLDERS)
def test_a_folder_equals_the_dequantised_model(which: str, tmp_path: Path) -> None:
    own, ids = write(tmp_path, **FOLDERS[which]), tokens()
    ours = hf.load_quantized(tmp_path)
    assert all(type(ours.get_submodule(n)) is nn.Int4Linear for n in layers(own))
    torch.testing.assert_close(logits(ours, ids), logits(own, ids), rtol=2e-5, atol=2e-5)
    assert not any(t.is_meta for t in [*ours.parameters(), *ours.buffers()])
    hf.unpatch(ours)  # its weights were never in full
    torch.testing.assert_close(logits(ours, ids), logits(own, ids), rtol=2e-5, atol=2e-5)


def test_the_folders_generation_config(tmp_path: Path) -> None:
    own = write(tmp_path)
    own.generation_config.eos_token_id = 41
    own.generation_config.save_pretrained(tmp_path)
    assert hf.load_quantized(tmp_path).generation_config.eos_token_id == 41


def changed(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    change(state)
    store(folder, state)


Q = "model.layers.1.self_attn.k_proj"
DAMAGE = {
    "lost qzeros": (lambda s: s.pop(f"{Q}.qzeros"), f"lacks the tensor {Q}.qzeros"),
    "lost norm": (lambda s: s.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
    "unknown": (lambda s: s.update(more=torch.zeros(1)), "holds the unknown tensor more"),
    "unknown layer": (lambda s: s.update({"x.qweight": torch.zeros(1)}), r"holds the tensor x.qweight, but x is"),
    "shape": (lambda s: s.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight of .* has the shape \(3,\)"),
    "scales": (lambda s: s[f"{Q}.scales"].fill_(float("nan")), f"the tensor {Q}.scales of .* is damaged"),
    "short": (lambda s: s.update({f"{Q}.qweight": s[f"{Q}.qweight"][:4].clone()}), f"layer {Q} of .* does not fit"),
    "g_idx": (lambda s: s[f"{Q}.g_idx"].fill_(1), f"the layer {Q} of .* g_idx must have"),
    "g_idx below 0": (lambda s: s[f"{Q}.g_idx"].fill_(-1), f"the layer {Q} of .* g_idx must count groups from 0"),
    "bias": (lambda s: s.update({f"{Q}.bias": torch.ones(32)}), f"the tensor {Q}.bias"),
}  # fmt: skip


@pytest.mark.parametrize("which", DAMAGE)
def test_a_damaged_folder_is_one_sentence(which: str, tmp_path: Path) -> None:
    write(tmp_path)
    change, said = DAMAGE[which]
    changed(tmp_path, change)
    with pytest.raises(RidgelineError, match=said) as error:
        hf.load_quantized(tmp_path)
    assert "\n" not in str(error.value)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"quantization_config": None}, "has no quantization_config"),
    "method": ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "has quant_method 'hqq'"),
    "bits": ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "weights of 3 bits"),
    "group": ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 0}}, "has group_size 0"),
    "format": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}},
        "stores awq in the format 'gemv'",
    ),
    "model": ({"model_type": "unheard"}, "gives no causal language model of transformers"),
}


@pytest.mark.parametrize("which", CONFIGS)
def test_an_unknown_config_is_one_sentence(which: str, tmp_path: Path) -> None:
    write(tmp_path)
    change, said = CONFIGS[which]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RidgelineError, match=said) as error:
        hf.load_quantized(tmp_path)
    assert "\n" not in str(error.value)


def test_folders_without_files(tmp_path: Path) -> None:
    with pytest.raises(RidgelineError, match=r"holds no config\.json"):
        hf.load_quantized(tmp_path)
    write(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"nothing")
    with pytest.raises(RidgelineError, match="is damaged or cannot be read"):
        hf.load_quantized(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RidgelineError, match=r"says that the tensor .* is in model-00002.* which is not there"):
        hf.load_quantized(tmp_path)


@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_patch_trains_in_8_bits(name: str) -> None:
    """The layers inside the blocks compute in 8 bits and keep their weights; `unpatch` gives all back."""
    model = build(name, num_hidden_layers=2)
    ids, names, state = tokens(), layers(model), copy.deepcopy(model.state_dict())
    own = model(ids, labels=ids)
    own.loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    told = hf.explain(model, quantize="fp8-training")
    report = hf.patch(model, quantize="fp8-training")
    assert {r.name for r in report.rows if r.op == "fp8_linear"} == set(names)
    assert {(r.name, r.op) for r in report.rows} == {(r.name, r.op) for r in told.rows}
    assert all(type(model.get_submodule(n)) is torch.nn.Linear for n in names)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert 0 < abs(loss - own.loss) < 0.02 * own.loss
    for n, p in model.named_parameters():
        assert 0 < (p.grad - wanted[n]).norm() < 0.3 * wanted[n].norm(), n
    hf.unpatch(model)
    assert torch.equal(model(ids, labels=ids).loss, own.loss)
    with pytest.raises(RidgelineError, match="leave out memory"):
        hf.patch(model, quantize="fp8-training", memory="recompute")
