"""What a user gets among timed rows: the default implementation of a call, beside the fastest other one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.lab.measurement.results import Work
from ridgeline.op import Op

Row = dict[str, Any]
KERNELS = ("cuda", "triton", "gluon")
PEERS = {
    "torch": "PyTorch",
    "compile": "torch.compile",
    "sdpa_cudnn": "cuDNN",
    "sdpa_fa2": "FlashAttention 2",
    "fa4": "FlashAttention 4",
    "fa4_deterministic": "FlashAttention 4, deterministic",
    "flex": "FlexAttention",
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "cublas": "cuBLAS",
    "cublaslt": "cuBLASLt",
    "cusparselt": "cuSPARSELt",
    "cutlass_sparse": "CUTLASS, sparse",
    "liger": "Liger",
    "torchao": "torchao",
    "triton_kernels": "triton_kernels",
    "quack": "quack",
    "cce": "Cut Cross-Entropy",
    "cce_exact": "Cut Cross-Entropy, exact",
}


@dataclass(frozen=True)
class Comparison:
    """The default implementation of a piece of work and the fastest peer, None if no peer was timed.

    rungs: the rows of all that were timed, fastest first.
    """

    op: str
    case: str
    dtype: str
    direction: str
    ours: Row
    peer: Row | None
    rungs: list[Row]

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the fastest peer; above 1 is faster. None without a peer."""
        return self.peer["seconds"]["median"] / self.ours["seconds"]["median"] if self.peer else None

    @property
    def against(self) -> str:
        """The fastest peer by the name that people know; empty without a peer."""
        return known(self.peer) if self.peer else ""


def known(peer: Row) -> str:
    """The name that people know a peer by: "FlashAttention 4" for "fa4"."""
    return PEERS.get(peer["impl"], str(peer["impl"]))


def serving(op: Op, rungs: list[Row]) -> Row | None:
    """The timed row of the default implementation: the last served one of the ladder that takes such calls.

    An implementation that was timed has taken the call; its `unless` says whether it leaves such calls to another.
    """
    timed = {row["impl"]: row for row in rungs}
    for rung in reversed(op.implementations.values()):
        if rung.served and rung.name in timed:
            args, kwargs = op.case(rungs[0]["case"]).make(rungs[0]["dtype"], "meta") if rung.unless else ([], {})
            direction = "bwd" if rungs[0]["direction"] == "backward" else "fwd"
            if rung.unless is None or rung.left(direction, *args, **kwargs) is None:
                return timed[rung.name]
    return None


def comparisons(found: dict[Work, list[Row]], ops: dict[str, Op]) -> list[Comparison]:
    """One comparison for each piece of work whose default implementation was timed."""
    compared = []
    for (op, case, dtype, direction), rungs in found.items():
        ours = serving(ops[op], rungs) if op in ops else None
        if ours:
            peer = next((row for row in rungs if row["peer"]), None)
            compared.append(Comparison(op, case, dtype, direction, ours, peer, rungs))
    return compared


def largest(found: dict[Work, list[Row]], ops: dict[str, Op]) -> dict[Work, list[Row]]:
    """The work of one case and dtype of each op: bfloat16 if it was timed, then the case of the most bytes.

    Cases whose bytes agree in two digits are equally large; the op's first of them is taken. Where forward and
    backward were timed in one step, that stands for both.
    """
    best: dict[str, tuple[tuple[bool, float, int], str, str]] = {}
    for (op, case, dtype, _), rungs in found.items():
        if op in ops:
            place = next((n for n, c in enumerate(ops[op].cases) if c.name == case), 0)
            size = dtype == "bfloat16", float(f"{rungs[0]['bytes']:.2g}"), -place
            if op not in best or size > best[op][0]:
                best[op] = size, case, dtype
    one = {(op, case, dtype) for op, (_, case, dtype) in best.items()}
    return {
        work: rungs
        for work, rungs in found.items()
        if work[:3] in one and (work[3] == "both" or (*work[:3], "both") not in found)
    }
