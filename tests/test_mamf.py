"""`ridgeline mamf`: ranges, waves and dips, the file that a run continues, the picture and the page's tables."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from ridgeline import cli
from ridgeline.lab.analysis import sheets
from ridgeline.lab.analysis.mamf import found, heat, shapes, timing, waves
from ridgeline.lab.measurement import query, store
from ridgeline.lab.measurement.sheet import Sheet
from ridgeline.op import RidgelineError

FEW = ["mamf", "--device", "cpu", "--range", "16:48:16", "--k", "32", "--dtype", "f32"]
MACHINE = dict.fromkeys(store.MACHINE, "x") | {"gpu": "NVIDIA H200", "torch": "2.11", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("text", "sides"),
    [("512:2048:512", [512, 1024, 1536, 2048]), ("8:9:4", [8]), ("64", [64]), ("64,32,64", [32, 64])],
)
def test_ranges(text: str, sides: list[int]) -> None:
    assert shapes.sides(text, "--m") == sides


@pytest.mark.parametrize("text", ["", "8:4:1", "1:8:0", "0", "0:8:4", "8:16", "a", "1:2:3:4", "-1", "8,,9"])
def test_ranges_that_name_nothing(text: str) -> None:
    with pytest.raises(RidgelineError, match="--m takes start:end:step"):
        shapes.sides(text, "--m")


def test_the_order_is_fixed_and_covers_the_range() -> None:
    some = shapes.chosen([1, 2], [3], [4, 5], False)
    assert sorted(some) == [(1, 3, 4), (1, 3, 5), (2, 3, 4), (2, 3, 5)]
    assert some == shapes.chosen([1, 2], [3], [4, 5], False)
    assert sorted(shapes.chosen([2, 1], [3], [4], True)) == [(1, 1, 1), (2, 2, 2)]
    many = shapes.chosen([*range(100)], [*range(10)], [1], False)
    assert many != sorted(many)
    with pytest.raises(RidgelineError, match="at most"):
        shapes.chosen([*range(200)], [*range(200)], [1], False)


def test_waves_of_tiles() -> None:
    even = waves.waves((4096, 4096, 64), (256, 128), 132)
    assert (even.tiles, even.waves, round(even.last, 3), round(even.fill, 3)) == (512, 4, 0.879, 0.97)
    odd = waves.waves((4096, 4352, 64), (128, 256), 132)
    assert (odd.tiles, odd.waves) == (544, 5)
    assert odd.fill == pytest.approx(544 / 660)
    assert waves.waves((256, 128, 64), (128, 256), 132).tiles == 1, "columns of the result come first"
    assert waves.useful((200, 128, 64), (128, 256), 1) == pytest.approx(200 / 256), "the edge is computed in vain"
    assert waves.waves((1024, 1056, 1), (8, 1024), 132).last == 1


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("nvjet_tst_192x208_64x4_2x1_v_bz_coopA_TNT", (192, 208)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1", (128, 256)),
        ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn", (256, 128)),
        ("void at::native::elementwise_kernel<4>", None),
        (None, None),
    ],
)
def test_tiles_in_the_names_of_kernels(kernel: str | None, tile: tuple[int, int] | None) -> None:
    assert waves.tile_of(kernel) == tile


def ridge(dip: float = 1.0) -> dict[shapes.Shape, float]:
    """Rates that grow a little with the sides, but for one shape."""
    rates = {(m, n, 4096): 600e12 + m + n for m in (3840, 4096, 4352, 4608) for n in (3840, 4096, 4352)}
    rates[4352, 4096, 4096] *= dip
    return rates


def test_dips_are_below_their_neighbours() -> None:
    assert waves.dips(ridge()) == []
    assert waves.dips(ridge(0.96)) == [], "less than 5%"
    (dip,) = waves.dips(ridge(0.85))
    assert dip.shape == (4352, 4096, 4096)
    assert dip.depth == pytest.approx(0.15, abs=1e-3)
    assert set(dip.neighbours) == {(4096, 4096, 4096), (4608, 4096, 4096), (4352, 3840, 4096), (4352, 4352, 4096)}


@pytest.mark.parametrize("corner", [(3840, 3840, 4096), (4608, 4352, 4096)])
def test_corners_are_no_dips(corner: shapes.Shape) -> None:
    """The smallest product is slow for its size, and nothing beyond the largest one says that it should be quicker."""
    assert waves.dips(ridge() | {corner: 300e12}) == []


def test_squares_have_neighbours_on_their_line() -> None:
    rates = {(side, side, side): 1e12 for side in (1, 2, 3, 4)} | {(3, 3, 3): 5e11}
    (dip,) = waves.dips(rates)
    assert dip.neighbours == ((2, 2, 2), (4, 4, 4))
    assert waves.dips({(1, 1, 1): 1.0, (2, 2, 2): 2.0, (3, 3, 3): 3.0}) == [], "small products are slow, and no dip"


def test_the_words_of_a_dip() -> None:
    (dip,) = waves.dips(ridge(0.85))
    text = waves.explain(dip, "nvjet_256x128_64x4", 132, 2)
    assert "4352 x 4096 x 4096" in text
    assert "15% below its neighbours" in text
    assert "tiles of 256 x 128 the result is 544 tiles on 132 multiprocessors: 5 waves" in text
    assert "the last with work for 12% of them" in text
    assert "Waves explain" in text
    assert "(assumed)" in waves.explain(dip, None, 132, 2)
    unexplained = waves.explain(dip, "nvjet_64x64", 1, 2)
    assert "Waves do not explain it" in unexplained
    narrow = waves.Dip((4096, 4097, 4096), 1e12, 2e12, ((4096, 4096, 4096),))
    assert "Rows of 4097 numbers of 2 bytes do not begin at multiples of 16 bytes" in waves.explain(
        narrow, None, 132, 2
    )


def test_a_run_goes_on_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "EACH", 0.001)
    assert cli.main([*FEW, "--seconds", "1e-9", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert 1 <= first["new"] < 9, "it stops when the time is over"
    assert first["left"] == 9 - first["new"]
    assert cli.main([*FEW, "--picture", "map.svg"]) == 0
    text = capsys.readouterr().out
    assert "largest reachable rates" in text
    assert "are left" not in text
    ElementTree.parse(tmp_path / "map.svg")
    assert cli.main([*FEW, "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["new"], last["left"], last["found"][0]["shapes"]) == (0, 0, 9)
    rows = [row for row in query.of(store.load(tmp_path / "mamf.jsonl"), "figure") if row["what"] == "product"]
    assert len(rows) == len({tuple(row["shape"]) for row in rows}) == 9
    for row in rows:
        m, n, k = row["shape"]
        assert row["rate"] == pytest.approx(2 * m * n * k / row["seconds"]["median"])
        assert row["best"] >= row["rate"]


def test_a_product_that_fails_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(name: str, m: int, n: int, k: int, dice: torch.Generator) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand so on")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "products", fails)
    assert cli.main([*FEW, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["found"] == []
    assert {row["reason"] for row in told["failed"]} == {"CUDA out of memory."}


def test_a_file_of_something_else_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Sheet(path, "mamf", MACHINE).write("product")
    assert Sheet(path, "mamf", MACHINE, resume=True).rows[0]["what"] == "product"
    for other, said in (({"gpu": "NVIDIA H100"}, "gpu NVIDIA H200"), ({"torch": "9"}, "torch 2.11")):
        with pytest.raises(RidgelineError, match=f"was measured with {said}, and this machine has .*another file"):
            Sheet(path, "mamf", MACHINE | other, resume=True)
    with pytest.raises(RidgelineError, match="holds mamf; name another file for streams"):
        Sheet(path, "streams", MACHINE, resume=True)
    assert Sheet(path, "streams", MACHINE).rows == [], "without resume it is begun anew"
    (tmp_path / "b.jsonl").write_text("no json\n")
    with pytest.raises(RidgelineError, match="line 1 is not a row"):
        Sheet(tmp_path / "b.jsonl", "mamf", MACHINE, resume=True)


def test_the_tables_and_the_picture_of_the_page(tmp_path: Path) -> None:
    page = "<!-- figures mamf | rates -->\nold\n<!-- /figures -->\n<!-- figures mamf | dips -->\n<!-- /figures -->\n"
    assert "No run is recorded yet" in sheets.filled(page, tmp_path)
    assert sheets.pictures(tmp_path) == {}
    sheet = Sheet(tmp_path / "results/mamf/h200.jsonl", "mamf", MACHINE)
    for (m, n, k), rate in ridge(0.85).items():
        seconds = 2 * m * n * k / rate
        figure = dict.fromkeys(("median", "low", "high"), seconds)
        facts = {"dtype": "bfloat16", "shape": [m, n, k], "way": "nt", "seconds": figure}
        sheet.write("product", **facts, rate=rate, best=rate * 1.1)
    sheet.write("kernel", dtype="bfloat16", shape=[4352, 4096, 4096], kernel="nvjet_256x128", multiprocessors=132)
    text = sheets.filled(page, tmp_path)
    assert "| bfloat16 | 4608 x 4352 x 4096 | 600 TFLOP/s | 660 TFLOP/s | 600 TFLOP/s | 12 |" in text
    assert "- bfloat16: 4352 x 4096 x 4096: 510 TFLOP/s, 15% below" in text
    assert "Measured on one NVIDIA H200." in text
    assert "old" not in text
    (drawn,) = sheets.pictures(tmp_path).values()
    assert drawn.count("<rect") == 12
    ElementTree.fromstring(drawn)
    with pytest.raises(RidgelineError, match="figures of 'pigeons'"):
        sheets.filled(page.replace("mamf", "pigeons"), tmp_path)
    with pytest.raises(RidgelineError, match="no figures are recorded of 'wings'"):
        sheets.grouped([{"group": "a"}], "wings")


def test_the_map_takes_the_best_over_k_and_thins_out() -> None:
    rates = {(m, n, k): float(m * n * k) for m in (1, 2) for n in range(1, 41) for k in (1, 2)}
    rows, columns, cells = heat.plane(rates)
    assert (rows, len(columns), cells[2, 3]) == ([1, 2], 40, 12.0)
    heads, lines = heat.table(rates)
    assert len(heads) <= heat.MOST + 1
    assert lines[-1][0] == "2"


def test_the_summary() -> None:
    rows = [
        {
            "what": "product",
            "status": "ok",
            "dtype": "tf32",
            "shape": [m, 8, 8],
            "way": "nn",
            "rate": rate,
            "best": rate,
        }
        for m, rate in ((8, 1.0), (16, 3.0), (24, 2.0))
    ]
    about = found.summary(rows, rows, "tf32")
    assert (about["shape"], about["rate"], about["median"], about["shapes"]) == ([16, 8, 8], 3.0, 2.0, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [("f8", "no dtype 'f8' here; the dtypes are bf16, f16"), ("int8", "no fast products of int8; it has bf16, f32")],
)
def test_dtypes_that_are_not_there(text: str, said: str) -> None:
    with pytest.raises(RidgelineError, match=said):
        timing.dtypes(text, "cpu")
    assert timing.dtypes(None, "cpu") == ["float32", "bfloat16"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["mamf", "--range", "1024:3072:1024", "--k", "1024", "--seconds", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rates = {about["dtype"]: about["rate"] for about in told["found"]}
    assert {"bfloat16", "float16", "float32", "tf32"} <= {*rates}
    assert rates["bfloat16"] > rates["float32"]
    assert not told["failed"]
    row = {"dtype": "bfloat16", "shape": [4096, 4096, 4096], "way": "nt"}
    assert timing.kernel_of(row)
