"""What our ops save for backward, read from a layer that runs on meta tensors."""

from __future__ import annotations

import argparse
from functools import cache

from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError
from ridgeline.parallel.shapes import Shape


@cache
def saved(shape: Shape, seq: int, micro: int = 1, card: str = "h200") -> float:
    """Returns the bytes a token that a layer of our language model saves, on a card that is pretended.

    It counts each storage once, as `ridgeline lm memory` does; rotations are shared by all layers and left out.
    Raises RidgelineError for experts and for MLPs without a gate, which the language-model lab does not have."""
    if shape.experts or not shape.gated:
        raise RidgelineError(
            f"parallel plan: --meta needs a model with a gated MLP and no experts, but {shape.name} has another MLP"
        )
    from ridgeline.lm import memory, setup  # here, because they import the lab

    size = Size(
        shape.layers, shape.width, shape.hidden, shape.heads, shape.groups, shape.dim, shape.vocabulary, tied=shape.tied
    )
    parser = argparse.ArgumentParser()
    setup.flags(parser)
    options = parser.parse_args(["--precision", "bfloat16", "--context", str(seq), "--batch", str(micro)])
    rows = memory.saved_by_block(size, options, card)
    kept = sum(row["bytes"] for row in rows if row["shape"] != [seq, shape.dim // 2])
    return kept / (micro * seq)
