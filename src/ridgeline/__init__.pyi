"""Fast GPU kernels for language models, as differentiable PyTorch functions, and a lab that measures them.

Functions such as `ridgeline.rms_norm` are loaded at first use: importing ridgeline does not import torch.
So are the modules `ridgeline.nn`, `ridgeline.optim`, `ridgeline.hf`, `ridgeline.formats`, `ridgeline.parallel`,
`ridgeline.lab` and `ridgeline.op`.

Written by `make pyi`.
"""

from collections.abc import Iterable, Sequence

import torch

from ridgeline import formats as formats
from ridgeline import hf as hf
from ridgeline import lab as lab
from ridgeline import nn as nn
from ridgeline import op as op
from ridgeline import optim as optim
from ridgeline import parallel as parallel
from ridgeline.op import RidgelineError as RidgelineError
from ridgeline.ops.attention.flex.blocks import BlockMask as BlockMask
from ridgeline.ops.attention.flex.blocks import block_mask as block_mask
from ridgeline.ops.attention.flex.score import ScoreMod as ScoreMod

__version__: str

def register_all() -> None:
    """Imports every op, so that `torch.export.load` finds them in a fresh process."""

def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    window_align: str | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: object = None,
    block_mask: object = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns softmax(scale q k^T) v for each head, as `torch.nn.functional.scaled_dot_product_attention`.

    Gradients flow to q, k, v and sinks.

    q: (B, Hq, Sq, D); k, v: (B, Hkv, Sk, D); float32, float16 or bfloat16, of one dtype and device. Hq is a multiple of
    Hkv: Hq/Hkv neighbouring heads share keys and values, which are not repeated. D is a multiple of 8 from 16 to 256.
    The last stride is 1, the others are free, so (B, S, H, D).transpose(1, 2) costs no copy.
    mask: broadcasts to (B, Hq, Sq, Sk); torch.bool, True for keys that are seen, or floating point, added to the
    scores. It gets no gradient.
    causal: True lets query i see keys up to i; "bottom_right" up to i + Sk - Sq, as a decoder with a cache needs.
    window: (left, right), how many keys before and after its own position a query sees; None or -1 is unbounded.
    window_align: "bottom_right" shifts positions by Sk - Sq, for windows without causal; "top_left" or None does not.
    With causal the window is aligned as causal is.
    prefix: with causal and without a window, how many first keys all queries see (a prefix LM).
    scale: 1/sqrt(D) by default. softcap: replaces scores by softcap * tanh(scores / softcap), before masks.
    sinks: (Hq,), floating point of any dtype: logits that join the softmax of each row of their head, as a key without
    a value would; neither scaled nor capped. -inf counts for nothing.
    score_mod, block_mask: a `ridgeline.ScoreMod`, your own function of the scores, and a mask by blocks of
    `ridgeline.block_mask`; the call is then `ridgeline.flex_attention`'s, which has no mask, softcap and sinks.
    deterministic: False allows faster backward passes whose gradients vary in the last bits; by default they are equal.
    Returns o, with q's shape, dtype and order of dimensions; with return_lse (o, lse), where lse is the natural
    logarithm of each row's sum of exponentials, its sink's included, (B, Hq, Sq), float32, also differentiable. A row
    that sees no key has o 0, lse -inf or its sink, and no gradient but the sink's.
    float32 products follow `torch.get_float32_matmul_precision()`. On Hopper, up to D 128, "highest" adds up three
    TF32 products for each, with the error of a float32 product. Autocast casts q, k and v first.
    Raises RidgelineError if shapes, strides, dtypes, devices or options do not match the above, or if `impl` cannot run
    the call.
    """

def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    window_align: str | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns `attention` within sequences that are packed one after the other.

    Gradients flow to q, k, v and sinks.

    q: (tokens, Hq, D); k, v: (tokens, Hkv, D), with as many sequences, whose lengths may differ from q's. Heads, D,
    dtypes and strides are as in `attention`.
    cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32, rising from 0 to the number of tokens: where each sequence
    begins, and the end.
    lengths: (sequences,), int32, instead of cu_seqlens_k: k and v are caches that hold so many keys of each sequence,
    those of its queries included, which are its last tokens. k, v: (sequences, S_max, Hkv, D); or with block_table
    (sequences, most), int32: (blocks, block, Hkv, D), where a sequence's keys from n block on lie in block
    block_table[b, n]; block is a multiple of 16, and entries past the length may be anything. causal (True or
    "bottom_right") and window then count from each query's own place in its sequence. A cache has no gradients.
    max_seqlen_q, max_seqlen_k: the longest lengths, if known; no implementation needs them.
    causal, window, window_align, prefix, scale, softcap, sinks, return_lse, deterministic: as in `attention`;
    "bottom_right" aligns each sequence, and the first `prefix` keys are each sequence's.
    Returns o, with q's shape and dtype; with return_lse (o, lse), where lse is (Hq, tokens), float32, also
    differentiable.
    Values on the GPU are not validated (that would synchronise): wrong cu_seqlens give meaningless results, but no
    access out of bounds. Tokens after the last sequence see nothing. On the CPU, and with RIDGELINE_CHECK=1, wrong
    values raise.
    Raises RidgelineError if shapes, strides, dtypes, devices or options do not match the above, or if `impl` cannot run
    the call.
    """

def flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: object = None,
    block_mask: BlockMask | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    window_align: str | None = None,
    prefix: int | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns softmax(score_mod(scale q k^T)) v for each head, over the keys that block_mask leaves.

    Gradients flow to q, k and v, and are bitwise reproducible.

    q: (B, Hq, Sq, D); k, v: (B, Hkv, Sk, D); as `ridgeline.attention` takes them.
    score_mod: a `ridgeline.ScoreMod`, or a bare `triton.jit` function of (score, b, h, q, k), which has no gradient.
    block_mask: made by `ridgeline.block_mask` for these lengths; blocks without a seen key cost nothing.
    causal, window, window_align, prefix: as `ridgeline.attention` has them, beside a score_mod; not with a block_mask.
    scale: 1/sqrt(D) by default.
    Returns o, with q's shape, dtype and order of dimensions; with return_lse (o, lse), where lse is the natural
    logarithm of each row's sum of exponentials of new scores, (B, Hq, Sq), float32, also differentiable. A row that
    sees no key has o 0, lse -inf and no gradient.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts q, k and v first.
    Raises RidgelineError if shapes, strides, dtypes, devices or options do not match the above, if a gradient is asked
    for and the score_mod has none, or if `impl` cannot run the call.
    """

def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_zero: torch.Tensor | None = None,
    v_zero: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    invariant: bool = False,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Appends new keys and values to a cache in place, then attends to it. It has no gradients.

    q: (B, S, Hq, D), the S queries (1 to 16) at the end of each sequence; float32, float16 or bfloat16; D a multiple of
    8 from 16 to 256. lengths: (B,), int32: how many keys the cache holds before the call. -1 marks padding: its result
    is 0, and nothing is written. Values on a GPU are not validated; no value is read by the host.
    k_cache, v_cache: (B, S_max, Hkv, D), Hq a multiple of Hkv; or with block_table (B, most), int32: (blocks, block,
    Hkv, D), where a sequence's tokens from n block on lie in block block_table[b, n]; block is a multiple of 16, and
    entries past the length may be anything. They have q's dtype, or are int8, float8_e4m3fn, or int4: uint8 (..., D/2),
    the number at an even column in the low half of its byte.
    k_scale, v_scale: float32, for a quantised cache: () or (1,), (Hkv,), or per token and head, the cache's first three
    sizes; a number is (stored - zero) * scale. k_zero, v_zero: alike, or None for 0 (8 for int4). Scales and zeros per
    token are made for new tokens and written; others are only read.
    k, v: (B, S, Hkv, D), written at lengths, lengths + 1, ..., and seen by the queries; None: the cache holds them
    already, and lengths counts them. Tokens past the cache's end are not written.
    cos, sin: (most, r): q and k are rotated as `rope` does, at `positions` (B, S), or at their places in the sequence.
    scale: 1/sqrt(D) by default. window: how many earlier keys a query sees; None: all. softcap: scores become
    softcap * tanh(scores / softcap). sinks: (Hq,), logits that join each row's sum.
    tree: (B, S, S), bool: which of the newest S keys each query sees, instead of those up to its own place.
    invariant: the result does not depend on what else is in the batch.
    Returns o, of q's shape and dtype, or with return_lse (o, lse), lse (B, Hq, S), float32. A row that sees nothing has
    o 0 and lse -inf, or its sink.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    latent: int = 512,
    scale: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    kv_scale: torch.Tensor | None = None,
    invariant: bool = False,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Appends latents to a cache in place, then lets all heads attend to it. It has no gradients.

    q: (B, S, H, D), the S queries (1 to 16) at the end of each sequence, with the keys' matrix absorbed; float32,
    float16 or bfloat16. D is `latent` (a multiple of 16 to 512) and 8 to 128 columns for rotation: 576 in DeepSeek's.
    cache: (B, S_max, D), or with block_table (B, most), int32: (blocks, block, D), where a sequence's tokens from n
    block on lie in block block_table[b, n]; block is a multiple of 16, and entries past the length may be anything. Its
    first `latent` columns are the values too. It has q's dtype or is float8_e4m3fn.
    lengths: (B,), int32: how many tokens the cache holds before the call. -1 marks padding: its result is 0, and
    nothing is written. Values on a GPU are not validated; no value is read by the host.
    kv: (B, S, D), written at lengths, lengths + 1, ..., and seen by the queries up to their own place; None: the cache
    holds them already, and lengths counts them. Tokens past the cache's end are not written.
    scale: what scores are multiplied by, 1/sqrt(128 + 64) in DeepSeek's: the head before absorption.
    cos, sin: (most, r): the columns of q and kv after the latent ones are rotated as `rope` does, at their places.
    kv_scale: float32, for a float8_e4m3fn cache: () or (1,), or the cache's first two sizes, a scale per token: a
    number is stored * scale. Scales per token are made for new tokens and written; one for all is only read.
    invariant: the result does not depend on what else is in the batch.
    Returns o (B, S, H, latent), of q's dtype, or with return_lse (o, lse), lse (B, H, S), float32. A row that sees
    nothing has o 0 and lse -inf.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def sample(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_logprobs: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, drawn from softmax(logits / temperature) after top-k, top-p and min-p. It has no gradients.

    logits: (B, V), floating point, any strides, V at most 2^22. A row with +inf draws evenly among those.
    temperature, top_k, top_p, min_p: numbers, or tensors () or (B,) on logits' device, whose values are not validated.
    They are read as float32. A temperature below 1e-37 takes the largest logit, the first of equal ones.
    top_k: how many of the largest logits stay, exactly; of equal logits those with lower indices.
    top_p: of what top_k leaves, the fewest largest whose mass is at least top_p of it, and at least one.
    min_p: of these, tokens with at least min_p times the largest probability.
    mask: (B, V) or (V,), bool: True where a token is allowed. Logits elsewhere are ignored, NaN too.
    seed, offset: ints, or one int64 on logits' device, which a CUDA graph reads anew. The same seed and offset draw the
    same tokens; offsets count modulo 2^32, and None is 0. A seed of None comes from PyTorch's CPU generator, or under
    torch.compile or in a CUDA graph from that of the device at every run.
    Returns the tokens (B,), int64, or with return_logprobs (tokens, their log-probabilities in the final distribution
    (B,), float32). A row that holds NaN, allows nothing (-inf everywhere) or has a NaN temperature gives -1 and NaN.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns the products of groups of rows with a matrix each, (T, N). Gradients flow to x, w and bias.

    x: (T, K); w: (G, K, N); bias: (G, N) or None; one dtype and device, any strides.
    offsets: (G,), int32: the end of each group's rows, rising; group g has the rows from the end before it to its own.
    They stay on the device: the host reads them on a CPU alone. A group may have no rows. Rows past the last end give
    zeros. On a GPU, offsets that do not rise give unspecified rows, and nothing outside is read or written.
    main_grad: a float32 buffer (G, K, N), any strides. Backward adds w's gradient to it, in the product's epilogue, and
    w.grad stays as it is; None: w gets its gradient.
    Sums are float32, in the order of rows and of K, and rounded once. float32 products follow
    `torch.get_float32_matmul_precision()`. Autocast casts x, w and bias first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    interleaved: bool = False,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    zeros: tuple[torch.Tensor, torch.Tensor] | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns for each token the weighted sum of its experts, (..., H). Gradients flow to all floating-point tensors.

    x: (..., H). weights: (..., k), any floating dtype; indices: (..., k), int32 or int64, as `topk_gate` returns them.
    gate_up: (E, 2 I, H), an expert's gate rows first, then up's; interleaved: gate and up take turns, as in gpt-oss.
    down: (E, H, I). gate_up_bias: (E, 2 I) or None; down_bias: (E, H) or None. x, experts and biases share one dtype;
    any strides, so gpt-oss's (E, H, 2 I) is given as its mT.
    activation: "silu" for silu(gate) up, or "swiglu_oai" for gpt-oss's (up + 1) gate sigmoid(1.702 gate).
    limit: clamps gate to at most limit and up to [-limit, limit] first; None: no limits.
    scales: gate_up's and down's, for experts of few bits: an expert's codes and scales are those that `int8_linear`,
    `int4_linear` or `mxfp4_linear` takes, stacked, and the dtypes say which. int8 (E, N, K) with scales (E, N); uint8
    (E, N, K / 2) with scales (E, N, K / group) in floating point, or mxfp4's (E, N, K / 32) in uint8, as in gpt-oss's
    files. zeros: int4's, alike and uint8, or None for 8. For inference: nothing then has gradients, and above
    64 rows an expert, on average, copies of the weights in x's dtype are multiplied.
    An expert's sums are float32 or wider and each of its two results is rounded once; a token's sum is float32, in the
    order of its choices, and rounded once. No order depends on a race. The host reads nothing from a GPU: there, an
    index that is no expert's gives its token NaN; on a CPU it raises.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts x, experts and biases first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def topk_gate(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses k experts for each token. Gradients flow to the logits through the weights.

    logits: (T, E), floating point, any strides, at most 1024 experts.
    score: "softmax" over all experts, or "sigmoid".
    bias: (E,), added to the scores for the choice alone (DeepSeek-V3's balance), or None. It gets no gradient.
    groups, top_groups: experts in groups of E / groups neighbours; only the best top_groups of them are chosen from. A
    group's score is the sum of its two best with sigmoid (DeepSeek-V3), and its best with softmax (DeepSeek-V2).
    normalize: whether a token's weights are divided by their sum (plus 1e-20). scale: a factor for them at the end.
    Returns weights (T, k), float32; indices (T, k), int64, the best first and equal ones by index; counts (E,), int32:
    the tokens of each expert. A row whose scores hold NaN, as softmax's do for +inf, gives NaN and the first experts.
    Raises RidgelineError if arguments do not fit together, or if `impl` cannot run the call.
    """

def binary_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    impl: str | None = None,
) -> torch.Tensor:
    """The binary cross-entropy of logits, as `torch.nn.functional.binary_cross_entropy_with_logits`, in one pass.

    -w (p t log sigmoid(x) + (1 - t) log(1 - sigmoid(x))), in a form that neither overflows nor cancels.

    logits: floating point, any shape and strides. target: of that shape; floating point, soft or 0 and 1, or bool,
    uint8, int32 or int64. weight, pos_weight (w and p): floating point, of a shape that broadcasts to the logits'.
    reduction: "mean" over all elements, "sum", or "none" for a loss per element. Sums are bitwise reproducible.
    Returns the loss in the logits' dtype; under autocast in float32, as torch's. Arithmetic is float32.
    Gradients flow to logits and target, each in one pass; weight and pos_weight take none.
    Raises RidgelineError if shapes, dtypes, devices or the reduction do not match the above, if weight or pos_weight
    requires a gradient, or if `impl` cannot run the call.
    """

