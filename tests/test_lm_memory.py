"""`ridgeline lm memory`, `checkpoint` and `precision`: predictions against measurements and formulas by hand."""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import cli
from ridgeline.lab import tables
from ridgeline.lm import checkpoint, memory, precision
from ridgeline.lm.ledger import Ledger, account, embody
from ridgeline.lm.model import Layer, Transformer
from ridgeline.lm.setup import build, shape
from ridgeline.lm.sizes import Size, size
from ridgeline.op import RidgelineError

TINY = ["--size", "tiny", "--context", "128"]
SMALL = ["--size", "small", "--layers", "2", "--context", "64", "--batch", "2"]


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    memory.arguments(parser)
    return parser.parse_args(["--device", "cpu", *given])


@pytest.mark.parametrize(
    "given",
    [
        *([*TINY, "--impl", impl, "--mode", mode] for impl in ("ridgeline", "naive") for mode in ("forward", "step")),
        [*TINY, "--mode", "backward", "--checkpoint", "1"],
        [*TINY, "--mode", "backward", "--remake", "cheap"],
        [*TINY, "--mode", "backward", "--layers", "4", "--nested"],
        [*TINY, "--precision", "bfloat16"],
        [*TINY, "--autocast", "bfloat16"],
        [*SMALL, "--mode", "forward"],
        SMALL,
        [*SMALL, "--impl", "torch"],
    ],
    ids=" ".join,
)
def test_the_prediction_is_what_the_allocator_sees(given: list[str]) -> None:
    """The CPU's allocator reports each allocation to the profiler, also those inside PyTorch's operations."""
    chosen = options(*given)
    use = memory.predicted(shape(chosen), chosen, None)
    assert use.peak == pytest.approx(memory.measured(build(chosen), chosen.mode), rel=0.05)


def test_notices_a_wrong_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """An account that misses what one module keeps is off by more than the tolerance."""
    note = Ledger.note
    monkeypatch.setattr(Ledger, "note", lambda self, *given: None if ".1.mlp" in self.at else note(self, *given))
    chosen = options(*TINY)
    use = memory.predicted(shape(chosen), chosen, None)
    assert use.peak < 0.9 * memory.measured(build(chosen), chosen.mode)


def test_kinds_at_the_peak() -> None:
    chosen = options(*SMALL)
    size, use = shape(chosen), memory.predicted(shape(chosen), chosen, None)
    assert use.kinds["weights"] == size.parameters * 4
    assert use.kinds["moments"] == size.parameters * 8
    assert use.kinds["data"] == 2 * 2 * 64 * 8
    assert sum(use.kinds.values()) == use.peak
    chosen = options(*TINY, "--mode", "forward")
    assert memory.predicted(shape(chosen), chosen, None).kinds["moments"] == 0
    whole = options(*TINY, "--batch", "32")
    use = memory.predicted(shape(whole), whole, None)
    assert sum(use.activations.values()) == use.kinds["activations"] > 0.6 * use.peak
    assert "layers.mlp" in use.activations
    used = {kind: values[-1] for kind, values in use.curve.items()}
    assert used["gradients"] == shape(whole).parameters * 4
    assert used["activations"] == 4  # the loss


@pytest.mark.parametrize(("name", "wanted"), [("llama-1b", 75_912), ("llama-8b", 139_400), ("qwen3-0.6b", None)])
def test_a_layer_saves_what_its_kernels_need(name: str, wanted: int | None) -> None:
    """Bytes per token in bfloat16 on an H100: two sums and two norms, q, k, v, o twice, gate, up and their product."""
    chosen = options("--size", name, "--context", "4096", "--precision", "bfloat16", "--batch", "1")
    s = shape(chosen)
    rows = memory.saved_by_block(s, chosen, "h100")
    q, v = s.heads * s.dim, s.groups * s.dim
    plain = 8 * s.width + 2 * (q + 2 * v) + 2 * q + 6 * s.hidden + 4 * s.heads + 8
    plain += s.qk_norm * (2 * (q + v) + 4 * (s.heads + s.groups))
    assert wanted in (None, plain)
    assert sum(row["bytes"] for row in rows) / 4096 == pytest.approx(plain, rel=0.01)
    assert rows[0]["shape"][-1] == s.hidden
    assert rows[0]["bytes"] == 4096 * s.hidden * 2


@pytest.mark.kernels
def test_a_layer_saves_what_was_predicted() -> None:
    """With our kernels: the interpreter runs the launchers whose outputs the account predicts."""
    s = Size(2, 32, 64, 2, vocabulary=50)
    chosen = options("--batch", "1", "--context", "16", "--device", "cpu")
    predicted = memory.saved_by_block(s, chosen, "h100")
    layer, found = Layer(s, "ridgeline"), {}
    x, stream = (torch.randn(1, 16, 32, requires_grad=True) for _ in range(2))
    cos, sin = Transformer(s).rotations(16, torch.device("cpu"))
    own = {t.untyped_storage()._cdata for t in (*layer.parameters(), cos, sin)}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in own:
            found[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x, stream, cos, sin)
    assert out
    real = sorted(t.untyped_storage().nbytes() for t in found.values())
    assert real == sorted(row["bytes"] for row in predicted)


