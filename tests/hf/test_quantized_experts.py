"""Experts of few bits in models of transformers: `patch(quantize=...)` against the same experts in full."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, tokens

import ridgeline
from ridgeline import few_bits, formats, hf
from ridgeline.hf.experts import CODES, FewBitExperts
from ridgeline.nn import QuantizedMoE
from ridgeline.op import RidgelineError
from ridgeline.tiles.few_bits import Weight, plain

MODELS: dict[str, dict[str, Any]] = {"Qwen3Moe": {}, "Mixtral": {}, "GptOss": {"intermediate_size": 64}}


def experts_of(model: Any) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if n.endswith(".experts")}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits + 0


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Experts (E, N, K) as their codes have them."""
    q, scale, zero = QuantizedMoE.codes(weight, kind, QuantizedMoE.group_of(kind, None, weight.shape[2]))
    return torch.stack(
        [plain(*Weight(q[e], scale[e], None if zero is None else zero[e]), torch.float32) for e in range(q.shape[0])]
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CODES)
def test_experts_equal_the_dequantised_ones(name: str, kind: str) -> None:
    model, ids = build(name, **MODELS[name]).eval(), tokens()
    own = copy.deepcopy(model)
    with torch.no_grad():
        for m in experts_of(own).values():
            for weight in (m.gate_up_proj, m.down_proj):
                turned = weight.mT if name == "GptOss" else weight
                turned.copy_(rounded(turned.contiguous(), kind))
    if kind in few_bits.KINDS:  # the linear layers alike
        few_bits.quantize(own, kind, lambda n: "layers" in n)
    told = hf.explain(model, quantize=kind)
    assert all(type(m) is not FewBitExperts for m in experts_of(model).values())
    report = hf.patch(model, quantize=kind)
    rows = [r for r in report.rows if r.name in experts_of(model)]
    assert len(rows) == 2
    assert all((r.op, r.reason) == ("moe", f"weights of {kind}") for r in rows)
    assert {(r.name, r.op) for r in report.rows} == {(r.name, r.op) for r in told.rows}
    assert report.share_of_flops == pytest.approx(told.share_of_flops)
    assert all(type(m) is FewBitExperts and m.kind == kind for m in experts_of(model).values())
    found = logits(model, ids)
    torch.testing.assert_close(found, logits(own, ids), rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, logits(build(name, **MODELS[name]), ids))
    assert torch.equal(logits(copy.deepcopy(model), ids), found)