def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns the cross-entropy loss, -log softmax(logits)[target], with the classes in the last dimension.

    As `torch.nn.functional.cross_entropy`, which has them in the second. Gradients flow to logits.

    logits: (..., V), floating point, any strides; never modified. target: (...), int64 class indices.
    ignore_index: a target with this value has loss and gradient 0, whatever its logits.
    label_smoothing: the share, 0 to 1, of the target that is spread over all classes.
    logit_scale: a number above 0 that multiplies the logits before all else, as in Cohere's models.
    softcap: then replaces logits by softcap * tanh(logits / softcap).
    z_loss: adds z_loss * logsumexp(logits)^2, of these logits, to each row.
    reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none" for a loss per row.
    dtype: the loss's. None means the logits', or float32 under autocast, as in PyTorch; torch.float32 keeps all digits
    of the float32 arithmetic beside narrower logits.
    Values on the GPU are not validated (that would synchronise): an invalid class gives NaN. On the CPU, and with
    RIDGELINE_CHECK=1, it raises.
    Raises RidgelineError if shapes, dtypes, devices or options do not match the above or `impl` cannot run the call.
    """

def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    chunk_memory: int | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `cross_entropy(x @ weight.T + bias, target)` without all logits in memory.

    Gradients flow to x, weight and bias.

    x: (..., H); weight: (V, H); bias: (V,) or None; of one dtype, float32, float16 or bfloat16. target: (...), int64.
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction: as in `cross_entropy`.
    chunk_memory: bytes of logits in memory at a time. The default is a fourth of all, or 216 MiB if that is at least a
    fifth. With less, some logits are computed twice, for up to a third more products per step. At least 128 classes of
    a fourth of the rows are held and, below a sixteenth of the logits, the float32 gradient of x for these rows.
    Another 40 bytes per row are needed besides.
    dtype: the loss's. None means float32 (float64 for float64 tensors): a loss in half precision has two digits.
    Autocast casts x, weight and bias as for `linear`.

    For "mean" and "sum", forward computes the gradients, so that a step has three products. For "none", and in float16,
    whose gradients need the scale of the loss, backward computes the logits again.
    Products are torch's, summed in float32. If cuBLAS splits a sum, it may add the parts in half precision, unless
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction (or allow_fp16_...) is False. The gradients of
    weight and of x are each rounded at most four times, and once more if dloss is no power of two.
    Raises RidgelineError if shapes, dtypes, devices or options do not match the above or `impl` cannot run the call.
    """

