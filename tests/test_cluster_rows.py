"""Rows over clusters: which rows the kernels support, and that their plans fit a GPU. No GPU is needed."""

import pytest
import torch

from ridgeline import device
from ridgeline.ops.loss import _cluster as loss
from ridgeline.ops.rowwise import _cluster as norms
from ridgeline.ops.rowwise import _softmax as softmax
from ridgeline.tiles import cluster_rows

HOPPER = device.known("sm_90")
COLUMNS = (1025, 3000, 4099, 5120, 8192, 8197, 16384, 50256, 50257, 65537, 131073, 262143, 262144)


def refused(*tensors: torch.Tensor) -> str | None:
    return cluster_rows.refusal(tensors[0].shape[-1], (1024, 1 << 19), 2 << 20, tensors)


def apart(rows: int, columns: int, gap: int, begin: int = 0) -> torch.Tensor:
    """Returns rows that far apart, the first starting `begin` elements after a multiple of 16 bytes."""
    return torch.empty(begin + rows * (columns + gap), dtype=torch.bfloat16)[begin:].as_strided(
        (rows, columns), (columns + gap, 1)
    )


@pytest.mark.parametrize("columns", [2048, 2049, 2052, 5001])
def test_rows_with_whole_gaps_are_taken(columns: int) -> None:
    assert refused(apart(3, columns, 0)) is None
    assert refused(apart(3, columns, 8), apart(3, columns, 24)) is None
    assert refused(apart(1, columns, 3)) is None, "a single row has no gap"
    assert refused(torch.empty(columns, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("columns", [2048, 2049])
def test_other_rows_are_refused(columns: int) -> None:
    assert "16 bytes" in (refused(apart(3, columns, 3)) or "")
    assert "16 bytes" in (refused(apart(3, columns, 0), apart(3, columns, 1)) or "")
    assert "16 bytes" in (refused(apart(3, columns, 0, begin=1)) or "")
    assert "1025 to 524288 columns" in (refused(apart(3, 1024, 0)) or "")


def test_rows_that_overlap_end_before_their_tensor_does() -> None:
    """If the 16 bytes around a row's end are copied whole, the next row must begin after them."""
    assert refused(torch.empty(1, 2048, dtype=torch.bfloat16).expand(3, 2048)) is None
    assert refused(torch.empty(4097, dtype=torch.bfloat16).as_strided((3, 2049), (1, 1))) is not None


def plans(columns: int, size: int) -> list[dict]:
    """Returns the plan of every op's rule for rows of that many columns with elements of `size` bytes."""
    row = cluster_rows.whole(columns, size) * size
    found = [cluster_rows.plan(columns, 1, size, size, **loss.rule(row))]
    for inputs, backward in ((1, False), (2, True)):
        found.append(
            cluster_rows.plan(
                columns, inputs, size, size, **softmax.cluster_rule(row * inputs, backward, row < columns * size)
            )
        )
    for inputs in (1, 2):
        found += [
            cluster_rows.plan(columns, inputs, size, size, **norms.forward_rule(row * inputs, centred))
            for centred in (False, True)
        ]
    for inputs in (2, 3):
        found.append(
            cluster_rows.plan(columns, inputs, size, size, **norms.backward_rule(row // size, row * inputs, True))
        )
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("columns", COLUMNS)
def test_plans_fit(columns: int, size: int) -> None:
    for plan in plans(columns, size):
        part = -(-columns // (plan["CLUSTER"] * (16 // size))) * (16 // size)
        assert plan["shared"] <= HOPPER.shared_memory
        assert plan["BLOCKS"] * (plan["shared"] + 1024) <= HOPPER.shared_memory + 1024
        assert plan["block"] <= 1024
        assert plan["BLOCKS"] * plan["block"] <= 2048
        assert plan["ITEMS"] * plan["THREADS"] >= part // (16 // size) - plan["SHIFTED"], (
            "every whole pack has a thread"
        )
        assert (plan["ITEMS"] - 1) * plan["THREADS"] < part // (16 // size), "and no thread comes in vain"
        assert plan["SHIFTED"] == (columns * size % 16 != 0)


def test_spaces_fit() -> None:
    for columns in (3000, 5120, 50256):
        for config in norms.backward_space(columns, columns * 4, HOPPER):
            plan = cluster_rows.plan(columns, 2, 2, 2, **config)
            assert plan["shared"] <= HOPPER.shared_memory, config
            assert plan["block"] <= 1024, config
        for config in cluster_rows.space(columns * 2, HOPPER.shared_memory, 256):
            shared = cluster_rows.plan(columns, 1, 2, 2, **config)["shared"]
            assert config["BLOCKS"] * (shared + 1024) <= HOPPER.shared_memory + 1024, config