def test_a_ledger_counts_storages_once() -> None:
    with Ledger() as ledger:
        x = torch.empty(100)
        y = x.view(10, 10).T
        z = x + 1
        assert [r.nbytes for r in ledger.live.values()] == [400, 400]
        del x, z
        assert [r.nbytes for r in ledger.live.values()] == [400]
        assert ledger.of(y) is ledger.records[0]
        del y
        assert not ledger.live
    assert [r.died is not None for r in ledger.records] == [True, True]
    with Ledger(rounding=512) as ledger:
        torch.empty(100)
    assert ledger.records[0].nbytes == 512


def test_the_residual_stream() -> None:
    """The assignment's: 5, 20 and 80 MiB."""
    for context, mib in ((128, 5), (512, 20), (2048, 80)):
        assert memory.residual_stream(size("xl"), 4, context, 4) == mib << 20


def test_prints_and_draws(tmp_path: Path, capsys: Any) -> None:
    given = ["lm", "memory", *TINY, "--device", "cpu"]
    assert cli.main([*given, "--picture", str(tmp_path / "m.html")]) == 0
    said = capsys.readouterr().out
    for words in ("peak, predicted", "peak, measured", "five largest", "residual stream", "layers.mlp"):
        assert words in said
    page = (tmp_path / "m.html").read_text()
    assert "<polygon" in page
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert cli.main([*given, "--card", "h100", "--json", "--picture", str(tmp_path / "m.svg")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert "measured_bytes" not in row
    assert sum(row["kinds"].values()) == row["peak_bytes"]
    ET.parse(tmp_path / "m.svg")
    assert cli.main([*given, "--grid", "16,32", "--record", str(tmp_path / "grid.jsonl")]) == 0
    assert sum("MiB" in line for line in capsys.readouterr().out.splitlines()) == 8
    rows = [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()]
    assert [row["context"] for row in rows] == [16] * 4 + [32] * 4
    assert all(row["measured_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05) for row in rows)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["memory", "--snapshot", "a.pickle", "--device", "cpu"], "on a GPU"),
        (["memory", "--picture", "a.png"], ".svg or .html"),
        (["memory", "--picture", "/nowhere/a.svg"], "does not exist"),
        (["memory", "--card", "voodoo"], "unknown GPU"),
        (["memory", "--grid", "a"], "--grid: takes a whole number"),
        (["memory", "--grid", "0"], "--grid takes whole numbers of 1 or more"),
        (["memory", "--context", "0"], "--context must be"),
        (["memory", "--size", "huge"], "no size 'huge'"),
        (["checkpoint", "--mode", "forward"], "backward or step"),
        (["checkpoint", "--memory", "0"], "--memory must be"),
        (["checkpoint", "--checkpoint", "2"], "leave --checkpoint"),
        (["checkpoint", "--memory", "1e-4", *TINY], "no way fits"),
        (["precision", "--picture", "/nowhere/a.svg"], "does not exist"),
    ],
    ids=str,
)
def test_bad_options(given: list[str], words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lm", *given])
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not said.out


# --- checkpoint


@pytest.mark.parametrize(
    "way",
    [checkpoint.Way(), *map(checkpoint.Way, (1, 2, 3, 7)), *(checkpoint.Way(n, True) for n in (0, 1, 2, 3))],
    ids=str,
)
@pytest.mark.parametrize("layers", [1, 2, 5, 8])
def test_recomputed_layers(way: checkpoint.Way, layers: int) -> None:
    """The formula counts the forwards of layers that a backward runs."""
    model = Transformer(Size(layers, 16, 16, 1, vocabulary=20), every=way.every, nested=way.nested)
    ran: list[nn.Module] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, _: ran.append(module))
    tokens = torch.randint(20, (1, 4))
    model(tokens, tokens).backward()
    assert len(ran) - layers == way.recomputed(layers)


def test_operations_are_those_that_run() -> None:
    """Products with weights, in a model whose attention is negligible; a checkpoint leaves out its last product."""
    s = Size(4, 128, 256, 8, vocabulary=100)
    tokens = torch.randint(100, (4, 16))
    for way in (checkpoint.Way(), checkpoint.Way(2)):
        model = Transformer(s, "naive", way.every)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        assert counter.get_total_flops() == pytest.approx(way.operations(s, 4, 16), rel=0.05)


def test_the_best_way() -> None:
    rows: list[dict[str, Any]] = [
        {"way": "all", "peak_bytes": 100, "operations": 3, "remake": None},
        {"way": "cheap", "peak_bytes": 60, "operations": 3, "remake": "cheap"},
        {"way": "one", "peak_bytes": 30, "operations": 4, "remake": None},
        {"way": "four", "peak_bytes": 40, "operations": 4, "remake": None},
    ]
    assert [checkpoint.best(rows, n)["way"] for n in (100, 99, 59, 39)] == ["all", "cheap", "one", "one"]
    with pytest.raises(RidgelineError, match="no way fits"):
        checkpoint.best(rows, 29)


def test_checkpoints_need_less(capsys: Any) -> None:
    given = ["lm", "checkpoint", *TINY, "--layers", "8", "--context", "256", "--card", "cpu", "--mode", "backward"]
    assert cli.main([*given, "--json", "--memory", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    peaks = {row["way"]: row["peak_bytes"] for row in found["ways"]}
    kept = {row["way"]: row["kept_bytes"] for row in found["ways"]}
    assert kept["nested halves"] < kept["1 a checkpoint"] < kept["keep everything"]
    assert peaks["keep everything"] > peaks["cheap results again"] > peaks["1 a checkpoint"]
    assert found["best"]["way"] == "keep everything"
    assert [row["more"] for row in found["ways"][:2]] == [1.0, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "step"])
@pytest.mark.parametrize("every", ["0", "2"])
def test_the_prediction_on_a_gpu(mode: str, every: str) -> None:
    parser = argparse.ArgumentParser()
    memory.arguments(parser)
    given = ["--size", "small", "--precision", "bfloat16", "--context", "1024", "--mode", mode, "--checkpoint", every]
    chosen = parser.parse_args(given)
    use = memory.predicted(shape(chosen), chosen, memory.card_of(chosen))
    assert use.peak == pytest.approx(memory.measured(build(chosen), mode), rel=0.05)


# --- precision


def test_sums_of_the_assignment() -> None:
    errors = {row["sum"]: row["error"] for row in precision.accumulated()}
    assert errors["float32 += float32"] == pytest.approx(0, abs=2e-4)
    assert errors["float16 += float16"] == pytest.approx(-0.046875)
    assert errors["float32 += float16"] == errors["float32 += float32(float16)"] == pytest.approx(0.002136, abs=1e-5)


def test_dtypes_under_autocast() -> None:
    found = precision.autocast_dtypes(torch.bfloat16, "cpu")
    assert found["parameters"] == found["gradients"] == found["loss"] == "float32"
    assert found["fc1's output"] == found["logits"] == "bfloat16"


@pytest.mark.gpu
def test_autocast_on_a_gpu_keeps_layer_norm_in_float32() -> None:
    assert precision.autocast_dtypes(torch.float16, "cuda")["ln's output"] == "float32"


def test_formats() -> None:
    for name, f in precision.FORMATS.items():
        nearest = f.rounded(torch.tensor([1 + f.spacing, 1 + f.spacing / 2, 1 + 1.5 * f.spacing, f.largest, f.normal]))
        wanted = [1 + f.spacing, 1.0, 1 + 2 * f.spacing, f.largest, f.normal]
        if name != "float32":
            assert nearest.tolist() == pytest.approx(wanted, rel=0), name
        assert 1 + f.exponent + f.fraction in (8, 16, 19, 32)
        assert f.rounded(torch.tensor([f.least])).item() > 0
    assert precision.tf32(torch.tensor([math.inf, -1.5])).tolist() == [math.inf, -1.5]
    assert precision.FORMATS["e4m3"].largest == 448


def test_a_printed_table_shows_strings_as_they_are(capsys: Any) -> None:
    words, figures, rows = ["name"], ["size"], [("[red]a[/red]", "1.0"), ("b", "12.0")]
    tables.print_table("title", words, figures, rows)
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert said[:-1] == tables.table_text("title", words, figures, rows).splitlines()
    assert [line.split() for line in said[4:6]] == [["[red]a[/red]", "1.0"], ["b", "12.0"]]


def test_a_wide_table_loses_nothing_in_a_pipe(capsys: Any) -> None:
    cells = [f"{n}.00 GiB and more" for n in range(12)]
    tables.print_table(None, ["word"], [f"figure {n}" for n in range(12)], [("x", *cells)])
    said = capsys.readouterr().out
    assert all(cell in said for cell in cells)


def test_precision_prints_and_draws(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["lm", "precision", "--device", "cpu", "--picture", str(tmp_path / "p.svg")]) == 0
    said = capsys.readouterr().out
    for words in ("float16 += float16", "fc1's output", "e5m2"):
        assert words in said
    assert len(ET.parse(tmp_path / "p.svg").findall(".//{*}rect")) == 12


def test_four_layers_in_two_checkpoints_keep_two_inputs() -> None:
    """The assignment's example: 160 MiB for 4 x 2048 tokens of width 2560 in float32."""
    with torch.device("meta"):
        model = Transformer(Size(4, 2560, 10240, 16, vocabulary=64), every=2)
        cos, sin = model.rotations(2048, torch.device("meta"))
    with account("h100") as ledger:
        embody(model)
        cos, sin = torch.empty(cos.shape), torch.empty(sin.shape)
        x = torch.empty(4, 2048, 2560, requires_grad=True)
        start = ledger.events
        out = model._span(0, 4, x, None, cos, sin)
        given = {id(record) for record in map(ledger.of, out)}
        kept = [r.nbytes for r in ledger.live.values() if r.born > start and id(r) not in given]
        first = ledger.of(x)
    assert first is not None
    assert first.nbytes + sum(kept) == pytest.approx(160 << 20, rel=1e-3)
