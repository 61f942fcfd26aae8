"""The sentences of a lesson's check, in one table that a translation can replace."""

from __future__ import annotations

from typing import Any

from ridgeline.translation import commands, language

# Hints begin with "hint.", advice on what to try next with "next.".
MESSAGES = {
    "list": "lessons",
    "name": "name",
    "exercise": "exercise",
    "list-more": "ridgeline lesson 3 opens one; ridgeline lesson 3 --check my_kernel.py checks your kernel",
    "passed": "passed",
    "failed": "failed",
    "not run": "not run",
    "reads": "reads",
    "writes": "writes",
    "resources": "{call}, compiled for {arch}",
    "timed": "the ladder, slowest first",
    "rung": "rung",
    "time": "time",
    "passes": "every test passes",
    "fails": "{failed} of {all} tests fail",
    "unrun": "no test ran: {reason}",
    "order": "mend the first one first: it may be the reason of the others",
    "first": "the plain test comes first; the others run once it passes",
    "cuda": "CUDA C++ cannot be interpreted, so its results are checked on a GPU only; here it is compiled",
    "slow": "it did not end within {seconds} s; a loop that never ends, or a very small tile, does that",
    "crash": "the process died ({signal}): the kernel wrote outside its tensors",
    "beyond": "it {did} {count} elements outside its tensors: give `tl.{call}` a mask",
    "returned": "the function returned {got}, and a tensor is expected",
    "changed": "the function changed its input",
    "raised": "it raised {error}",
    "uncompiled": "it does not compile for {arch}: {error}",
    "no-kernel": "the function started no kernel of its own",
    "file": "{path} cannot be read: {error}",
    "import": "{path} raised {error} when it was imported",
    "function": "{path} defines no function {name}; the exercise of lesson {number} asks for `{signature}`",
    "unexercised": "lesson {number} has no exercise; those that have one: {numbers}",
    "unwritten": "there is no lesson {number}; the lessons are {numbers}",
    "folder": "the lessons are in docs/lessons of the source tree, which is not here",
    "no-gpu": "compiled for {arch}; no GPU is here, so your kernel was not timed; times of one H200 are recorded ones",
    "hint.plain": "start with one program and a size that the block divides; compare with the formula line by line",
    "hint.tail": "the last block reaches over the end: mask its loads and stores with `offsets < n`",
    "hint.strides": "rows of this input are not side by side: pass its strides to the kernel, or call `.contiguous()`",
    "hint.large": "e^(2z) overflows for large z and inf / inf is NaN: write tanh as 1 - 2 / (e^(2z) + 1)",
    "hint.half": "the arithmetic is in float16: convert after the load with `.to(tl.float32)`",
    "hint.sum-half": "the sum is in float16 and stops growing: convert to float32 before you add",
    "hint.blocks": "only part of the blocks is in the sum: add the blocks' parts up in a second kernel or by atomics",
    "hint.max": "exp overflows above 88: subtract the row's maximum before the exponential",
    "hint.padding": "the padded columns are in the row's maximum or sum: load them as -inf (`other=float('-inf')`)",
    "hint.rectangle": "rows and columns are exchanged somewhere: y has as many rows as x has columns",
    "hint.tile-tail": "the last tile reaches over an edge: mask rows and columns, in the load and in the store",
    "hint.k-tail": "the last step along K reaches over the end: mask both loads with `other=0.0`",
    "hint.dot-half": "the products are summed in float16: start from `tl.zeros(..., dtype=tl.float32)`",
    "hint.product-strides": "b is a transposed view here: pass both strides of each matrix to the kernel",
    "hint.product-tail": "M or N is no multiple of the tile: mask rows of a, columns of b and the store",
    "hint.keys": "the last block of keys reaches over the end: set its padded scores to -inf before the maximum",
    "hint.rescale": "the maximum rises here from block to block: scale the sum and o by exp(old maximum - new one)",
    "hint.score-max": "these scores are large: subtract the running maximum before the exponential",
    "hint.head-strides": "heads lie between the positions here: pass the strides of batch, head and row",
    "hint.causal": "with causal=True, query i sees keys 0 to i: mask the other scores with -inf",
    "hint.scale": "scores are scaled by 1 / sqrt(D), D the last dimension of q",
    "next.double": "Write constants as floats (0.5f, tanhf): {count} instructions of {kernel} compute in float64.",
    "next.spill": "Use a smaller tile or more warps: {kernel} lacks registers and spills {bytes} bytes a thread.",
    "next.half-sums": "Sum the products in float32: the matrix instructions of {kernel} add in float16.",
    "next.no-matrix": "Use `tl.dot` on tiles of at least 16 x 16: {kernel} has no matrix instructions.",
    "next.no-wgmma": "Give the tile 64 rows or more and 4 warps: {kernel} uses {found}, and Hopper's wgmma is faster.",
    "next.width": "Give each thread more neighbouring elements: loads of {kernel} are {width} bytes wide, ours {ours}.",
    "next.store": "Make the stores as wide as the loads: those of {kernel} are {width} bytes, ours {ours}.",
    "next.bank": "Pad the shared tile to {padded} columns: with {columns}, a column lies in one bank, 32 to a turn.",
    "next.occupancy": "Bring more warps onto a multiprocessor: {kernel} reaches {share}, limited by {limit}.",
    "next.tile": "Try larger tiles or more stages: {kernel} keeps {shared} bytes in shared memory, ours {ours}.",
    "next.kernels": "Join the kernels into one pass: the call starts {count}, ours {ours}, each with bytes of its own.",
    "next.gpu": "Time it on a GPU: the compiler shows nothing that our best rung does better.",
    "next.rung": "Read `ridgeline inspect {op} --impl {impl} --show sass`: {impl} takes {share} of your time.",
    "next.done": "Go on to the next lesson: it is as fast as our best rung, within 3%.",
}  # fmt: skip

# What the law says of a wrong result, with places for a translation.
REASONS = (
    "{0} has another shape or dtype than torch's",
    "{0} is wrongly finite, or wrongly not finite, in {1} places",
    "{0} has a wrong value in {1} places",
    "{0} has {1} times the allowed error ({2})",
)


def say(key: str, **facts: Any) -> str:
    """Returns the sentence of a key with its facts filled in, in the language of the command line."""
    text = MESSAGES[key]
    return ((language() == "zh" and commands().texts.get(text)) or text).format(**facts)
