"""A patched model learns as an unpatched one does: tiny on the CPU in float32, and 200 steps in bfloat16 on a GPU."""

import equality
import pytest
import torch


@pytest.mark.parametrize("memory", [None, "recompute"])
def test_tiny(memory: str | None) -> None:
    passed, lines = equality.compare(equality.TINY, "cpu", torch.float32, memory)
    assert passed, "; ".join(lines)


def test_a_wrong_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: torch.nn.Module, memory: str | None = None) -> object:
        report = patch(model, memory=memory)
        with torch.no_grad():
            model.model.layers[0].input_layernorm.weight.mul_(1.001)  # type: ignore[union-attr, index]
        return report

    patch = equality.hf.patch
    monkeypatch.setattr(equality.hf, "patch", wrong)
    passed, lines = equality.compare(equality.TINY, "cpu", torch.float32)
    assert not passed, "; ".join(lines)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [None, "recompute"])
def test_llama_of_width_1024(memory: str | None) -> None:
    passed, lines = equality.compare(memory=memory)
    print("\n".join(lines))
    assert passed, "; ".join(lines)