def block_sparse_matmul(
    x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """Returns `x @ W.T`, (..., N), for a weight W (N, K) given by its square blocks, row of blocks by row of blocks.

    x: (..., K), any strides; blocks: (count, B, B), B 16, 32, 64 or 128, in x's dtype. K is a multiple of B.
    starts: (N / B + 1,) and columns: (count,), int32 or int64: row r of blocks has those from starts[r] to
    starts[r + 1] - 1, and block i lies in column columns[i], as in `torch.sparse_bsr_tensor`. Columns need no order;
    blocks at one place add up; blocks past the last start belong to no row. On a CPU both are validated, on a GPU not.
    Gradients flow to x and blocks. Sums are float32, rounded once. Kernels take float32, float16 and bfloat16. Autocast
    casts x and blocks first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(conv2d(x, weight) + bias)`, (N, K, P, Q), as `torch.nn.functional.conv2d`.

    x: (N, C, H, W); weight: (K, C / groups, R, S); bias: (K,) or None; one dtype and device. Gradients flow to all.
    stride, padding, dilation: whole numbers, or pairs for rows and columns. groups: kernels take 1; PyTorch the rest.
    activation: None, "relu", "silu", "gelu" or "gelu_tanh", on float32 sums, which are rounded once.
    Kernels return y in channels_last memory. They read x and weight in place, whatever their strides, and are made for
    channels_last; NCHW memory is slow, and nothing is copied. Backward copies an incoming gradient that is not
    channels_last. By default half-precision dx and dw are cuDNN's, whose reruns may differ unless PyTorch is told to be
    deterministic; those of `impl="triton"` are bitwise reproducible.
    float32 products follow `torch.get_float32_matmul_precision()`, not cuDNN's own switch. Autocast casts all inputs.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def densify(values: torch.Tensor, metadata: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns the dense weight (N, K), contiguous, of (values, metadata) as `sparsify` returns them.

    values: (N, K / 2), any strides; kernels take float32, float16, bfloat16 and int8. metadata: uint8
    (ceil(K / 64), N, 8). Its contents are not validated: a pair of equal columns gives any of its two numbers.
    Gradients flow to values. Raises RidgelineError if the tensors do not fit, or if `impl` cannot run the call.
    """

def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str = "tensor",
    main_grad: torch.Tensor | None = None,
    quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `x @ weight.T + bias`, (..., N), by products of 8-bit numbers, forward and backward.

    x: (..., K), float32, float16 or bfloat16; weight: (N, K) and bias: (N,) or None, each in any of these dtypes. Any
    strides and sizes; sizes that are multiples of 16 need no copies. The result has x's dtype, a gradient its tensor's.
    recipe: what shares a scale, a largest size that the device finds in each call.
    "tensor": all of a matrix; e4m3 forward, e5m2 for dy (TransformerEngine's hybrid format, torchao's "tensorwise").
    "row": a row or a column along the sum; e4m3 throughout (torchao's "rowwise").
    "block": 1 x 128 of x and dy along the sum, 128 x 128 of the weight; e4m3 throughout (DeepSeek-V3).
    main_grad: a contiguous float32 buffer (N, K), or None. Backward adds the weight's gradient to it in the product's
    epilogue and gives the weight none: `weight.grad` stays None, as with TransformerEngine's fuse_wgrad_accumulation.
    quantized: the weight's codes and scales as `quantize_fp8` makes them for the recipe "tensor" or "block", or None.
    Products take them, and the values of `weight` are not read. Backward transposes the codes, and keeps no copy.
    Sums move to float32 every 128 of the summed dimension; for a float32 x all sums are float32, which is slower.
    Autocast casts x alone: the weight is quantised from its own dtype. Gradients flow to x, weight and bias, once.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call. No kernel runs on
    NVIDIA GPUs before sm_89, which have no 8-bit floating-point matrix units; `impl="naive"` emulates them there.
    """

def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns the dequantised product of quantised matrices, `(a * scale_a) @ (b * scale_b) + bias`.

    a: (M, K) and b: (K, N), float8_e4m3fn or float8_e5m2 each, any strides. Fastest with K contiguous in both: for a
    weight quantised as q (N, K), pass b = q.T.
    scale_a, scale_b: float32, any strides. By rows: scale_a is one number, (M, 1) or (M,); scale_b is one number,
    (1, N) or (N,).
    By blocks: scale_a is (M, ceil(K / 128)), as `quantize_fp8` returns it. scale_b is (ceil(K / 128), ceil(N / 128)),
    the scale.T of a weight quantised in 128 x 128 blocks, or (ceil(K / 128), N), of one quantised in 1 x 128 blocks.
    bias: (N,), floating point, or None.
    Returns (M, N), contiguous, in out_dtype: torch.bfloat16, float16 or float32. Sums move to float32 every 128 of K;
    a float32 result is accumulated in float32 throughout, which is slower. No gradients flow.
    Raises RidgelineError if shapes, dtypes or devices do not match the above, or if `impl` cannot run the call. No
    kernel runs on NVIDIA GPUs before sm_89, which have no 8-bit floating-point matrix units.
    """

def gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    return_products: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `activation(x @ gate.T) * (x @ up.T)`, (..., N). Gradients flow to x, gate and up.

    x: (..., K); gate, up: (N, K), laid out as the weights of `torch.nn.Linear`; one dtype and device, any strides.
    activation: "silu", "gelu" or "gelu_tanh". Fused implementations round once; PyTorch also rounds both products.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts all inputs first.
    return_products: returns (y, x @ gate.T, x @ up.T), for a backward pass of the caller's own; no gradients flow then.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def gemv(a: torch.Tensor, x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns the matrix-vector product `a @ x`, or `x @ a.T` for a few vectors. Gradients flow to a and x.

    a: (N, K), floating point or complex, any strides; fastest with contiguous rows or columns.
    x: (K,), or (M, K) with M up to 16, any strides, with a's dtype and device.
    Returns (N,) or (M, N) in that dtype. Sums are float32 (never TF32) and bitwise reproducible.
    PyTorch computes complex products, complex32 as complex64; impl="cuda_complex" reads complex32 directly.
    Autocast casts both inputs first, as for `torch.matmul`.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def hgemm(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns `a @ b` for two float16 matrices, summed in float32 and rounded once.

    a: (M, K) and b: (K, N), float16, on one device. PyTorch multiplies other floating-point dtypes. Returns (M, N),
    contiguous. The kernels take contiguous rows, the faster ones only rows that begin at multiples of 16 bytes; PyTorch
    takes any strides. The default is impl="torch", which has gradients; the kernels show each step and have none.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def int4_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    g_idx: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(x @ W.T + bias)`, (..., N), for W = (q - zero) * scale. Gradients flow to x and bias.

    x: (..., K), float32, float16 or bfloat16. q: (N, K / 2), uint8, the even k in the low half of a byte, as
    `quantize_int4` returns it. scale: (N, K / group), floating point. zero: uint8, of the scale's shape, at most 128;
    None is 8. bias: (N,), in x's dtype, or None.
    g_idx: (K,), the group of each k, for groups out of order (GPTQ's desc_act); plain PyTorch then computes, and
    `nn.Int4Linear` avoids that: it puts the groups in order once. None: k // group.
    activation: None, "silu", "gelu" or "gelu_tanh". Kernels take groups of multiples of 32.
    q - zero is exact, sums and scales are float32, and the result is rounded once. Autocast casts x and bias first.
    Above 64 rows a copy of the weight is dequantised to x's dtype, which rounds, and multiplied.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def int8_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(x @ (q * scale).T + bias)`, (..., N). Gradients flow to x and bias.

    x: (..., K), float32, float16 or bfloat16. q: (N, K), int8, as `quantize_int8(w, granularity="row")` returns it.
    scale: (N,) or (N, 1), floating point. bias: (N,), in x's dtype, or None.
    activation: None, "silu", "gelu" or "gelu_tanh".
    q is exact, sums and scales are float32, and the result is rounded once. Autocast casts x and bias first.
    Above 64 rows a copy of the weight is dequantised to x's dtype, which rounds, and multiplied.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def int8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    zero_a: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns the dequantised product of quantised matrices, `((a - zero_a) @ b) * scale_a * scale_b + bias`.

    a: (M, K) and b: (K, N), int8, any strides. Fastest with K contiguous in both: for a weight quantised as q (N, K),
    pass b = q.T. K is at most 65536, so that int32 sums are exact.
    scale_a: float32, one number or one per row, (M, 1) or (M,). scale_b: float32, one number or one per column, (1, N)
    or (N,): the scale.T of a weight quantised by rows.
    zero_a: int32 or int8, shaped as scale_a, or None: a's zero points, -128 to 127. Values on the GPU are not validated
    (that would synchronise): others may overflow int32.
    bias: (N,), floating point, or None.
    Returns (M, N), contiguous, in out_dtype: torch.bfloat16, float16 or float32. Sums are scaled in float32 and rounded
    once. No gradients flow.
    Raises RidgelineError if shapes, dtypes or devices do not match the above, or if `impl` cannot run the call.
    """

def int8_sparse_matmul(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `(x @ W.T) * scale_x * scale_w + bias`, (M, N), for the int8 2:4 sparse weight of (values, metadata).

    x: (M, K) and values: (N, K / 2), int8, any strides; K is at most 65536, so that int32 sums are exact. metadata:
    uint8 (ceil(K / 64), N, 8), not validated. To make them: `values, metadata = sparsify(w)`, then
    `quantize_int8(values, granularity="row")`.
    scale_x: float32, one number or one per row of x, (M,) or (M, 1); scale_w: alike for the rows of W. bias: (N,),
    out_dtype, or None. out_dtype: torch.bfloat16, float16 or float32. CUDA C++ takes 16 bits, K a multiple of 32; other
    calls multiply a dense copy. Sums are scaled in float32 and rounded once. No gradients flow.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(x @ weight.T + bias) + residual`, (..., N). Gradients flow to all tensors.

    x: (..., K); weight: (N, K); bias: (N,) or None; residual: (..., N) or None; one dtype and device, any strides.
    activation: None, "silu", "gelu" or "gelu_tanh". Sums, activation and residual are float32 inside and rounded once.
    main_grad: a contiguous float32 buffer (N, K). Backward adds the weight's gradient to it, in the product's epilogue,
    and weight.grad stays as it is; an activation is then a pass of its own. None: the weight gets its gradient.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts all inputs first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def matmul(a: torch.Tensor, b: torch.Tensor, *, accumulate: str = "float32", impl: str | None = None) -> torch.Tensor:
    """Returns the matrix product `a @ b`, as `torch.matmul`. Gradients flow to a and b.

    a: (..., M, K) or (K,); b: (..., K, N) or (K,); one numeric dtype and device, any strides; leading dimensions
    broadcast. Kernels take float32, float16 and bfloat16; PyTorch multiplies the rest. Returns (..., M, N), without the
    dimension of a vector. float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts both first.
    accumulate: "float32", or "float16" for float16 inputs: then sums of up to 64 products, also of gradients, may be
    float16, rounded after each 16, before they are added in float32. Products up to 65504 in sum stay finite. It is
    chosen on GeForce cards, which add in float16 at twice the rate; other cards' sums stay float32.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: str = "relu",
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(x @ w1.T + b1) @ w2.T + b2`, (..., N). Gradients flow to all tensors.

    x: (..., K); w1: (H, K); w2: (N, H), laid out as the weights of `torch.nn.Linear`; b1: (H,), b2: (N,) or None; one
    dtype and device, any strides. activation: "relu", "silu", "gelu" or "gelu_tanh", on float32 sums.
    The kernel takes up to 256 columns of x and of y, and any number of hidden ones; wider layers are two products.
    Hidden values are rounded to x's dtype between the products, as in PyTorch, and backward makes them again.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts all inputs first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def mxfp4_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(x @ W.T + bias)`, (..., N), for a weight W in mxfp4. Gradients flow to x and bias.

    x: (..., K), float32, float16 or bfloat16; K is a multiple of 32. q: (N, K / 2), uint8, the even k in the low half
    of a byte: a layer's `blocks` (N, K / 32, 16) in gpt-oss's files, flattened. scale: (N, K / 32), uint8, e8m0 codes:
    its `scales`. `formats.pack_mxfp4` makes both from a weight. bias: (N,), in x's dtype, or None.
    activation: None, "silu", "gelu" or "gelu_tanh".
    The weight is exact, sums are float32, and the result is rounded once. Autocast casts x and bias first.
    Above 64 rows a copy of the weight in x's dtype, exact but for float16, is multiplied.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def sgemm(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns `a @ b` for two float32 matrices, in float32 arithmetic (never TF32, under autocast too).

    Exception: under torch.compile, and in gradients, PyTorch's setting for TF32 applies.

    a: (M, K) and b: (K, N), float32, on one device. PyTorch multiplies other floating-point dtypes. Returns (M, N),
    contiguous. The kernels take contiguous rows, any distance apart; PyTorch takes any strides. The default is
    impl="torch", which has gradients; the kernels show each step and have none.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def sparse_matmul(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `x @ W.T + bias`, (..., N), for the 2:4 sparse weight W of (values, metadata) = `sparsify(w)`.

    x: (..., K); values: (N, K / 2) and bias: (N,) or None, in x's dtype; any strides. metadata: uint8
    (ceil(K / 64), N, 8), not validated. Kernels take float16 and bfloat16, with K a multiple of 16, and with `triton`
    any K and float32; else PyTorch multiplies by `densify(values, metadata)`. Sums are float32, rounded once.
    Gradients flow to x, values and bias. Their products are dense: W is sparse along K, and dx sums along N. Pruned
    numbers get no gradient, so they do not return; to choose again, keep w and call `sparsify(w)` in each step.
    Autocast casts x, values and bias first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """

def sparsify(w: torch.Tensor, *, impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (values, metadata) of a weight w pruned to two of each four along K, for `sparse_matmul`.

    w: (N, K), floating point, any strides; K is a multiple of 4. Kernels take float32, float16 and bfloat16.
    The two largest of |w| stay; of equals the earlier. A NaN counts as infinity. Numbers are copied, not rounded.
    values: (N, K / 2), w's dtype: the kept numbers of each four, in order of k.
    metadata: uint8 (ceil(K / 64), N, 8). The low half of byte b of [j, n] is i0 + 4 i1 for the kept columns i0 < i1 of
    the four from column 64 j + 8 b on; the high half describes the next four. Halves past K are 4.
    A gradient flows from values to the kept numbers of w; the pruned ones get 0.
    Raises RidgelineError if w is no such matrix, or if `impl` cannot run the call.
    """

def w4a8_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `activation(x @ W.T + bias)`, (..., N), for W = (q - zero) * scale, x in e4m3. It has no gradients.

    x: (..., K), float32, float16 or bfloat16, which `quantize_fp8(x, block="row")` quantises first; or float8_e4m3fn
    with x_scale: (...,) or (..., 1), float32, the scale of each row.
    q: (N, K / 2), uint8, the even k in the low half of a byte, as `quantize_int4` returns it. scale: (N, K / group),
    float32, float16 or bfloat16. zero: uint8, of the scale's shape, at most 16; None is 8. bias: (N,), floating point.
    activation: None, "silu", "gelu" or "gelu_tanh". out_dtype: float32, float16 or bfloat16; None is x's dtype, or
    bfloat16 for codes. Groups are multiples of 32.
    Products are exact. Hopper's 8-bit matrix units add those of a group in about 14 bits, so a float32 result is made
    by 16-bit units instead; sums of groups and scales are float32.
    Raises RidgelineError if shapes, dtypes or devices do not match, if an argument requires a gradient, or if `impl`
    cannot run the call. The kernel needs 8-bit matrix units (NVIDIA, sm_89 or later); elsewhere PyTorch serves.
    """

def concat_kv(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches, with k and v written into them in place at each sequence's position. It has no gradients.

    cache_k, cache_v: (B, S_max, H, D), any strides but not expanded. k, v: (B, S, H, D), any strides. All of one dtype.
    positions: (B,), int32 or int64: the cache row that takes row 0. Values on a GPU are not validated: rows outside the
    cache are dropped. On a CPU, or with RIDGELINE_CHECK=1, they raise.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def copy(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """A contiguous copy of x, as `x.clone(memory_format=torch.contiguous_format)`. Gradients pass to x unchanged.

    x: any shape, strides and dtype. Raises RidgelineError if x is not a dense tensor, or if `impl` cannot run the call.
    """

def index_add(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """x with `alpha * source` added to rows `index` of dimension `dim`, as `torch.index_add`. Gradients flow to both.

    x: one or more dimensions, any dtype and strides. index: (n,), int64 or int32; all rows of a repeated index are
    added.
    source: x's dtype, and x's shape with n in dimension `dim`. Sums are in float32, in the order of the source, and
    bitwise reproducible.
    deterministic: False allows faster packed atomics, which add in x's dtype and in any order. They are used for many
    indices and 16-bit dtypes, on GPUs with a larger L2 than an H100.
    Returns a contiguous tensor of x's shape. Values on a GPU are not validated: an index out of range gives NaN in the
    nearest row. On a CPU, or with RIDGELINE_CHECK=1, it raises.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """

def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    threshold: float,
    *,
    classes: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The boxes that non-maximum suppression keeps, as `torchvision.ops.nms`, or with classes as `batched_nms`.

    By falling score, equal ones in their order, a box is kept unless its overlap (intersection over union) with a kept
    box, of its own class if there are classes, is above the threshold.
    boxes: (N, 4), floating point: left, top, right, bottom; N at most 262144 on a GPU. scores: (N,), floating point.
    threshold: a number. classes: (N,), int64 or int32. Overlaps are computed in float32, whatever the dtype.
    Returns (kept, count). kept: (N,), int64, the kept boxes' indices by falling score, then -1. count: (), int64, how
    many there are. A tensor of just that length would make the host wait: take `kept[:count]` where waiting does not
    matter, else treat -1 as no box. There are no gradients. On a GPU it needs 12.5 MB for 10,000 boxes, a bit a pair.
    Raises RidgelineError if shapes, dtypes, devices or the threshold do not match the above, or if `impl` cannot run
    the call.
    """

def radix_sort(
    keys: torch.Tensor, values: torch.Tensor | None = None, *, descending: bool = False, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys in order, and the values in the order of their keys, as `torch.sort(keys, stable=True)` and its indices.

    keys: (n,), any stride, float32, float16, bfloat16, float64, int64, int32, int16, int8 or uint8. values: (n,), any
    dtype of 4 or 8 bytes; None stands for 0, 1, ..., n - 1 in int64. descending: the greatest first.
    Equal keys keep their order, also when descending. NaN is greater than all numbers, and -0 equals 0.
    Returns (sorted keys, values), both contiguous. It has no gradients.
    Raises RidgelineError for other shapes, dtypes or devices, or if `impl` cannot run the call.
    """

def repeat_kv(x: torch.Tensor, n: int, *, lengths: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
    """Each head repeated n times in a row: (B, H, S, D) becomes a new tensor (B, H n, S, D). Gradients flow to x.

    x: any dtype and strides. n: 1 or more. lengths: (B,), int32 or int64; rows from a sequence's length on are zeros
    and get no gradient. Values on a GPU are not validated; on a CPU, or with RIDGELINE_CHECK=1, lengths outside 0 to S
    raise.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """

def transpose(x: torch.Tensor, dims: Sequence[int] | None = None, *, impl: str | None = None) -> torch.Tensor:
    """x with its dimensions in another order, as a new contiguous tensor. Gradients flow to x.

    x: any shape, strides and dtype. dims: x's dimensions in their new order, as for `torch.permute`, negative ones
    counted from the end; None swaps the last two. Fastest are 32 or more contiguous bytes on both sides.
    Raises RidgelineError if x is not a dense tensor, if it has fewer than two dimensions and `dims` is None, if `dims`
    does not name each dimension once, or if `impl` cannot run the call.
    """

def upsample_nearest2d(
    x: torch.Tensor, scale_factor: float | tuple[float, float], *, impl: str | None = None
) -> torch.Tensor:
    """Images resized by nearest neighbour, as `torch.nn.functional.interpolate(x, scale_factor=..., mode="nearest")`.

    x: (N, C, H, W), floating point; contiguous or channels-last inputs are not copied, and y has the same memory
    format.
    scale_factor: a number above 0 and below 2^31, or one for H and one for W; integers, above all 2, are fastest.
    Returns (N, C, floor(H scale), floor(W scale)) in x's dtype; under autocast, halves give float32, as in torch.
    Gradients flow to x.
    Raises RidgelineError if x or scale_factor is none of these, if y would have no pixel, or if `impl` cannot run the
    call.
    """

def adamw(
    params: torch.Tensor | Sequence[torch.Tensor],
    grads: torch.Tensor | Sequence[torch.Tensor],
    exp_avgs: torch.Tensor | Sequence[torch.Tensor],
    exp_avg_sqs: torch.Tensor | Sequence[torch.Tensor],
    step: int | torch.Tensor | Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    masters: torch.Tensor | Sequence[torch.Tensor] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    impl: str | None = None,
) -> None:
    """One step of AdamW in place, as `torch.optim.AdamW` takes it. Returns None; it has no gradients.

    params, grads, exp_avgs, exp_avg_sqs: equally long lists of tensors, or one tensor each. The tensors of one
    parameter have its shape, any strides, and each float32, float16 or bfloat16 (moments may be float32 beside a
    narrower parameter). The arithmetic is float32.
    masters: float32 weights, one for each parameter. The step updates them and writes them to the parameters, rounded.
    rounding: "nearest", or "stochastic": a bfloat16 result is rounded up with the probability of what lies above, so
    that updates under half an ulp are not lost (with beta2 0.999 a bfloat16 second moment sticks otherwise). The random
    bits depend on `seed`, the step and an element's place alone, so reruns are equal.
    step: the number of this step, from 1. A 0-d float32 tensor, or a list of one per parameter, is read on the device,
    so that a CUDA graph can be replayed with other values; so is a tensor as lr. Nothing waits for the GPU.
    betas: how much of each average is kept, both in [0, 1). eps: added to the root of the second average, at least 0.
    weight_decay: subtracted as lr * weight_decay * param (decoupled), at least 0. maximize: ascend the gradient.
    Raises RidgelineError if lists do not fit together, if a tensor is sparse, expanded or not floating point, if
    masters are not float32, if float16 is to be rounded stochastically, if a number is out of range, or if `impl`
    cannot run the call.
    """

def clip_grad_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, *, impl: str | None = None
) -> torch.Tensor:
    """The gradients' norm; scales them in place to at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    tensors: parameters (each stands for its `.grad`, and is skipped without one; so does any tensor that requires a
    gradient) or gradients; any shapes and strides, floating point, on one device. norm_type: 2, inf, or another order,
    which PyTorch runs. Nothing waits for the GPU.
    DTensors: the local shards are scaled, and the norm is summed over their meshes; every rank must call this,
    with gradients of the same parameters.
    Returns the norm before scaling, over all gradients as one vector: a 0-d tensor, float32 (float64 for float64
    gradients). A norm that is not finite scales as in PyTorch: infinity gives 0 and NaN, NaN gives NaN.
    Raises RidgelineError if max_norm is negative, if gradients lie on several devices, are sparse or integers, or if
    `impl` cannot run the call.
    """

def bias_mask_scale_add(
    x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float, add: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """`(x + bias) * mask * scale + add`, element by element.

    x: (..., n). bias: (n). mask: boolean or floating point, without a gradient. scale: a number. add: like x.
    mask and add may broadcast. All are on one device; the result has PyTorch's promoted dtype.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """

def dropout(
    x: torch.Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: int | torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """x with each element set to 0 with probability p, and the others divided by 1 - p. Gradients flow to x.

    x: any shape and strides, floating point. Returns a contiguous tensor of its shape and dtype; with training=False or
    p = 0, x itself.
    seed: the same seed drops the same elements. An int of 64 bits, or a 0-d int64 tensor on x's device or the CPU. The
    kernel reads a tensor on x's device, so a CUDA graph draws anew when it changes. None draws from PyTorch's CPU
    generator or, under torch.compile or in a CUDA graph, from that of x's device at every run.
    Raises RidgelineError if p is outside [0, 1], if seed is invalid, if x is not floating point, or if `impl` cannot
    run the call.
    """

def gelu(x: torch.Tensor, approximate: str = "none", *, impl: str | None = None) -> torch.Tensor:
    """The Gaussian error linear unit of each element, as `torch.nn.functional.gelu`. Gradients flow to x.

    x: floating point, any shape and strides. approximate: "none" (erf) or "tanh". Returns x's shape and dtype.
    Raises RidgelineError if `approximate` is invalid, if x is not floating point, or if `impl` cannot run the call.
    """

def gelu_mul(
    gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh", *, impl: str | None = None
) -> torch.Tensor:
    """`gelu(gate) * up`, element by element.

    gate, up: floating-point tensors on one device whose shapes broadcast; the result has PyTorch's promoted dtype.
    approximate: "tanh", or "none" (erf). Gradients flow to both.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """

def mul(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The product of two tensors, element by element, as `torch.mul`. Gradients flow to both.

    a, b: tensors on one device whose shapes broadcast; the result has PyTorch's promoted dtype.
    Raises RidgelineError if an argument is not a tensor, if devices differ, or if `impl` cannot run the call.
    """

def quick_gelu(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """`x * sigmoid(1.702 * x)`, element by element. Gradients flow to x.

    x: any shape and strides, floating point. Returns a tensor of x's shape and dtype.
    Raises RidgelineError if x is not floating point, or if `impl` cannot run the call.
    """

def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k with rotary position embedding, as new tensors of their shapes and dtypes. Gradients flow to both.

    q: (b, hq, s, d), k: (b, hk, s, d), floating point, any strides; d is even.
    cos, sin: (max_seq, r), any floating dtype, without gradients: a column per pair of the first 2r <= d dimensions.
    positions: (b, s) or (s), int64: rows of cos and sin; None means 0, 1, ..., s - 1. Values on a GPU are not
    validated: a position out of range gives a row of NaN. On a CPU, or with RIDGELINE_CHECK=1, it raises.
    interleaved: pairs are (2i, 2i + 1); by default (i, i + r).
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """

def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """`silu(gate) * up`, element by element.

    gate, up: floating-point tensors on one device whose shapes broadcast; the result has PyTorch's promoted dtype.
    Gradients flow to both.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """

def dequantize(
    q: torch.Tensor | tuple[torch.Tensor, ...],
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """(q - zero) * scale: the floating-point numbers that `quantize_int8` or `quantize_fp8` encoded.

    q: the tuple that they return; or its first tensor (int8, float8_e4m3fn or float8_e5m2, any shape and strides),
    followed by the others.
    scale: float32, () or (1,) for all of q; (..., 1) for rows; (..., ceil(K / 128)) for 1 x 128 blocks of (..., K);
    (ceil(M / 128), ceil(K / 128)) for 128 x 128 blocks of (M, K). zero: int32 or int8, of the scale's shape, for int8.
    dtype: of the result; None is the scale's. Computed in float32 and rounded once. Returns a contiguous tensor of q's
    shape. It has no gradients.
    Raises RidgelineError if shapes, dtypes or devices are none of these, or if `impl` cannot run the call.
    """

def quantize_fp8(
    x: torch.Tensor,
    *,
    block: tuple[int, int] | str = (1, 128),
    dtype: torch.dtype = torch.float8_e4m3fn,
    transpose: bool = False,
    largest: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """x as 8-bit floating-point numbers, e4m3 or e5m2: (q, scale), with x about q times the scale of its block.

    x: (..., K), floating point, any strides. block: which numbers share a scale: (1, 128) of a row, (128, 128) of a
    matrix (blocks at the end may be smaller), "row" or "tensor". dtype: torch.float8_e4m3fn or float8_e5m2.
    transpose: also quantises the transpose of a matrix x, in the same pass: (q, scale, q_t, scale_t), the last two as
    `quantize_fp8(x.mT, block=block, dtype=dtype)` returns them; q_t is (K, M), contiguous.
    largest: with block "tensor", a largest size to take instead of x's own, float32, (): that of a whole tensor of
    which x is a part. Larger numbers become 448 or -448. Parts so quantised are bitwise the parts of the whole's codes.
    Returns q, contiguous, of x's shape; and scale, float32: (..., ceil(K / 128)), (ceil(M / 128), ceil(K / 128)),
    (..., 1) or (). A block's largest number becomes 448 or -448 (e5m2: 57344). It has no gradients.
    x / scale is rounded to float32, then to the nearest 8-bit number, ties to even. A scale is at least 2^-126 (all
    zeros), and infinite if its numbers hold an infinity or NaN; `dequantize` then gives NaN. GPUs without 8-bit floats
    give the same codes, slower.
    Raises RidgelineError if x is not floating point, if `block`, `dtype`, `transpose` or `largest` is none of these, or
    if `impl` cannot run the call.
    """

def quantize_int4(
    w: torch.Tensor, *, group: int = 128, symmetric: bool = False, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A weight as 4-bit codes: (q, scale, zero) for `int4_linear`; w is about (q - zero) * scale.

    w: (N, K), floating point, any strides. group: the columns that share a scale; it divides K, and K is even.
    symmetric: codes are 1 to 15, and the zero is 8, returned as None; else 0 to 15 cover the range, extended by 0.
    Returns q, uint8 (N, K / 2), the even k in the low half of a byte; scale, float32 (N, K / group); zero, uint8,
    alike, or None. It has no gradients.
    w / scale is rounded to float32, then to the nearest integer, ties to even. A scale is at least 2^-126 (all zeros),
    and infinite if its numbers hold an infinity or NaN.
    Raises RidgelineError if w is not a floating-point matrix, if group does not divide K, or if `impl` cannot run.
    """

def quantize_int8(
    x: torch.Tensor, *, granularity: str = "tensor", symmetric: bool = True, impl: str | None = None
) -> tuple[torch.Tensor, ...]:
    """x as 8-bit integers: (q, scale) or, with symmetric=False, (q, scale, zero); x is about (q - zero) * scale.

    x: floating point, any shape and strides. granularity: "tensor", or "row" for a scale per row of the last dimension.
    symmetric: q is in -127 to 127, without zeros; else -128 to 127 cover the range of x, extended to include 0.
    Returns q, int8, contiguous, of x's shape; scale, float32, () or (..., 1); zero, int32, shaped like scale. It has no
    gradients.
    x / scale is rounded to float32, then to the nearest integer, ties to even, and saturates. A scale is at least
    2^-126 (all zeros), and infinite if its numbers hold an infinity or NaN; `dequantize` then gives NaN.
    Raises RidgelineError if x is not floating point, if `granularity` is invalid, or if `impl` cannot run the call.
    """

def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns each channel of x convolved along time with its own filter, then silu: y, of x's shape and dtype.

    Gradients flow to x, weight, bias and initial_state.
    x: (B, T, C), float32, float16 or bfloat16, any strides whose last is 1. weight: (C, width), width 2 to 4; its last
    column meets the token itself. bias: (C,) or None. Both in any floating-point dtype and any strides.
    activation: "silu" or None.
    initial_state: (B, C, width), the inputs before the first token, the latest last, in x's dtype; zeros if None.
    return_state: returns (y, state after the last token).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state, for T = 1 without a copy; without
    gradients only.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    normalize: bool = False,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns the gated delta rule: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    q, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of q and k.
    g: (B, T, H) or (B, T, H, K), or HV heads in place of H: the logarithm of the decay, at most 0. beta: (B, T, H) or
    (B, T, HV): how far a key's value is corrected, 0 to 1 or 2. Both in any floating-point dtype.
    normalize: q and k are divided by their L2 norms, (sum of squares + 1e-6)^1/2.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; K^-1/2 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def gated_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns linear attention whose state decays by a gate: o, (B, T, HV, V).

    Gradients flow to every floating-point argument.
    q, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of q and k.
    g: (B, T, H) or (B, T, H, K): the logarithm of the decay, at most 0, in any floating-point dtype.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; K^-1/2 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns causal linear attention: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    q, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of q and k.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; 1 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns RWKV-6's time mixing: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    r, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of r and k.
    w: (B, T, H, K): the logarithm of the decay, at most 0. u: (H, K). Both in any floating-point dtype.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; 1 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns RWKV-7's time mixing: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    r, k, a, b: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last
    is 1; K and V from 1 to 256. Value head h uses head h // (HV / H) of the others. a and b are RWKV-7's -kk and kk
    times its rate in context.
    w: (B, T, H, K): the logarithm of the decay, at most 0, in any floating-point dtype.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; 1 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns Mamba-2's state space layer: y, (B, T, H, P). Gradients flow to every floating-point argument.

    x: (B, T, H, P); B, C: (B, T, groups, N), H a multiple of groups; one dtype, float32, float16 or bfloat16, any
    strides whose last is 1; P and N from 1 to 256. Head h uses group h // (H / groups).
    dt: (B, T, H); dt_bias: (H,), added to it; dt_softplus: whether softplus follows. A: (H,), below 0. D: (H,).
    z: (B, T, H, P): y is multiplied by silu(z). These are in any floating-point dtype.
    initial_state: (B, H, N, P), float32; zeros if None. return_state: returns (y, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies the state's part of y; 1 if None.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def cumsum(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, impl: str | None = None) -> torch.Tensor:
    """The sums of x along `dim` up to and including each element, as `torch.cumsum`. Gradients flow to x.

    x: any shape and strides, real. dtype: x is cast to it first, and it is the result's; None means x's, int64 for
    integers, or float32 for halves under autocast. Integers are exact and wrap around; halves add in float32; floats
    are bitwise reproducible. Returns a contiguous tensor of x's shape.
    Raises RidgelineError if x is complex, if `dim` or `dtype` is invalid, or if `impl` cannot run the call.
    """

def dot(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The dot product of two vectors, as `torch.dot`. Gradients flow to both.

    a, b: (N,), any strides, on one device, of one dtype: float32, float16, bfloat16 or float64. Returns a scalar, (),
    in that dtype. Sums are in float32 (float64 for float64) and bitwise reproducible.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """

def histogram(
    x: torch.Tensor, bins: int, range: tuple[float, float] | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """How many elements of x lie in each of `bins` equal parts of `range`, like `torch.histc`, but exact and in int64.

    x: any shape and strides, integers or floating point. bins: 1 or more. range: (low, high), both included; None means
    x's extremes, widened by one on both sides if they are equal. Elements outside, and NaN, are not counted. Bins are
    decided as float64 arithmetic does.
    Without a range x must be finite; that is checked on a CPU, or with RIDGELINE_CHECK=1.
    Returns (bins,), int64. It has no gradients.
    Raises RidgelineError if x, bins or range is invalid, or if `impl` cannot run the call.
    """

def reduce_sum(
    x: torch.Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """The sum of all elements, or along `dim`, as `torch.sum`. Gradients flow to x.

    x: any shape and strides. dim: a dimension, several, or None for all; keepdim keeps them with size 1. dtype: the
    result's; by default x's, or int64 for integers. Sums are in float32 for floats and in 64 bits for integers,
    whatever the dtype, and bitwise reproducible.
    Raises RidgelineError if `dim` is out of range or repeated, if `keepdim` or `dtype` is invalid, or if `impl` cannot
    run the call.
    """

def sum_to(x: torch.Tensor, shape: Sequence[int], *, impl: str | None = None) -> torch.Tensor:
    """x summed to a shape that broadcasts to x's, as `torch.Tensor.sum_to_size`. Gradients flow to x.

    Sums over the leading dimensions that `shape` lacks and over those where it has 1: the gradient of a tensor of that
    shape, from the gradient of its broadcast. If no dimension is summed, it returns a view of x.
    x: any shape and strides. shape: sizes. Sums are in float32 for floats and in 64 bits for integers, and bitwise
    reproducible. Returns x's dtype, or int64 for integers; under autocast float32 for halves, as torch's sum.
    Raises RidgelineError if `shape` does not broadcast to x's shape, or if `impl` cannot run the call.
    """

def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of x + residual over the last dimension, and the sum itself: (y, sum).

    x, residual: one shape (at least one dimension) and floating dtype, any strides. weight, bias: (columns,), of any
    floating dtype; bias may be None. eps: at least 0, added to the variance. y and sum have x's shape and dtype; y
    comes from the float32 sum, not from the rounded one that is returned.
    Gradients flow to all inputs, from either result; backward saves the sum and two float32 per row.
    Raises RidgelineError if shapes, dtypes or devices do not fit together, or if `impl` cannot run the call.
    """

def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual over the last dimension, and the sum itself: (y, sum).

    x, residual: one shape (at least one dimension) and floating dtype, any strides. weight: (columns,), of any floating
    dtype. eps: at least 0, added to the mean square. offset and rounding are `rms_norm`'s. y and sum have x's shape and
    dtype (y with rounding="llama" the promoted dtype of x and weight); y comes from the float32 sum, not from the
    rounded one that is returned.
    Gradients flow to x, residual and weight, from either result; backward saves the sum and a float32 per row.
    Raises RidgelineError if shapes, dtypes or devices do not fit together, or if `impl` cannot run the call.
    """

def batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    add: torch.Tensor | None = None,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Each channel normalised over images and space, as `torch.nn.functional.batch_norm`, plus `add`, through ReLU.

    x: (images, channels, ...), floating point, in NCHW or channels_last memory without a copy.
    running_mean, running_var: (channels,), floating point. In evaluation they are the statistics, and needed. In
    training they move towards the batch's by `momentum` (the variance's divisor is then one less), or are None.
    weight, bias: (channels,), floating point, or None. eps: at least 0. add: of x's shape and dtype, or None.
    activation: None or "relu".
    Returns a tensor of x's shape, dtype and memory format. Gradients flow to x, weight, bias and add. Backward saves x,
    and y for "relu".
    Raises RidgelineError if shapes, dtypes or devices do not fit, if a channel has a single number in training, or if
    `impl` cannot run the call.
    """

def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns `rms_norm` of x over its last dimension, gated: rms_norm(x) * weight * act(gate), in x's shape and dtype.

    Gradients flow to x, gate and weight; backward saves them and a float32 per row.
    x: at least one dimension, any strides, floating point. gate: x's shape, in any floating-point dtype.
    weight: (columns,), in any floating-point dtype. eps: at least 0, added to the mean square.
    activation: "silu" or "sigmoid", of the gate.
    norm_before_gate: True as in Qwen3-Next; False as in Mamba-2: rms_norm(x * act(gate)) * weight.
    group_size: columns that have a mean square of their own, a divisor of x's columns; None for all of them.
    All is computed in float32 and rounded once.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """

def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Each image's groups of channels normalised to mean 0 and variance 1, as `torch.nn.functional.group_norm`.

    x: (images, channels, ...), floating point, in NCHW or channels_last memory without a copy. num_groups: a divisor of
    channels. weight, bias: (channels,), of any floating dtype, or None. eps: at least 0, added to a group's variance.
    activation: None, or "silu" for u sigmoid(u) of the normalised u, in the same pass, forward and backward.
    Returns a tensor of x's shape, dtype and memory format; under autocast it is float32, as torch's is.
    Gradients flow to x, weight and bias.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """

def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Each row of x minus its mean, over its standard deviation, as `torch.nn.functional.layer_norm` on the last
    dimension.

    x: at least one dimension, any strides, floating point. weight, bias: (columns,), of any floating dtype, or None.
    eps: at least 0, added to the variance.
    Returns x's shape and dtype. Gradients flow to x, weight and bias; backward saves x and two float32 per row.
    memory_efficient: backward saves the result instead of x, which frees x if the next layer saves the result anyway.
    No weight may then be zero (checked on a CPU, or with RIDGELINE_CHECK=1), and gradients lose precision where a bias
    is many times its weight.
    Raises RidgelineError if weight, bias or eps is none of these, if devices differ, or if `impl` cannot run the call.
    """

def log_softmax(
    x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """The logarithm of softmax along `dim`, as `torch.nn.functional.log_softmax`. Gradients flow to x.

    x: any shape and strides, floating point. dtype: x is cast to it first, and it is the result's; float32 for
    half-precision x costs no extra pass. Returns a tensor of x's shape, contiguous along `dim` if kernels run the call.
    A row that is all -inf, or holds +inf or NaN, gives NaN.
    Raises RidgelineError if `dim` or `dtype` is invalid, or if `impl` cannot run the call.
    """

def masked_softmax(
    x: torch.Tensor,
    mask: torch.Tensor,
    scale: float = 1.0,
    fill: float = float("-inf"),
    bias: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """softmax over the last dimension of scale * x + bias where `mask` is True, else of `fill`. Gradients: x and bias.

    x: floating point, at least one dimension, any strides. mask: torch.bool, broadcasts to x; bias: floating, likewise.
    fill: a number; if it is -inf, a row with nothing kept gives 0. dropout_p: each result is dropped with this
    probability (rounded to a multiple of 1/65536), and the others are divided by 1 - p. The same seed (an int or a 0-d
    int64 tensor) drops the same elements; None draws one.
    Returns a tensor of x's shape and dtype. A row with +inf or NaN among its kept elements gives NaN.
    Raises RidgelineError if an argument is none of these, if devices differ, or if `impl` cannot run the call.
    """

def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    memory_efficient: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Each row of x over its root mean square, times `offset + weight`; by default as `torch.nn.functional.rms_norm` on
    the last dimension.

    x: at least one dimension, any strides, floating point. weight: (columns,), of any floating dtype, or None.
    eps: at least 0; None means torch's default, the machine epsilon of float32 (of float64 for float64).
    offset: a finite number that is added to the weight in float32. Gemma's norms store weights around 0: offset=1.0.
    rounding: "once" computes in float32 and rounds the result to x's dtype, as Gemma and OLMo do. "llama" rounds the
    normalised row to x's dtype before it multiplies by offset + weight, and the product to the promoted dtype of x and
    weight; without an offset these are Llama's two roundings. Gradients are those of the unrounded formula either way.
    Returns x's shape, in x's dtype ("llama": the promoted one). Gradients flow to x and weight; backward saves x and a
    float32 per row.
    memory_efficient: backward saves the result instead of x, which frees x if the next layer saves the result anyway.
    No offset + weight may then be zero (checked on a CPU, or with RIDGELINE_CHECK=1), and weight's gradient has the
    result's rounding.
    Under autocast on a GPU, "once" returns float32 as torch does; "llama" is as without autocast.
    Raises RidgelineError if an argument is none of these, if devices differ, if there is an offset but no weight, if
    memory_efficient would save a result wider than x, or if `impl` cannot run the call.
    """

def softmax(
    x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """exp(x) scaled to sum to 1 along `dim`, as `torch.nn.functional.softmax`. Gradients flow to x.

    x: any shape and strides, floating point. dtype: x is cast to it first, and it is the result's; float32 for
    half-precision x costs no extra pass. Returns a tensor of x's shape, contiguous along `dim` if kernels run the call.
    A row that is all -inf, or holds +inf or NaN, gives NaN.
    Raises RidgelineError if `dim` or `dtype` is invalid, or if `impl` cannot run the call.
    """

def weighted_sum(x: torch.Tensor, weight: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The sum of x times weight over the last dimension, as `(x * weight).sum(-1)`. Gradients flow to both.

    x: (..., D), floating point, any strides. weight: (D,), of any floating dtype, on x's device.
    Returns a tensor of shape (...) in PyTorch's promoted dtype. Under autocast, halves give float32.
    Raises RidgelineError if x or weight is none of these, or if `impl` cannot run the call.
    """