def published(folder: Path, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """Writes a gpt-oss in the layout of its published files. Returns it in full, and the codes and scales written.

    A block's largest number is 4 or 6, as whoever rounds to mxfp4 leaves it."""
    from safetensors.torch import save_file

    model = build("GptOss", seed=seed, intermediate_size=64).eval()
    state, codes = dict(model.state_dict()), {}
    for name, module in experts_of(model).items():
        for own, weight in (("gate_up_proj", module.gate_up_proj), ("down_proj", module.down_proj)):
            E, K, N = weight.shape
            numbers = torch.randint(0, 16, (E, N, K // 32, 32), dtype=torch.uint8)
            numbers[..., 5] = numbers[..., 5] & 8 | 6 + (numbers[..., 5] & 1)
            blocks, scales = numbers[..., ::2] | numbers[..., 1::2] << 4, torch.randint(118, 124, (E, N, K // 32))
            scales = scales.to(torch.uint8)
            levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            values = levels[(numbers & 7).long()] * (1 - 2 * (numbers >> 3).float())
            with torch.no_grad():
                weight.copy_((values * torch.exp2(scales.float() - 127)[..., None]).flatten(2).mT)
            del state[f"{name}.{own}"]
            codes |= {f"{name}.{own}_blocks": blocks.contiguous(), f"{name}.{own}_scales": scales}
    told = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(told))
    save_file({n: t.contiguous() for n, t in (state | codes).items()}, folder / "model.safetensors")
    return model, codes


def same_codes(model: Any, codes: dict[str, torch.Tensor]) -> None:
    for name, few in experts_of(model).items():
        assert type(few) is FewBitExperts
        for own, scale in (("gate_up_proj", few.gate_up_scale), ("down_proj", few.down_scale)):
            assert torch.equal(getattr(few, own), codes[f"{name}.{own}_blocks"].flatten(2))
            assert torch.equal(scale, codes[f"{name}.{own}_scales"])


def test_a_folder_of_gpt_oss_keeps_its_codes(tmp_path: Path) -> None:
    own, codes = published(tmp_path)
    ids, ours = tokens(), hf.load_quantized(tmp_path)
    same_codes(ours, codes)
    assert not any(t.is_meta for t in [*ours.parameters(), *ours.buffers()])
    torch.testing.assert_close(logits(ours, ids), logits(own, ids), rtol=2e-5, atol=2e-5)
    assert "weights of mxfp4" in str(hf.explain(ours))
    hf.unpatch(ours)  # its experts were never in full
    torch.testing.assert_close(logits(ours, ids), logits(own, ids), rtol=2e-5, atol=2e-5)
    half = hf.load_quantized(tmp_path, dtype=torch.bfloat16)
    same_codes(half, codes)
    assert {t.dtype for t in half.parameters()} == {experts_of(half)[next(iter(experts_of(half)))].down_bias.dtype}


def test_experts_loaded_in_full_get_their_codes_back(tmp_path: Path) -> None:
    """transformers makes bfloat16 of the folder where it has no kernels for mxfp4."""
    from transformers import AutoModelForCausalLM

    own, codes = published(tmp_path)
    for model in (own, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        hf.patch(model, quantize="mxfp4")
        same_codes(model, codes)


def test_rounding_again_keeps_every_value() -> None:
    """Also where a block's largest number is below 4, so that its codes change."""
    q, scale = torch.randint(0, 256, (8, 64), dtype=torch.uint8), torch.randint(9, 250, (8, 4)).to(torch.uint8)
    q[::2, :16] &= 0x33
    weight = formats.unpack_mxfp4(q, scale)
    assert torch.equal(weight.bfloat16().float(), weight)
    again = formats.unpack_mxfp4(*formats.pack_mxfp4(weight.bfloat16()))
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


LAYER = "model.layers.1.mlp.experts"
WRONG = {
    "lost": (lambda s: s.pop(f"{LAYER}.down_proj_scales"), f"lacks the tensor {LAYER}.down_proj_scales"),
    "dtype": (lambda s: s.update({f"{LAYER}.down_proj_blocks": s[f"{LAYER}.down_proj_blocks"].int()}), "torch.uint8"),
    "shape": (
        lambda s: s.update({f"{LAYER}.gate_up_proj_scales": torch.zeros(4, 128, 1, dtype=torch.uint8)}),
        rf"the tensor {LAYER}.gate_up_proj_scales of .* must be torch.uint8 \(4, 128, 2\), got .*\(4, 128, 1\)",
    ),
    "more": (lambda s: s.update({"model.more_blocks": torch.zeros(1)}), "holds the unknown tensor model.more_blocks"),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_a_damaged_folder_of_gpt_oss(which: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published(tmp_path)
    change, said = WRONG[which]
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(RidgelineError, match=said) as error:
        hf.load_quantized(tmp_path)
    assert "\n" not in str(error.value)


def test_state_dict_holds_codes() -> None:
    model, ids = build("Mixtral"), tokens()
    hf.patch(model, quantize="int4")
    other = build("Mixtral", seed=3)
    hf.patch(other, quantize="int4")
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))
    assert model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.uint8


def test_mxfp4_leaves_linear_layers() -> None:
    model = build("Qwen3Moe")
    hf.patch(model, quantize="mxfp4")
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    assert "in full: mxfp4 is for experts" in str(hf.explain(build("Qwen3Moe"), quantize="mxfp4"))


def test_unpatch_refuses_what_is_gone() -> None:
    model, ids = build("Mixtral"), tokens()
    hf.patch(model, quantize="mxfp4")
    own = logits(model, ids)
    with pytest.raises(RidgelineError, match=r"mlp.experts holds mxfp4 in place of the weight .* load the model again"):
        hf.unpatch(model)
    assert torch.equal(logits(model, ids), own)
    assert "weights of mxfp4" in str(hf.patch(model))
    assert torch.equal(logits(model, ids), own)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("int4", {"moe_intermediate_size": 48}, "in full: no group of 128, 64, 32 divides 48 columns"),
        ("mxfp4", {"moe_intermediate_size": 48}, "in full: no group of 32 divides 48 columns"),
        ("fp8", {}, "in full: moe has no experts of fp8"),
    ],
)
def test_experts_that_do_not_fit_stay(kind: str, options: dict[str, Any], said: str) -> None:
    model, ids = build("Qwen3Moe", **options), tokens()
    assert said in str(hf.explain(model, quantize=kind))
    hf.patch(model, quantize=kind)
    assert all(type(m) is not FewBitExperts for m in experts_of(model).values())
    assert logits(model, ids).isfinite().all()


def test_other_experts_stay() -> None:
    model = build("Qwen3Moe", hidden_act="gelu")
    report = hf.patch(model, quantize="int8")
    assert [r.reason for r in report.left() if r.name in experts_of(model)] == [
        "their activation is gelu, and moe has silu"
    ] * 2


def test_training_leaves_experts() -> None:
    model = build("Qwen3Moe")
    hf.patch(model, quantize="fp8-training")
    assert all(isinstance(m.gate_up_proj, torch.nn.Parameter) for m in experts_of(model).values())
    hf.unpatch(model)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", CODES)
def test_on_kernels(kind: str, device: str) -> None:
    model = build("Qwen3Moe").to(device)
    hf.patch(model, quantize=kind)
    few, x = model.model.layers[0].mlp.experts, torch.randn(9, 64, device=device)
    weights, indices = torch.rand(9, 4, device=device).topk(2)
    with torch.no_grad():
        found = few(x, indices, weights)
        few.cpu()
        scales, zeros = (few.gate_up_scale, few.down_scale), (few.gate_up_zero, few.down_zero)
        given = {"scales": scales, "zeros": zeros if kind == "int4" else None, "impl": "torch"}
        own = ridgeline.moe(x.cpu(), weights.cpu(), indices.cpu(), few.gate_up_proj, few.down_proj, **given)
    torch.testing.assert_close(found.cpu(), own, rtol=1e-4, atol=1e-5)
