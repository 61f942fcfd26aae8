"""`ridgeline lm generate` on folders of transformers' models: greedy tokens are those of `generate`, one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build

from ridgeline import cli
from ridgeline.lm import loading
from ridgeline.lm.blocks import Blocks
from ridgeline.lm.decoder import Decoder
from ridgeline.lm.loop import Limits, Loop, Sampling

TEXTS = ["a", "good day to you", "one two three four five six seven eight nine ten"]
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Llama 3.1's positions": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "Qwen3": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(kind.split()[0], vocab_size=300, **KINDS[kind]).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)  # clear choices, which rounding does not change
    model.save_pretrained(tmp_path)
    count, wanted = 20, []
    for text in TEXTS:
        ids = torch.tensor([list(text.encode())])
        made = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
        wanted.append(made[0, ids.shape[1] :].tolist())
    assert len({tuple(t) for t in wanted}) == 3
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    words = ["lm", "generate", str(tmp_path), "--prompt", str(prompts), "--tokens", str(count), "--device", "cpu"]
    for more in ([], ["--batch", "2", "--chunk", "16", "--block", "16"], ["--draft", str(tmp_path), "--invariant"]):
        assert cli.main([*words, "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [s["tokens"] for s in found["sequences"]] == wanted


def test_stops_are_the_folders(tmp_path: Path) -> None:
    model = build("Llama", vocab_size=300).eval()
    ids = torch.tensor([[7, 8, 9]])
    free = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))[0].tolist()
    stop = free[6]
    model.generation_config.eos_token_id = stop
    model.save_pretrained(tmp_path)
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))[0].tolist()
    own = loading.load(str(tmp_path), torch.device("cpu"))
    assert own.stops == {stop}
    loop = Loop(Decoder(own.model, 4, 16, 64), None, Blocks(4, 16), Sampling(), Limits(1), own.stops)
    row = loop.add([7, 8, 9], 12)
    for _ in loop.run():
        pass
    assert row.tokens == wanted
