"""Bad input to the public functions: one clear sentence that names what was given and what is accepted."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import ridgeline
from ridgeline import device
from ridgeline.op import RidgelineError, registry

x, half, whole = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.float16), torch.ones(4, 6, dtype=torch.int32)
away, sparse = torch.ones(4, 6, device="meta"), torch.eye(6).to_sparse()
w, w5, wint, waway = torch.ones(6), torch.ones(5), torch.ones(6, dtype=torch.int32), torch.ones(6, device="meta")
yes, square = torch.ones(4, 6, dtype=torch.bool), torch.ones(6, 6)
image, labels = torch.ones(2, 6, 3), torch.zeros(6, dtype=torch.int64)
q, table, odd = torch.ones(1, 2, 3, 8), torch.ones(5, 4), torch.ones(1, 2, 3, 7)
zero = torch.tensor([1.0, 1, 0, 1, 1, 1])
a, b, ends = torch.ones(1, 4, 5, 16), torch.ones(1, 2, 7, 16), torch.tensor([0, 3, 5], dtype=torch.int32)
packed = torch.ones(5, 2, 16)
codes, E4M3 = torch.ones(4, 6, dtype=torch.int8), torch.float8_e4m3fn
keys, lengths = torch.ones(2, 9, 2, 16), torch.ones(2, dtype=torch.int32)
step = torch.ones(2, 1, 4, 16)
odd_cache = torch.ones(2, 9, 2, 17, dtype=torch.int8)[..., :16]
blocks, owned = torch.ones(3, 16, 2, 16), torch.zeros(2, 1, dtype=torch.int32)
cache, new, at = torch.ones(2, 5, 3, 4), torch.full((2, 2, 3, 4), 2.0), torch.zeros(2, dtype=torch.int64)
heads4, keys3 = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 3, 8)
decays, state4 = -torch.ones(2, 5, 4), torch.ones(2, 4, 8, 8)
rows5, each3, tops = torch.ones(5, 6), torch.ones(3, 6, 4), torch.tensor([2, 2, 5], dtype=torch.int32)
gate_up2, down2, chosen = torch.ones(2, 8, 6), torch.ones(2, 6, 4), torch.zeros(4, 1, dtype=torch.int64)
x32, codes32, down32 = (
    torch.ones(4, 32),
    torch.ones(2, 64, 16, dtype=torch.uint8),
    torch.ones(2, 32, 16, dtype=torch.uint8),
)
scales32, codes8, down8 = (
    (torch.ones(2, 64, 1), torch.ones(2, 32, 1)),
    torch.ones(2, 64, 32).char(),
    torch.ones(2, 32, 32).char(),
)
bytes32 = tuple(s.byte() for s in scales32)
share = torch.ones(4, 1)
photo, kernel3 = torch.ones(2, 6, 5, 5), torch.ones(4, 6, 3, 3)
line, taps, window = torch.ones(2, 5, 6), torch.ones(6, 4), torch.ones(2, 6, 4)

Bad = dict[str, tuple[Callable[[], object], list[str]]]
BAD: Bad = {
    "grouped_matmul: offsets that fall": (
        lambda: ridgeline.grouped_matmul(rows5, each3, tops.flip(0)),
        ["offsets", "rise", "5 rows", "[5, 2, 2]"],
    ),
    "grouped_matmul: offsets past the rows": (
        lambda: ridgeline.grouped_matmul(rows5[:4], each3, tops),
        ["offsets", "4 rows", "[2, 2, 5]"],
    ),
    "grouped_matmul: long offsets": (
        lambda: ridgeline.grouped_matmul(rows5, each3, tops.long()),
        ["int32", "int64", "(3,)"],
    ),
    "grouped_matmul: inner sizes": (
        lambda: ridgeline.grouped_matmul(rows5[:, :5], each3, tops),
        ["(T, K)", "(5, 5)", "(3, 6, 4)"],
    ),
    "grouped_matmul: another bias": (
        lambda: ridgeline.grouped_matmul(rows5, each3, tops, bias=torch.ones(3, 5)),
        ["bias", "(3, 4)", "(3, 5)"],
    ),
    "grouped_matmul: a buffer in half precision": (
        lambda: ridgeline.grouped_matmul(rows5, each3, tops, main_grad=each3.half()),
        ["main_grad", "float32", "float16"],
    ),
    "grouped_matmul: two dtypes": (lambda: ridgeline.grouped_matmul(rows5, each3.half(), tops), ["float32", "float16"]),
    "grouped_matmul: no tensor": (lambda: ridgeline.grouped_matmul(rows5, each3, [2, 2, 5]), ["offsets", "list"]),
    "topk_gate: more than there are": (lambda: ridgeline.topk_gate(x, 7), ["k", "1 to 6", "7"]),
    "topk_gate: more than the groups have": (
        lambda: ridgeline.topk_gate(x, 3, groups=3, top_groups=1),
        ["k", "1 to 2", "3"],
    ),
    "topk_gate: groups that do not divide": (lambda: ridgeline.topk_gate(x, 1, groups=4), ["groups", "6", "4"]),
    "topk_gate: too many top groups": (
        lambda: ridgeline.topk_gate(x, 1, groups=2, top_groups=3),
        ["top_groups", "1 to 2", "3"],
    ),
    "topk_gate: another score": (lambda: ridgeline.topk_gate(x, 1, score="relu"), ["softmax", "sigmoid", "'relu'"]),
    "topk_gate: another bias": (lambda: ridgeline.topk_gate(x, 1, bias=w5), ["bias", "(6,)", "(5,)"]),
    "topk_gate: a scale of nothing": (lambda: ridgeline.topk_gate(x, 1, scale=0.0), ["scale", "0.0"]),
    "topk_gate: whole numbers": (lambda: ridgeline.topk_gate(whole, 1), ["floating", "int32"]),
    "topk_gate: no tensor": (lambda: ridgeline.topk_gate([1.0], 1), ["logits", "list"]),
    "moe: an index of no expert": (
        lambda: ridgeline.moe(x, share, chosen + 2, gate_up2, down2),
        ["indices", "0 to 1", "2 to 2"],
    ),
    "moe: other weights": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2[:1]),
        ["gate_up", "down", "(2, 8, 6)", "(1, 6, 4)"],
    ),
    "moe: another width": (
        lambda: ridgeline.moe(rows5[:4, :5], share, chosen, gate_up2, down2),
        ["(..., H)", "(4, 5)"],
    ),
    "moe: shares of another shape": (
        lambda: ridgeline.moe(x, torch.ones(4, 2), chosen, gate_up2, down2),
        ["weights", "(4, 1)", "(4, 2)"],
    ),
    "moe: indices of another shape": (
        lambda: ridgeline.moe(x, share, chosen[:2], gate_up2, down2),
        ["indices", "(4, 'k')", "(2, 1)"],
    ),
    "moe: another bias": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2, down_bias=torch.ones(2, 8)),
        ["down_bias", "(2, 6)", "(2, 8)"],
    ),
    "moe: another activation": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2, activation="gelu"),
        ["silu", "swiglu_oai", "'gelu'"],
    ),
    "moe: a limit below nothing": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2, limit=-1.0),
        ["limit", "-1.0"],
    ),
    "moe: two dtypes": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2.half()),
        ["down", "float32", "float16"],
    ),
    "moe: no tensor": (lambda: ridgeline.moe(x, share, [0], gate_up2, down2), ["indices", "list"]),
    "moe: one tensor of scales": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=scales32[0]),
        ["scales", "pair", "Tensor"],
    ),
    "moe: no tensors as scales": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=(1.0, 2.0)),
        ["scales", "two tensors", "float"],
    ),
    "moe: scales of another shape": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=(scales32[0], scales32[1][:, :5])),
        ["down's scales", "(2, 32, K / group)", "(2, 5, 1)"],
    ),
    "moe: groups that do not divide": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=(torch.ones(2, 64, 3), scales32[1])),
        ["gate_up's scales", "32", "(2, 64, 3)"],
    ),
    "moe: scales of another dtype": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=[s.int() for s in scales32]),
        ["int4", "mxfp4", "int32"],
    ),
    "moe: scales of weights in full": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2, scales=scales32),
        ["gate_up", "int8", "float32"],
    ),
    "moe: codes of two kinds": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=(scales32[0].byte(), scales32[1])),
        ["one kind", "mxfp4", "int4"],
    ),
    "moe: scales of a row for codes of 8 bits": (
        lambda: ridgeline.moe(x32, share, chosen, codes8, down8, scales=(torch.ones(2, 64, 2), torch.ones(2, 32))),
        ["gate_up's scales", "(2, 64)", "(2, 64, 2)"],
    ),
    "moe: zeros without scales": (
        lambda: ridgeline.moe(x, share, chosen, gate_up2, down2, zeros=scales32),
        ["zeros", "scales", "None"],
    ),
    "moe: zeros of another dtype": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=scales32, zeros=scales32),
        ["zeros", "uint8", "float32"],
    ),
    "moe: zeros of mxfp4": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32, scales=bytes32, zeros=bytes32),
        ["zeros", "int4", "mxfp4"],
    ),
    "moe: codes without scales": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32),
        ["gate_up", "float32", "uint8"],
    ),
    "moe: codes of other experts": (
        lambda: ridgeline.moe(x32, share, chosen, codes32, down32[:1], scales=scales32),
        ["(E, H, I / 2)", "(1, 32, 16)"],
    ),
    "linear_attention: heads that do not divide": (
        lambda: ridgeline.linear_attention(keys3, keys3, heads4),
        ["multiple", "4", "3"],
    ),
    "linear_attention: two dtypes": (
        lambda: ridgeline.linear_attention(heads4, heads4, heads4.half()),
        ["float32", "float16"],
    ),
    "linear_attention: a state of another shape": (
        lambda: ridgeline.linear_attention(heads4, heads4, heads4, initial_state=state4[:1]),
        ["initial_state", "(2, 4, 8, 8)", "(1, 4, 8, 8)"],
    ),
    "linear_attention: inplace without a state": (
        lambda: ridgeline.linear_attention(heads4, heads4, heads4, inplace=True),
        ["inplace", "initial_state", "None"],
    ),
    "linear_attention: packed with a batch": (
        lambda: ridgeline.linear_attention(heads4, heads4, heads4, cu_seqlens=ends),
        ["batch of 1", "2"],
    ),
    "linear_attention: packed tokens missing": (
        lambda: ridgeline.linear_attention(heads4[:1], heads4[:1], heads4[:1], cu_seqlens=ends[:2]),
        ["cu_seqlens", "5 tokens", "[0, 3]"],
    ),
    "linear_attention: no tensor": (lambda: ridgeline.linear_attention(heads4, heads4, 3), ["v", "int"]),
    "gated_linear_attention: a gate of another shape": (
        lambda: ridgeline.gated_linear_attention(heads4, heads4, heads4, decays[:1]),
        ["g", "(2, 5, 4)", "(2, 5, 4, 8)", "(1, 5, 4)"],
    ),
    "gated_linear_attention: a scale that is none": (
        lambda: ridgeline.gated_linear_attention(heads4, heads4, heads4, decays, scale="1"),
        ["scale", "'1'"],
    ),
    "rwkv6: a bonus of another shape": (
        lambda: ridgeline.rwkv6(heads4, heads4, heads4, -heads4, torch.ones(8)),
        ["u", "(4, 8)", "(8,)"],
    ),
    "gated_linear_attention: a gate above 0": (
        lambda: ridgeline.gated_linear_attention(heads4, heads4, heads4, -decays),
        ["g", "logarithm", "at most 0", "1"],
    ),
    "gated_delta_rule: beta for each channel": (
        lambda: ridgeline.gated_delta_rule(heads4, heads4, heads4, decays, heads4),
        ["beta", "(2, 5, 4)", "(2, 5, 4, 8)"],
    ),
    "gated_delta_rule: normalize that is none": (
        lambda: ridgeline.gated_delta_rule(heads4, heads4, heads4, decays, decays, normalize=1),
        ["normalize", "True or False", "1"],
    ),
    "gated_delta_rule: heads that do not divide": (
        lambda: ridgeline.gated_delta_rule(keys3, keys3, heads4, decays, decays),
        ["multiple", "4", "3"],
    ),
    "rwkv7: another shape of a": (
        lambda: ridgeline.rwkv7(heads4, -heads4, heads4, heads4, keys3, heads4),
        ["a", "(2, 5, 4, 8)", "(2, 5, 3, 8)"],
    ),
    "rwkv7: a gate above 0": (
        lambda: ridgeline.rwkv7(heads4, heads4, heads4, heads4, heads4, heads4),
        ["w", "logarithm", "at most 0", "1"],
    ),
    "ssd: a rate for each channel": (
        lambda: ridgeline.ssd(heads4, decays, torch.ones(8), heads4[:, :, :2], heads4[:, :, :2]),
        ["A", "(4,)", "(8,)"],
    ),
    "ssd: dt_softplus that is none": (
        lambda: ridgeline.ssd(heads4, decays, torch.ones(4), heads4, heads4, dt_softplus=1),
        ["dt_softplus", "1"],
    ),
    "causal_conv1d: no tensor": (lambda: ridgeline.causal_conv1d(line, 3), ["weight", "tensor", "int"]),
    "causal_conv1d: two dimensions": (lambda: ridgeline.causal_conv1d(x, taps), ["(B, T, C)", "(4, 6)"]),
    "causal_conv1d: integers": (lambda: ridgeline.causal_conv1d(line.int(), taps), ["x", "floating", "int32"]),
    "causal_conv1d: too wide": (lambda: ridgeline.causal_conv1d(line, square), ["2, 3 or 4", "(6, 6)"]),
    "causal_conv1d: filters of other channels": (lambda: ridgeline.causal_conv1d(line, taps[:5]), ["(6,", "(5, 4)"]),
    "causal_conv1d: a short bias": (lambda: ridgeline.causal_conv1d(line, taps, w5), ["bias", "(6,)", "(5,)"]),
    "causal_conv1d: another activation": (
        lambda: ridgeline.causal_conv1d(line, taps, activation="gelu"),
        ["'silu' or None", "'gelu'"],
    ),
    "causal_conv1d: channels that are apart": (
        lambda: ridgeline.causal_conv1d(line.mT.contiguous().mT, taps),
        ["x", "contiguous", "stride 5"],
    ),
    "causal_conv1d: two devices": (lambda: ridgeline.causal_conv1d(line, taps.to("meta")), ["weight", "meta", "cpu"]),
    "causal_conv1d: a state of another width": (
        lambda: ridgeline.causal_conv1d(line, taps, initial_state=window[..., 1:]),
        ["initial_state", "(2, 6, 4)", "(2, 6, 3)"],
    ),
    "causal_conv1d: a state of another dtype": (
        lambda: ridgeline.causal_conv1d(line, taps, initial_state=window.half()),
        ["initial_state", "float32", "float16"],
    ),
    "causal_conv1d: inplace without a state": (
        lambda: ridgeline.causal_conv1d(line, taps, inplace=True),
        ["inplace", "initial_state", "None"],
    ),
    "causal_conv1d: inplace with gradients": (
        lambda: ridgeline.causal_conv1d(line, taps.clone().requires_grad_(), initial_state=window, inplace=True),
        ["inplace", "no gradients", "torch.no_grad()"],
    ),
    "causal_conv1d: inplace in a state with holes": (
        lambda: ridgeline.causal_conv1d(line, taps, initial_state=window.mT.contiguous().mT, inplace=True),
        ["contiguous", "strides", "(24, 1, 6)"],
    ),
    "causal_conv1d: packed with a batch": (
        lambda: ridgeline.causal_conv1d(line, taps, cu_seqlens=ends),
        ["batch of 1", "2"],
    ),
    "causal_conv1d: packed tokens missing": (
        lambda: ridgeline.causal_conv1d(line[:1], taps, cu_seqlens=ends[:2]),
        ["cu_seqlens", "5 tokens", "[0, 3]"],
    ),
    "causal_conv1d: another dtype of ends": (
        lambda: ridgeline.causal_conv1d(line[:1], taps, cu_seqlens=ends.long()),
        ["cu_seqlens", "int32", "int64"],
    ),
    "gated_rms_norm: no gate": (lambda: ridgeline.gated_rms_norm(x, None, w), ["gate", "tensor", "NoneType"]),
    "gated_rms_norm: a gate of another shape": (lambda: ridgeline.gated_rms_norm(x, x[:2], w), ["(4, 6)", "(2, 6)"]),
    "gated_rms_norm: a short weight": (lambda: ridgeline.gated_rms_norm(x, x, w5), ["weight", "(6,)", "(5,)"]),
    "gated_rms_norm: integers": (lambda: ridgeline.gated_rms_norm(whole, x, w), ["x", "floating", "int32"]),
    "gated_rms_norm: two devices": (lambda: ridgeline.gated_rms_norm(x, away, w), ["gate", "meta", "cpu"]),
    "gated_rms_norm: no dimension": (
        lambda: ridgeline.gated_rms_norm(torch.tensor(1.0), torch.tensor(1.0), w),
        ["at least one dimension"],
    ),
    "gated_rms_norm: another activation": (
        lambda: ridgeline.gated_rms_norm(x, x, w, activation="gelu"),
        ["'silu' or 'sigmoid'", "'gelu'"],
    ),
    "gated_rms_norm: an order that is none": (
        lambda: ridgeline.gated_rms_norm(x, x, w, norm_before_gate=1),
        ["norm_before_gate", "True or False", "1"],
    ),
    "gated_rms_norm: groups that do not divide": (
        lambda: ridgeline.gated_rms_norm(x, x, w, group_size=4),
        ["group_size", "6 columns", "4"],
    ),
    "gated_rms_norm: a negative eps": (lambda: ridgeline.gated_rms_norm(x, x, w, -1.0), ["eps", "at least 0", "-1.0"]),
    "gelu: another approximation": (lambda: ridgeline.gelu(x, approximate="cubic"), ["cubic", "none", "tanh"]),
    "gelu: an integer tensor": (lambda: ridgeline.gelu(whole), ["int32", "float32"]),
    "gelu: no tensor": (lambda: ridgeline.gelu([1.0, 2.0]), ["list", "tensor"]),
    "gelu: another layout": (lambda: ridgeline.gelu(x.to_mkldnn()), ["mkldnn", "dense"]),
    "quick_gelu: an integer tensor": (lambda: ridgeline.quick_gelu(whole), ["int32", "float32"]),
    "gelu_mul: another approximation": (lambda: ridgeline.gelu_mul(x, x, "cubic"), ["cubic", "none", "tanh"]),
    "gelu_mul: an integer tensor": (lambda: ridgeline.gelu_mul(x, whole), ["up", "int32", "float32"]),
    "silu_mul: shapes that do not broadcast": (lambda: ridgeline.silu_mul(x, w5), ["(4, 6)", "(5,)"]),
    "silu_mul: an integer tensor": (lambda: ridgeline.silu_mul(whole, x), ["gate", "int32", "float32"]),
    "mul: two devices": (lambda: ridgeline.mul(x, away), ["cpu", "meta"]),
    "mul: no tensor": (lambda: ridgeline.mul(x, "2"), ["str", "tensor"]),
    "mul: shapes that do not broadcast": (lambda: ridgeline.mul(x, torch.ones(5)), ["(4, 6)", "(5,)"]),
    "softmax: a dim that is not there": (lambda: ridgeline.softmax(x, dim=2), ["2", "-2"]),
    "softmax: a dim that is no int": (lambda: ridgeline.softmax(x, dim=1.0), ["1.0", "-2"]),
    "softmax: an integer tensor": (lambda: ridgeline.softmax(whole), ["int32", "float32"]),
    "softmax: no tensor": (lambda: ridgeline.softmax(None), ["NoneType", "tensor"]),
    "softmax: a dtype that is none": (lambda: ridgeline.softmax(x, dtype=torch.int8), ["int8", "float32"]),
    "softmax: a dtype's name": (lambda: ridgeline.softmax(x, -1, "float32"), ["dtype", "'float32'", "torch.float32"]),
    "log_softmax: a dim that is not there": (lambda: ridgeline.log_softmax(x, dim=-3), ["-3", "-2"]),
    "matmul: inner sizes": (lambda: ridgeline.matmul(x, x), ["(4, 6)"]),
    "matmul: two dtypes": (lambda: ridgeline.matmul(x, half.T), ["float32", "float16"]),
    "matmul: two devices": (lambda: ridgeline.matmul(x, away.T), ["cpu", "meta"]),
    "matmul: no tensor": (lambda: ridgeline.matmul(x, 3), ["int", "tensor"]),
    "matmul: no numbers": (lambda: ridgeline.matmul(x > 0, x.T > 0), ["numbers", "bool"]),
    "sgemm: inner sizes": (lambda: ridgeline.sgemm(x, x), ["(M, K)", "(4, 6)"]),
    "sgemm: a vector": (lambda: ridgeline.sgemm(x, w), ["(K, N)", "(6,)"]),
    "sgemm: integers": (lambda: ridgeline.sgemm(whole, whole.T), ["floating", "int32"]),
    "sgemm: two dtypes": (lambda: ridgeline.sgemm(x, half.T), ["float32", "float16"]),
    "sgemm: two devices": (lambda: ridgeline.sgemm(x, away.T), ["cpu", "meta"]),
    "hgemm: a batch": (lambda: ridgeline.hgemm(image, x.T), ["(M, K)", str(tuple(image.shape))]),
    "hgemm: no tensor": (lambda: ridgeline.hgemm(x, 3), ["int", "tensor"]),
    "linear: inner sizes": (lambda: ridgeline.linear(x, torch.ones(3, 5)), ["(4, 6)", "(3, 5)"]),
    "linear: a long bias": (lambda: ridgeline.linear(x, square, torch.ones(7)), ["bias", "(6,)", "(7,)"]),
    "linear: another activation": (lambda: ridgeline.linear(x, square, activation="relu"), ["relu", "gelu", "silu"]),
    "linear: another residual": (lambda: ridgeline.linear(x, square, residual=x[:2]), ["residual", "(4, 6)", "(2, 6)"]),
    "linear: two dtypes": (lambda: ridgeline.linear(x, square, w.half()), ["bias", "float32", "float16"]),
    "linear: a buffer in columns": (
        lambda: ridgeline.linear(x, square, main_grad=torch.ones(6, 6).mT),
        ["main_grad", "contiguous", "(1, 6)"],
    ),
    "linear: a buffer in half precision": (
        lambda: ridgeline.linear(x, square, main_grad=square.half()),
        ["main_grad", "float32", "float16"],
    ),
    "linear: a buffer that is none": (lambda: ridgeline.linear(x, square, main_grad=1.0), ["main_grad", "float"]),
    "linear: no tensor": (lambda: ridgeline.linear(x, None), ["weight", "NoneType"]),
    "conv2d: another number of channels": (
        lambda: ridgeline.conv2d(photo, torch.ones(4, 5, 3, 3)),
        ["(2, 6, 5, 5)", "(4, 5, 3, 3)", "(K, C / groups, R, S)"],
    ),
    "conv2d: a window larger than the image": (
        lambda: ridgeline.conv2d(photo, torch.ones(4, 6, 7, 3)),
        ["one pixel", "(5, 5)", "(7, 3)"],
    ),
    "conv2d: no stride": (lambda: ridgeline.conv2d(photo, kernel3, stride=0), ["stride", "at least 1", "0"]),
    "conv2d: three paddings": (lambda: ridgeline.conv2d(photo, kernel3, padding=(1, 1, 1)), ["padding", "(1, 1, 1)"]),
    "conv2d: a fraction": (lambda: ridgeline.conv2d(photo, kernel3, dilation=1.5), ["dilation", "whole", "1.5"]),
    "conv2d: groups that do not divide": (lambda: ridgeline.conv2d(photo, kernel3, groups=4), ["groups=4"]),
    "conv2d: no groups": (lambda: ridgeline.conv2d(photo, kernel3, groups=0), ["groups", "0"]),
    "conv2d: a long bias": (lambda: ridgeline.conv2d(photo, kernel3, w5), ["bias", "(4,)", "(5,)"]),
    "conv2d: another activation": (
        lambda: ridgeline.conv2d(photo, kernel3, activation="tanh"),
        ["'tanh'", "'relu'", "None"],
    ),
    "conv2d: two dtypes": (lambda: ridgeline.conv2d(photo, kernel3.half()), ["weight", "float32", "float16"]),
    "conv2d: integers": (lambda: ridgeline.conv2d(photo.int(), kernel3.int()), ["int32", "floating"]),
    "conv2d: no tensor": (lambda: ridgeline.conv2d(photo, None), ["weight", "NoneType"]),
    "mlp: inner sizes": (lambda: ridgeline.mlp(x, square, torch.ones(3, 5)), ["(N, H)", "(4, 6)", "(3, 5)"]),
    "mlp: a long bias": (lambda: ridgeline.mlp(x, square, x, b1=w5), ["b1", "(6,)", "(5,)"]),
    "mlp: no activation": (lambda: ridgeline.mlp(x, square, x, activation=None), ["'relu'", "None"]),
    "mlp: two dtypes": (lambda: ridgeline.mlp(x, square, x.half()), ["w2", "float32", "float16"]),
    "mlp: no tensor": (lambda: ridgeline.mlp(x, square, [1.0]), ["w2", "list"]),
    "matmul: another sum": (
        lambda: ridgeline.matmul(x, square, accumulate="bfloat16"),
        ["accumulate", "'float16'", "'bfloat16'"],
    ),
    "matmul: float16 sums of float32": (
        lambda: ridgeline.matmul(x, square, accumulate="float16"),
        ["accumulate", "float16", "float32"],
    ),
    "gated_linear: two weights": (lambda: ridgeline.gated_linear(x, square, x), ["(6, 6)", "(4, 6)"]),
    "gated_linear: no activation": (lambda: ridgeline.gated_linear(x, square, square, activation=""), ["silu", "''"]),
    "sum_to: another size": (lambda: ridgeline.sum_to(x, (5, 6)), ["shape", "(4, 6)", "(5, 6)"]),
    "sum_to: more dimensions": (lambda: ridgeline.sum_to(x, (1, 4, 6)), ["broadcast", "(4, 6)", "(1, 4, 6)"]),
    "sum_to: a number": (lambda: ridgeline.sum_to(x, 6), ["sizes", "6"]),
    "sum_to: no tensor": (lambda: ridgeline.sum_to([1.0], ()), ["tensor", "list"]),
    "nms: boxes of three numbers": (lambda: ridgeline.nms(x[:, :3], w[:4], 0.5), ["boxes", "(N, 4)", "(4, 3)"]),
    "nms: a score too many": (lambda: ridgeline.nms(x[:, :4], w5, 0.5), ["scores", "(4,)", "(5,)"]),
    "nms: whole boxes": (lambda: ridgeline.nms(x[:, :4].int(), w[:4], 0.5), ["boxes", "floating", "int32"]),
    "nms: threshold": (lambda: ridgeline.nms(x[:, :4], w[:4], None), ["threshold", "number", "None"]),
    "nms: classes": (lambda: ridgeline.nms(x[:, :4], w[:4], 0.5, classes=w[:4]), ["classes", "int64", "float32"]),
    "transpose: one dimension": (lambda: ridgeline.transpose(w), ["two dimensions", "(6,)"]),
    "transpose: a dimension twice": (lambda: ridgeline.transpose(x, (0, 0)), ["dims", "2 dimensions", "(0, 0)"]),
    "transpose: too few dimensions": (lambda: ridgeline.transpose(x, (1,)), ["dims", "2 dimensions", "(1,)"]),
    "transpose: no tensor": (lambda: ridgeline.transpose([1.0]), ["list", "tensor"]),
    "transpose: another layout": (lambda: ridgeline.transpose(sparse), ["sparse", "dense"]),
    "copy: no tensor": (lambda: ridgeline.copy(3), ["int", "tensor"]),
    "upsample_nearest2d: three dimensions": (
        lambda: ridgeline.upsample_nearest2d(image, 2),
        ["(N, C, H, W)", "(2, 6, 3)"],
    ),
    "upsample_nearest2d: integers": (lambda: ridgeline.upsample_nearest2d(image[None].int(), 2), ["floating", "int32"]),
    "upsample_nearest2d: a scale of 0": (
        lambda: ridgeline.upsample_nearest2d(image[None], 0),
        ["scale_factor", "above 0", "0"],
    ),
    "upsample_nearest2d: three scales": (
        lambda: ridgeline.upsample_nearest2d(image[None], (2, 2, 2)),
        ["pair", "(2, 2, 2)"],
    ),
    "upsample_nearest2d: a scale that is none": (
        lambda: ridgeline.upsample_nearest2d(image[None], "2"),
        ["scale_factor", "'2'"],
    ),
    "upsample_nearest2d: a scale without end": (
        lambda: ridgeline.upsample_nearest2d(image[None], float("inf")),
        ["scale_factor", "inf"],
    ),
    "upsample_nearest2d: a scale beyond all pixels": (
        lambda: ridgeline.upsample_nearest2d(image[None], 1e300),
        ["scale_factor", "1e+300"],
    ),
    "upsample_nearest2d: a scale beyond all floats": (
        lambda: ridgeline.upsample_nearest2d(image[None], 10**400),
        ["scale_factor", "2^31"],
    ),
    "upsample_nearest2d: no pixel left": (lambda: ridgeline.upsample_nearest2d(image[None], 0.1), ["pixel", "0.1"]),
    "rms_norm: no dimension": (lambda: ridgeline.rms_norm(torch.ones(())), ["one dimension"]),
    "add_rms_norm: no weight": (lambda: ridgeline.add_rms_norm(x, x, None), ["weight", "NoneType"]),
    "add_rms_norm: another residual": (lambda: ridgeline.add_rms_norm(x, x[:2], w), ["residual", "(4, 6)", "(2, 6)"]),
    "add_layer_norm: another dtype": (lambda: ridgeline.add_layer_norm(x, half, w), ["residual", "float32", "float16"]),
    "add_layer_norm: a residual elsewhere": (lambda: ridgeline.add_layer_norm(x, away, w), ["residual", "cpu", "meta"]),
    "layer_norm: a long bias": (lambda: ridgeline.layer_norm(x, w, torch.ones(7)), ["bias", "(6,)", "(7,)"]),
    "rms_norm: a zero weight, memory_efficient": (
        lambda: ridgeline.rms_norm(x, zero, memory_efficient=True),
        ["memory_efficient", "zero"],
    ),
    "layer_norm: a zero weight, memory_efficient": (
        lambda: ridgeline.layer_norm(x, torch.nn.Parameter(zero), memory_efficient=True),
        ["memory_efficient", "zero"],
    ),
    "batch_norm: an integer tensor": (lambda: ridgeline.batch_norm(whole, training=True), ["int32", "floating"]),
    "batch_norm: no statistics": (lambda: ridgeline.batch_norm(image), ["training=True", "running_mean"]),
    "batch_norm: a short weight": (
        lambda: ridgeline.batch_norm(image, weight=w5, training=True),
        ["weight", "(6,)", "(5,)"],
    ),
    "batch_norm: add of another shape": (
        lambda: ridgeline.batch_norm(image, training=True, add=image[:1]),
        ["add", str(tuple(image.shape)), str(tuple(image[:1].shape))],
    ),
    "batch_norm: an activation": (
        lambda: ridgeline.batch_norm(image, training=True, activation="gelu"),
        ["activation", "'relu'", "'gelu'"],
    ),
    "group_norm: groups": (lambda: ridgeline.group_norm(image, 4), ["num_groups", "6", "4"]),
    "group_norm: an integer tensor": (lambda: ridgeline.group_norm(whole, 2), ["int32", "floating"]),
    "group_norm: a short weight": (lambda: ridgeline.group_norm(image, 2, w5), ["weight", "(6,)", "(5,)"]),
    "group_norm: an activation": (
        lambda: ridgeline.group_norm(image, 2, activation="relu"),
        ["activation", "'silu'", "'relu'"],
    ),
    "group_norm: a bias elsewhere": (lambda: ridgeline.group_norm(image, 2, w, waway), ["bias", "cpu", "meta"]),
    "reduce_sum: a dimension that is not there": (lambda: ridgeline.reduce_sum(x, 2), ["2", "-2 to 1"]),
    "reduce_sum: a dimension twice": (lambda: ridgeline.reduce_sum(x, (0, -2)), ["once", "(0, -2)"]),
    "reduce_sum: a dim that is no int": (lambda: ridgeline.reduce_sum(x, 1.0), ["1.0", "-2 to 1"]),
    "reduce_sum: a dtype's name": (lambda: ridgeline.reduce_sum(x, dtype="float32"), ["'float32'", "torch.float32"]),
    "reduce_sum: a dtype in keepdim's place": (
        lambda: ridgeline.reduce_sum(x, 0, torch.float32),
        ["keepdim", "torch.float32"],
    ),
    "reduce_sum: no tensor": (lambda: ridgeline.reduce_sum([1.0]), ["list", "tensor"]),
    "reduce_sum: sparse float64": (lambda: ridgeline.reduce_sum(sparse.double()), ["sparse", "dense"]),
    "reduce_sum: a float64 kernel": (
        lambda: ridgeline.reduce_sum(x.double(), impl="v0"),
        ["'v0'", "float32", "float64"],
    ),
    "dot: a matrix": (lambda: ridgeline.dot(x, x), ["vectors", "(4, 6)"]),
    "dot: two lengths": (lambda: ridgeline.dot(w, w5), ["(6,)", "(5,)"]),
    "dot: two dtypes": (lambda: ridgeline.dot(w, w.half()), ["float32", "float16"]),
    "dot: two devices": (lambda: ridgeline.dot(w, waway), ["cpu", "meta"]),
    "dot: integers": (lambda: ridgeline.dot(wint, wint), ["int32", "float32", "float16", "bfloat16"]),
    "dot: no tensor": (lambda: ridgeline.dot(w, 2.0), ["float", "tensor"]),
    "weighted_sum: a short weight": (lambda: ridgeline.weighted_sum(x, w5), ["(4, 6)", "(5,)"]),
    "weighted_sum: a weight elsewhere": (lambda: ridgeline.weighted_sum(x, waway), ["cpu", "meta"]),
    "weighted_sum: integers": (lambda: ridgeline.weighted_sum(x, wint), ["weight", "int32", "float32"]),
    "masked_softmax: a mask of floats": (lambda: ridgeline.masked_softmax(x, x), ["torch.bool", "float32"]),
    "masked_softmax: a mask that does not broadcast": (
        lambda: ridgeline.masked_softmax(x, yes[:, :5]),
        ["mask", "(4, 6)", "(4, 5)"],
    ),
    "masked_softmax: a mask that is larger": (
        lambda: ridgeline.masked_softmax(x[:1], yes),
        ["mask", "(1, 6)", "(4, 6)"],
    ),
    "masked_softmax: a mask elsewhere": (lambda: ridgeline.masked_softmax(x, yes.to("meta")), ["mask", "cpu", "meta"]),
    "masked_softmax: a bias that does not broadcast": (
        lambda: ridgeline.masked_softmax(x, yes, bias=w5),
        ["bias", "(4, 6)", "(5,)"],
    ),
    "masked_softmax: an integer tensor": (lambda: ridgeline.masked_softmax(whole, yes), ["int32", "floating"]),
    "masked_softmax: a scale that is none": (lambda: ridgeline.masked_softmax(x, yes, "1"), ["scale", "str"]),
    "masked_softmax: p above 1": (
        lambda: ridgeline.masked_softmax(x, yes, dropout_p=1.5),
        ["dropout_p", "1.5", "between 0 and 1"],
    ),
    "masked_softmax: p below 0": (
        lambda: ridgeline.masked_softmax(x, yes, dropout_p=-0.1),
        ["dropout_p", "-0.1", "between 0 and 1"],
    ),
    "masked_softmax: a seed that is none": (
        lambda: ridgeline.masked_softmax(x, yes, dropout_p=0.5, seed="7"),
        ["seed", "str"],
    ),
    "masked_softmax: a sparse mask": (lambda: ridgeline.masked_softmax(square, sparse.bool()), ["sparse", "dense"]),
    "dropout: p above 1": (lambda: ridgeline.dropout(x, 1.5), ["1.5", "0 to 1"]),
    "dropout: p below 0": (lambda: ridgeline.dropout(x, -0.5), ["-0.5", "0 to 1"]),
    "dropout: p that is none": (lambda: ridgeline.dropout(x, "0.5"), ["'0.5'", "0 to 1"]),
    "dropout: an integer tensor": (lambda: ridgeline.dropout(whole), ["int32", "floating"]),
    "dropout: a wide seed": (lambda: ridgeline.dropout(x, seed=1 << 63), ["seed", "64 bits"]),
    "dropout: seeds": (lambda: ridgeline.dropout(x, seed=labels), ["seed", "0-d", "(6,)"]),
    "rope: odd dimensions": (lambda: ridgeline.rope(odd, odd, table[:, :3], table[:, :3]), ["even", "7"]),
    "rope: too many pairs": (lambda: ridgeline.rope(q, q, torch.ones(5, 5), torch.ones(5, 5)), ["d/2", "8", "5"]),
    "rope: two lengths": (lambda: ridgeline.rope(q, q[:, :, :2], table, table), ["(1, 2, 3, 8)", "(1, 2, 2, 8)"]),
    "rope: cos and sin": (lambda: ridgeline.rope(q, q, table, table[:, :3]), ["(5, 4)", "(5, 3)"]),
    "rope: a long sequence": (lambda: ridgeline.rope(q, q, table[:2], table[:2]), ["2 positions", "3 long"]),
    "rope: a table elsewhere": (lambda: ridgeline.rope(q, q, table, table.to("meta")), ["sin", "cpu", "meta"]),
    "rope: integers": (lambda: ridgeline.rope(q, q, table.int(), table), ["cos", "int32"]),
    "rope: an angle's gradient": (lambda: ridgeline.rope(q, q, table.clone().requires_grad_(), table), ["detached"]),
    "rope: positions of another shape": (
        lambda: ridgeline.rope(q, q, table, table, positions=labels),
        ["positions", "(1, 3)", "(6,)"],
    ),
    "rope: positions out of range": (
        lambda: ridgeline.rope(q, q, table, table, positions=labels[:3] + 5),
        ["0 to 4", "5"],
    ),
    "bias_mask_scale_add: a short bias": (
        lambda: ridgeline.bias_mask_scale_add(x, torch.ones(1), yes, 1.0, x),
        ["bias", "(4, 6)", "(1,)"],
    ),
    "bias_mask_scale_add: a matrix as bias": (
        lambda: ridgeline.bias_mask_scale_add(x, x, yes, 1.0, x),
        ["bias", "(4, 6)"],
    ),
    "bias_mask_scale_add: a scale that is none": (
        lambda: ridgeline.bias_mask_scale_add(x, w, yes, "1", x),
        ["scale", "str"],
    ),
    "bias_mask_scale_add: a mask's gradient": (
        lambda: ridgeline.bias_mask_scale_add(x, w, x.clone().requires_grad_(), 1.0, x),
        ["mask", "detach"],
    ),
    "bias_mask_scale_add: a sparse mask": (
        lambda: ridgeline.bias_mask_scale_add(square, w, sparse.bool(), 1.0, square),
        ["sparse", "dense"],
    ),
    "bias_mask_scale_add: a mask of integers": (
        lambda: ridgeline.bias_mask_scale_add(x, w, whole, 1.0, x),
        ["mask", "boolean", "int32"],
    ),
    "index_add: no tensor": (lambda: ridgeline.index_add(x, 0, [0, 1], x), ["index", "list"]),
    "index_add: a dim that is not there": (lambda: ridgeline.index_add(x, 2, labels[:4], x), ["dim", "-2", "2"]),
    "index_add: an index of floats": (lambda: ridgeline.index_add(x, 0, w, x), ["index", "int64", "float32"]),
    "index_add: a matrix of indices": (lambda: ridgeline.index_add(x, 0, whole, x), ["vector", "(4, 6)"]),
    "index_add: another number of rows": (lambda: ridgeline.index_add(x, 0, labels, x), ["source", "6 rows", "(4, 6)"]),
    "index_add: two dtypes": (lambda: ridgeline.index_add(x, 1, labels, half), ["float32", "float16"]),
    "index_add: two devices": (lambda: ridgeline.index_add(x, 1, labels, away), ["source", "cpu", "meta"]),
    "index_add: an index out of range": (lambda: ridgeline.index_add(x, 1, labels + 6, x), ["0 to 5", "6"]),
    "index_add: a number": (lambda: ridgeline.index_add(torch.ones(()), 0, labels, w), ["x", "at least one dimension"]),
    "index_add: no rows": (lambda: ridgeline.index_add(x[:0], 0, labels, square), ["index", "empty", "6"]),
    "index_add: alpha": (lambda: ridgeline.index_add(x, 1, labels, x, alpha="2"), ["alpha", "str"]),
    "index_add: deterministic": (
        lambda: ridgeline.index_add(x, 1, labels, x, deterministic="no"),
        ["deterministic", "'no'"],
    ),
    "cumsum: a dim that is not there": (lambda: ridgeline.cumsum(x, 2), ["dim", "-2", "2"]),
    "cumsum: no tensor": (lambda: ridgeline.cumsum([1.0], 0), ["list", "tensor"]),
    "cumsum: a dtype's name": (lambda: ridgeline.cumsum(x, 0, "int32"), ["dtype", "'int32'", "torch.float32"]),
    "cumsum: complex numbers": (lambda: ridgeline.cumsum(x.to(torch.complex64), 0), ["complex64", "real"]),
    "histogram: no bins": (lambda: ridgeline.histogram(x, 0), ["bins", "0"]),
    "histogram: bins that are none": (lambda: ridgeline.histogram(x, 10.0), ["bins", "10.0"]),
    "histogram: a range from the end": (lambda: ridgeline.histogram(x, 10, (1.0, 0.0)), ["range", "(1.0, 0.0)"]),
    "histogram: a range beyond floats": (lambda: ridgeline.histogram(x, 4, (0, 10**400)), ["range", "finite"]),
    "histogram: booleans": (lambda: ridgeline.histogram(yes, 2), ["bool", "integers"]),
    "histogram: NaN without a range": (lambda: ridgeline.histogram(x / 0 - x / 0, 2), ["finite", "range"]),
    "radix_sort: a matrix": (lambda: ridgeline.radix_sort(x), ["keys", "(n,)", "(4, 6)"]),
    "radix_sort: booleans": (lambda: ridgeline.radix_sort(yes[0]), ["keys", "int32", "bool"]),
    "radix_sort: no tensor": (lambda: ridgeline.radix_sort([1.0]), ["keys", "list"]),
    "radix_sort: short values": (lambda: ridgeline.radix_sort(w, w5), ["values", "(6,)", "(5,)"]),
    "radix_sort: values of 2 bytes": (lambda: ridgeline.radix_sort(w, w.half()), ["4 or 8 bytes", "float16"]),
    "radix_sort: values elsewhere": (lambda: ridgeline.radix_sort(w, w.to("meta")), ["values", "cpu", "meta"]),
    "radix_sort: no values": (lambda: ridgeline.radix_sort(w, 1), ["values", "int"]),
    "radix_sort: descending": (lambda: ridgeline.radix_sort(w, descending=1), ["descending", "1"]),
    "binary_cross_entropy: shapes": (lambda: ridgeline.binary_cross_entropy(x, w), ["target", "(4, 6)", "(6,)"]),
    "binary_cross_entropy: no tensor": (lambda: ridgeline.binary_cross_entropy(x, 1.0), ["target", "float"]),
    "binary_cross_entropy: int16 targets": (
        lambda: ridgeline.binary_cross_entropy(x, x.short()),
        ["target", "floating", "uint8", "int16"],
    ),
    "binary_cross_entropy: elsewhere": (
        lambda: ridgeline.binary_cross_entropy(x, x.to("meta")),
        ["target", "cpu", "meta"],
    ),
    "binary_cross_entropy: a long weight": (
        lambda: ridgeline.binary_cross_entropy(x, x, pos_weight=w5),
        ["pos_weight", "broadcast", "(4, 6)", "(5,)"],
    ),
    "binary_cross_entropy: reduction": (
        lambda: ridgeline.binary_cross_entropy(x, x, reduction="batch"),
        ["reduction", "'batch'"],
    ),
    "cross_entropy: shapes": (lambda: ridgeline.cross_entropy(x, labels), ["(4, 6)", "(6,)"]),
    "linear_cross_entropy: inner sizes": (
        lambda: ridgeline.linear_cross_entropy(x, square[:, :5], labels[:4]),
        ["(..., H)", "(4, 6)", "(6, 5)"],
    ),
    "linear_cross_entropy: memory": (
        lambda: ridgeline.linear_cross_entropy(square, square, labels, chunk_memory=-1),
        ["chunk_memory", "bytes", "-1"],
    ),
    "attention: D": (
        lambda: ridgeline.attention(a[..., :12], b[..., :12], b[..., :12]),
        ["multiple of 8", "16", "256", "12"],
    ),
    "attention: a large D": (
        lambda: ridgeline.attention(*[torch.ones(1, 1, 2, 264)] * 3),
        ["multiple of 8", "256", "264"],
    ),
    "attention: heads": (lambda: ridgeline.attention(a[:, :3], b, b), ["multiple", "3", "2"]),
    "attention: two dtypes": (lambda: ridgeline.attention(a, b.half(), b), ["float32", "float16", "one"]),
    "attention: integers": (lambda: ridgeline.attention(a.int(), b.int(), b.int()), ["floating", "int32"]),
    "attention: 8 bits": (lambda: ridgeline.attention(*[t.to(E4M3) for t in (a, b, b)]), ["float8_e4m3fn", "bfloat16"]),
    "attention: no tensor beside two dtypes": (lambda: ridgeline.attention(a, b.half(), None), ["float16", "NoneType"]),
    "attention: causal as a tensor": (
        lambda: ridgeline.attention(a, b, b, causal=yes[0]),
        ["causal", "bottom_right", "tensor"],
    ),
    "attention: deterministic as a tensor": (
        lambda: ridgeline.attention(a, b, b, deterministic=yes[0]),
        ["deterministic", "tensor"],
    ),
    "attention: strides": (lambda: ridgeline.attention(a.mT.contiguous().mT, b, b), ["contiguous", "q", "5"]),
    "attention: shapes of k and v": (
        lambda: ridgeline.attention(a, b, b[:, :, 1:]),
        ["k", "v", "(1, 2, 7, 16)", "(1, 2, 6, 16)"],
    ),
    "attention: three dimensions": (
        lambda: ridgeline.attention(a[0], b[0], b[0]),
        ["(batch, heads, tokens, D)", "(4, 5, 16)"],
    ),
    "attention: no tensor": (lambda: ridgeline.attention(a, b, None), ["v", "tensor", "NoneType"]),
    "attention: a score_mod beside a mask": (
        lambda: ridgeline.attention(a, b, b, score_mod=3, mask=torch.ones(7)),
        ["mask", "score_mod"],
    ),
    "flex_attention: a score_mod of nothing": (
        lambda: ridgeline.flex_attention(a, b, b, score_mod=3),
        ["score_mod", "triton.jit", "3"],
    ),
    "flex_attention: a mask in memory": (
        lambda: ridgeline.flex_attention(a, b, b, block_mask=torch.ones(7)),
        ["block_mask", "ridgeline.block_mask", "Tensor"],
    ),
    "attention: two devices": (lambda: ridgeline.attention(a, b.to("meta"), b), ["cpu", "meta"]),
    "attention: a mask that does not broadcast": (
        lambda: ridgeline.attention(a, b, b, mask=torch.ones(5, 6)),
        ["mask", "(1, 4, 5, 7)", "(5, 6)"],
    ),
    "attention: a mask's gradient": (
        lambda: ridgeline.attention(a, b, b, mask=torch.ones(7, requires_grad=True)),
        ["mask", "detach"],
    ),
    "attention: a mask of integers": (lambda: ridgeline.attention(a, b, b, mask=labels[:1]), ["mask", "bool", "int64"]),
    "attention: a mask elsewhere": (
        lambda: ridgeline.attention(a, b, b, mask=torch.ones(7, device="meta")),
        ["mask", "cpu", "meta"],
    ),
    "attention: another word": (
        lambda: ridgeline.attention(a, b, b, causal="top_right"),
        ["causal", "bottom_right", "top_right"],
    ),
    "attention: a window": (lambda: ridgeline.attention(a, b, b, window=(3, -2)), ["window", "(3, -2)", "left"]),
    "attention: a window of one": (lambda: ridgeline.attention(a, b, b, window=3), ["window", "3", "left"]),
    "attention: a softcap of 0": (lambda: ridgeline.attention(a, b, b, softcap=0), ["softcap", "above 0"]),
    "attention: a scale that is none": (lambda: ridgeline.attention(a, b, b, scale="1"), ["scale", "'1'"]),
    "attention: deterministic": (lambda: ridgeline.attention(a, b, b, deterministic="yes"), ["deterministic", "yes"]),
    "attention: what torch has not": (
        lambda: ridgeline.attention(a, b, b, softcap=1.0, impl="torch"),
        ["impl='torch'", "softcap"],
    ),
    "attention: sinks of too many heads": (
        lambda: ridgeline.attention(a, b, b, sinks=torch.ones(7)),
        ["sinks", "each head", "(7,)"],
    ),
    "attention: sinks of integers": (
        lambda: ridgeline.attention(a, b, b, sinks=torch.ones(a.shape[1]).int()),
        ["sinks", "floating-point", "int32"],
    ),
    "attention: sinks that are no tensor": (
        lambda: ridgeline.attention(a, b, b, sinks=[0.0] * a.shape[1]),
        ["sinks", "tensor", "list"],
    ),
    "attention: sinks elsewhere": (
        lambda: ridgeline.attention(a, b, b, sinks=torch.ones(a.shape[1], device="meta")),
        ["sinks and q", "cpu", "meta"],
    ),
    "attention: sinks that torch has not": (
        lambda: ridgeline.attention(a, b, b, sinks=torch.ones(a.shape[1]), impl="torch"),
        ["impl='torch'", "sinks"],
    ),
    "attention: a prefix without causal": (
        lambda: ridgeline.attention(a, b, b, prefix=2),
        ["prefix", "causal=False", "window"],
    ),
    "attention: a prefix and a window": (
        lambda: ridgeline.attention(a, b, b, causal=True, window=(2, 0), prefix=2),
        ["prefix", "(2, 0)"],
    ),
    "attention: a prefix below 0": (lambda: ridgeline.attention(a, b, b, causal=True, prefix=-1), ["prefix", "-1"]),
    "attention: a window aligned nowhere": (
        lambda: ridgeline.attention(a, b, b, window=(2, 0), window_align="middle"),
        ["window_align", "top_left", "middle"],
    ),
    "attention: a window aligned against causal": (
        lambda: ridgeline.attention(a, b, b, causal=True, window=(2, 0), window_align="bottom_right"),
        ["agree", "True", "bottom_right"],
    ),
    "attention_varlen: sinks": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends, ends, sinks=torch.ones(9)),
        ["attention_varlen", "sinks", "(9,)"],
    ),
    "attention_varlen: a long dtype": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends.long(), ends),
        ["cu_seqlens_q", "int32", "int64"],
    ),
    "attention_varlen: a list": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends, [0, 5]),
        ["cu_seqlens_k", "int32", "list"],
    ),
    "attention_varlen: lengths": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends, ends[:2]),
        ["same length", "3", "2"],
    ),
    "attention_varlen: a matrix": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends[None], ends),
        ["(sequences + 1,)", "(1, 3)"],
    ),
    "attention_varlen: a short end": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends - 1, ends),
        ["rise from 0", "5"],
    ),
    "attention_varlen: backwards": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends, ends[[0, 2, 1]]),
        ["cu_seqlens_k", "rise", "5"],
    ),
    "attention_varlen: a longer sequence": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends, ends, max_seqlen_k=2),
        ["max_seqlen_k", "2", "longer"],
    ),
    "attention_varlen: four dimensions": (
        lambda: ridgeline.attention_varlen(a, b, b, ends, ends),
        ["(tokens, heads, D)", "(1, 4, 5, 16)"],
    ),
    "attention_varlen: a table without lengths": (
        lambda: ridgeline.attention_varlen(packed, keys, keys, ends, block_table=lengths[None]),
        ["block_table", "lengths"],
    ),
    "attention_varlen: lengths and cu_seqlens_k": (
        lambda: ridgeline.attention_varlen(packed, keys, keys, ends, ends, lengths=lengths),
        ["cu_seqlens_k", "lengths", "together"],
    ),
    "attention_varlen: lengths of int64": (
        lambda: ridgeline.attention_varlen(packed, keys, keys, ends, lengths=lengths.long()),
        ["lengths", "int32", "int64"],
    ),
    "attention_varlen: a length too few": (
        lambda: ridgeline.attention_varlen(packed, keys, keys, ends, lengths=lengths[:1]),
        ["cu_seqlens_q", "one element more", "3", "1"],
    ),
    "attention_varlen: packed keys with lengths": (
        lambda: ridgeline.attention_varlen(*[packed] * 3, ends, lengths=lengths),
        ["(B, S_max, Hkv, D)", "(5, 2, 16)"],
    ),
    "attention_varlen: two caches": (
        lambda: ridgeline.attention_varlen(packed, keys, keys[:, :8], ends, lengths=lengths),
        ["(2, 9, 2, 16)", "(2, 8, 2, 16)"],
    ),
    "attention_varlen: a longer sequence than the cache": (
        lambda: ridgeline.attention_varlen(packed, keys, keys, ends, lengths=lengths + 9),
        ["lengths", "9", "10"],
    ),
    "attention_varlen: blocks of 9": (
        lambda: ridgeline.attention_varlen(packed, keys, keys, ends, lengths=lengths, block_table=owned),
        ["multiple of 16", "9"],
    ),
    "attention_varlen: a block that is none": (
        lambda: ridgeline.attention_varlen(packed, blocks, blocks, ends, lengths=lengths, block_table=owned + 3),
        ["block_table", "0 to 2", "3"],
    ),
    "attention_varlen: a table of int64": (
        lambda: ridgeline.attention_varlen(packed, blocks, blocks, ends, lengths=lengths, block_table=owned.long()),
        ["block_table", "int32", "int64"],
    ),
    "attention_varlen: gradients of a cache": (
        lambda: ridgeline.attention_varlen(packed, keys.clone().requires_grad_(), keys, ends, lengths=lengths),
        ["no gradients", "k", "detach"],
    ),
    "gemv: inner sizes": (lambda: ridgeline.gemv(x, w5), ["(4, 6)", "(5,)"]),
    "gemv: many rows": (lambda: ridgeline.gemv(x, torch.ones(17, 6)), ["16", "17", "matmul"]),
    "gemv: two dtypes": (lambda: ridgeline.gemv(x, w.half()), ["float32", "float16"]),
    "gemv: integers": (lambda: ridgeline.gemv(x, wint), ["float32", "int32"]),
    "gemv: two devices": (lambda: ridgeline.gemv(x, waway), ["cpu", "meta"]),
    "gemv: no tensor": (lambda: ridgeline.gemv(x, 3), ["int", "tensor"]),
    "quantize_int8: integers": (lambda: ridgeline.quantize_int8(whole), ["int32", "float32"]),
    "quantize_int8: no tensor": (lambda: ridgeline.quantize_int8([1.0]), ["list", "tensor"]),
    "quantize_int8: another granularity": (
        lambda: ridgeline.quantize_int8(x, granularity="column"),
        ["column", '"row"', '"tensor"'],
    ),
    "quantize_int8: rows of a number": (
        lambda: ridgeline.quantize_int8(torch.ones(()), granularity="row"),
        ["rows", "'row'"],
    ),
    "quantize_int8: symmetric": (lambda: ridgeline.quantize_int8(x, symmetric=None), ["symmetric", "None"]),
    "quantize_fp8: 8 bits": (lambda: ridgeline.quantize_fp8(x.to(E4M3)), ["float8_e4m3fn", "float32"]),
    "quantize_fp8: another dtype": (
        lambda: ridgeline.quantize_fp8(x, dtype=torch.int8),
        ["int8", "float8_e4m3fn", "float8_e5m2"],
    ),
    "quantize_fp8: the transpose of a vector": (
        lambda: ridgeline.quantize_fp8(w, block="row", transpose=True),
        ["transpose", "matrix", "(6,)"],
    ),
    "quantize_fp8: a largest size for rows": (
        lambda: ridgeline.quantize_fp8(x, block="row", largest=torch.ones(())),
        ['block="tensor"', "'row'"],
    ),
    "quantize_fp8: a largest size each": (
        lambda: ridgeline.quantize_fp8(x, block="tensor", largest=w),
        ["largest", "float32 ()", "(6,)"],
    ),
    "quantize_fp8: a number": (lambda: ridgeline.quantize_fp8(x, block="tensor", largest=2.0), ["largest", "float"]),
    "fp8_linear: codes of rows": (
        lambda: ridgeline.fp8_linear(x, square, recipe="row", quantized=(square.to(E4M3), w)),
        ["'tensor'", "'block'", "rows of the transpose"],
    ),
    "fp8_linear: codes without scales": (
        lambda: ridgeline.fp8_linear(x, square, quantized=(square.to(E4M3),)),
        ["quantized", "(codes, scales)"],
    ),
    "fp8_linear: codes turned": (
        lambda: ridgeline.fp8_linear(x, square, quantized=(square.to(E4M3).mT, torch.ones(()))),
        ["codes", "contiguous", "(1, 6)"],
    ),
    "fp8_linear: a scale a row": (
        lambda: ridgeline.fp8_linear(x, square, quantized=(square.to(E4M3), torch.ones(6, 1))),
        ["scales", "'tensor'", "float32 ()", "(6, 1)"],
    ),
    "fp8_linear: inner sizes": (lambda: ridgeline.fp8_linear(x, torch.ones(3, 5)), ["(4, 6)", "(3, 5)"]),
    "fp8_linear: another recipe": (lambda: ridgeline.fp8_linear(x, square, recipe="mx"), ["'mx'", "'row'", "'block'"]),
    "fp8_linear: a long bias": (lambda: ridgeline.fp8_linear(x, square, torch.ones(7)), ["bias", "(6,)", "(7,)"]),
    "fp8_linear: integers": (lambda: ridgeline.fp8_linear(x, square.int()), ["weight", "int32", "bfloat16"]),
    "fp8_linear: codes": (lambda: ridgeline.fp8_linear(x.to(E4M3), square), ["float8_e4m3fn", "float32"]),
    "fp8_linear: two devices": (lambda: ridgeline.fp8_linear(x, square.to("meta")), ["cpu", "meta"]),
    "fp8_linear: no tensor": (lambda: ridgeline.fp8_linear(x, None), ["weight", "NoneType"]),
    "fp8_linear: a buffer in bfloat16": (
        lambda: ridgeline.fp8_linear(x, square.clone().requires_grad_(), main_grad=square.bfloat16()),
        ["main_grad", "float32", "bfloat16"],
    ),
    "quantize_fp8: another block": (
        lambda: ridgeline.quantize_fp8(x, block=(1, 64)),
        ["(1, 64)", "(1, 128)", "(128, 128)"],
    ),
    "quantize_fp8: a block that is none": (lambda: ridgeline.quantize_fp8(x, block=128), ["128", "(1, 128)"]),
    "quantize_fp8: squares of a vector": (lambda: ridgeline.quantize_fp8(w, block=(128, 128)), ["matrix", "(6,)"]),
    "dequantize: floats": (lambda: ridgeline.dequantize(x, w), ["int8", "float8_e4m3fn", "float32"]),
    "dequantize: a tuple of one": (lambda: ridgeline.dequantize((codes,)), ["(q, scale)", "1"]),
    "dequantize: no scale": (lambda: ridgeline.dequantize(codes), ["scale", "NoneType"]),
    "dequantize: a scale's shape": (lambda: ridgeline.dequantize(codes, w5), ["(5,)", "(4, 6)"]),
    "dequantize: a scale's dtype": (
        lambda: ridgeline.dequantize(codes, torch.ones(4, 1).half()),
        ["float32", "float16"],
    ),
    "dequantize: a zero of e4m3": (lambda: ridgeline.dequantize(codes.to(E4M3), w[:1], wint[:1]), ["zero", "int8"]),
    "dequantize: a dtype": (lambda: ridgeline.dequantize(codes, w[:1], dtype=torch.int8), ["dtype", "int8", "float32"]),
    "int8_matmul: floats": (lambda: ridgeline.int8_matmul(x, square, w[:1], w[:1]), ["int8", "float32"]),
    "int8_matmul: inner sizes": (lambda: ridgeline.int8_matmul(codes, codes, w[:1], w[:1]), ["(M, K)", "(4, 6)"]),
    "int8_matmul: a row's scale": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w5, w[:1]),
        ["scale_a", "(4, 1)", "(5,)"],
    ),
    "int8_matmul: a column's scale": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w[:1], w[:4, None]),
        ["scale_b", "(1, 4)", "(4, 1)"],
    ),
    "int8_matmul: a scale's dtype": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w[:1].half(), w[:1]),
        ["scale_a", "float32", "float16"],
    ),
    "int8_matmul: zeros": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w[:1], w[:1], zero_a=w[:4]),
        ["zero_a", "int32", "float32"],
    ),
    "int8_matmul: a bias": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w[:1], w[:1], bias=w5),
        ["bias", "(4,)", "(5,)"],
    ),
    "int8_matmul: a result's dtype": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w[:1], w[:1], out_dtype=torch.int32),
        ["int32", "float16"],
    ),
    "int8_matmul: float64 of float32": (
        lambda: ridgeline.int8_matmul(codes, codes.T, w[:1], w[:1], out_dtype=torch.float64),
        ["float64", "float32"],
    ),
    "int8_matmul: a long K": (
        lambda: ridgeline.int8_matmul(codes[:, :1].expand(4, 65537), codes[:1, :1].expand(65537, 1), w[:1], w[:1]),
        ["65536", "65537"],
    ),
    "fp8_matmul: floats": (lambda: ridgeline.fp8_matmul(x, square, w[:1], w[:1]), ["float8_e4m3fn", "float32"]),
    "fp8_matmul: inner sizes": (
        lambda: ridgeline.fp8_matmul(*[codes.to(E4M3)] * 2, w[:1], w[:1]),
        ["(K, N)", "(4, 6)"],
    ),
    "fp8_matmul: scales": (
        lambda: ridgeline.fp8_matmul(codes.to(E4M3), codes.T.to(E4M3), w5, w[:1]),
        ["(4, 1)", "(1, 4)", "(5,)"],
    ),
    "fp8_matmul: blocks of columns": (
        lambda: ridgeline.fp8_matmul(codes.to(E4M3), codes.T.to(E4M3), w[:4, None], torch.ones(2, 1)),
        ["(4, 1)", "(1, 1)", "(2, 1)"],
    ),
    "fp8_matmul: a scale elsewhere": (
        lambda: ridgeline.fp8_matmul(codes.to(E4M3), codes.T.to(E4M3), waway[:1], w[:1]),
        ["scale_a", "meta"],
    ),
    "quantize_int4: a group that does not divide K": (
        lambda: ridgeline.quantize_int4(torch.ones(4, 96)),
        ["group", "128", "96"],
    ),
    "quantize_int4: integers": (lambda: ridgeline.quantize_int4(whole), ["int32", "float"]),
    "int4_linear: another K": (
        lambda: ridgeline.int4_linear(x, torch.zeros(3, 4).byte(), torch.ones(3, 1)),
        ["(..., 8)", "(4, 6)"],
    ),
    "int4_linear: groups that do not divide K": (
        lambda: ridgeline.int4_linear(x, torch.zeros(3, 3).byte(), torch.ones(3, 4)),
        ["group", "K = 6", "(3, 4)"],
    ),
    "int4_linear: zeros of float32": (
        lambda: ridgeline.int4_linear(x, torch.zeros(3, 3).byte(), torch.ones(3, 1), torch.ones(3, 1)),
        ["zero", "uint8", "float32"],
    ),
    "sparsify: K is no multiple of 4": (lambda: ridgeline.sparsify(x), ["(N, K)", "multiple of 4", "(4, 6)"]),
    "sparsify: integers": (lambda: ridgeline.sparsify(whole), ["floating", "int32"]),
    "sparsify: no tensor": (lambda: ridgeline.sparsify([1.0]), ["w", "list"]),
    "densify: metadata of another weight": (
        lambda: ridgeline.densify(x, torch.zeros(2, 4, 8).byte()),
        ["metadata", "(1, 4, 8)", "(2, 4, 8)"],
    ),
    "densify: metadata of int32": (lambda: ridgeline.densify(x, torch.zeros(1, 4, 8).int()), ["uint8", "int32"]),
    "sparse_matmul: another K": (
        lambda: ridgeline.sparse_matmul(x, torch.ones(3, 4), torch.zeros(1, 3, 8).byte()),
        ["(..., 8)", "(4, 6)"],
    ),
    "sparse_matmul: another dtype": (
        lambda: ridgeline.sparse_matmul(x.half(), torch.ones(3, 4), torch.zeros(1, 3, 8).byte()),
        ["one", "float16", "float32"],
    ),
    "sparse_matmul: a long bias": (
        lambda: ridgeline.sparse_matmul(
            torch.ones(2, 8), torch.ones(3, 4), torch.zeros(1, 3, 8).byte(), bias=torch.ones(4)
        ),
        ["bias", "(3,)", "(4,)"],
    ),
    "block_sparse_matmul: blocks of 8": (
        lambda: ridgeline.block_sparse_matmul(torch.ones(2, 16), torch.ones(1, 8, 8), at[:2], at[:1]),
        ["16, 32, 64 or 128", "(1, 8, 8)"],
    ),
    "block_sparse_matmul: another K": (
        lambda: ridgeline.block_sparse_matmul(torch.ones(2, 24), torch.ones(1, 16, 16), at[:2], at[:1]),
        ["multiple", "16", "24"],
    ),
    "block_sparse_matmul: starts that fall": (
        lambda: ridgeline.block_sparse_matmul(
            torch.ones(2, 16), torch.ones(1, 16, 16), torch.tensor([0, 1, 0]), torch.tensor([0])
        ),
        ["starts", "0 to at most 1", "[0, 1, 0]"],
    ),
    "block_sparse_matmul: a column too far": (
        lambda: ridgeline.block_sparse_matmul(
            torch.ones(2, 16), torch.ones(1, 16, 16), torch.tensor([0, 1]), torch.tensor([1])
        ),
        ["columns", "0 to 0", "1 to 1"],
    ),
    "block_sparse_matmul: float starts": (
        lambda: ridgeline.block_sparse_matmul(torch.ones(2, 16), torch.ones(1, 16, 16), w[:2], torch.tensor([0])),
        ["starts", "int32", "float32"],
    ),
    "int8_sparse_matmul: floats": (
        lambda: ridgeline.int8_sparse_matmul(x, torch.ones(3, 4), torch.zeros(1, 3, 8).byte(), w[:1], w[:1]),
        ["int8", "float32"],
    ),
    "int8_sparse_matmul: scales of another size": (
        lambda: ridgeline.int8_sparse_matmul(
            torch.ones(2, 8).char(), torch.ones(3, 4).char(), torch.zeros(1, 3, 8).byte(), w[:1], w[:2]
        ),
        ["scale_w", "3 rows", "(2,)"],
    ),
    "mxfp4_linear: K is no multiple of 32": (
        lambda: ridgeline.mxfp4_linear(x, torch.zeros(3, 3).byte(), torch.zeros(3, 1).byte()),
        ["(N, K / 32)", "(3, 3)"],
    ),
    "mxfp4_linear: float scales": (
        lambda: ridgeline.mxfp4_linear(x, torch.zeros(3, 3).byte(), torch.ones(3, 1)),
        ["scale", "uint8", "float32"],
    ),
    "w4a8_linear: codes without their scale": (
        lambda: ridgeline.w4a8_linear(x.to(E4M3), torch.zeros(3, 3).byte(), torch.ones(3, 1)),
        ["x_scale", "float8_e4m3fn"],
    ),
    "w4a8_linear: a gradient": (
        lambda: ridgeline.w4a8_linear(x.clone().requires_grad_(), torch.zeros(3, 3).byte(), torch.ones(3, 1)),
        ["no gradients", "x"],
    ),
    "w4a8_linear: scales of x": (
        lambda: ridgeline.w4a8_linear(x.to(E4M3), torch.zeros(3, 3).byte(), torch.ones(3, 1), x_scale=torch.ones(3)),
        ["x_scale", "(4,)", "(3,)"],
    ),
    "int8_linear: another dtype": (lambda: ridgeline.int8_linear(x, square, w), ["q", "int8", "float32"]),
    "int8_linear: scales": (lambda: ridgeline.int8_linear(x, codes, w), ["scale", "(4,)", "(6,)"]),
    "decode_attention: lengths of int64": (
        lambda: ridgeline.decode_attention(step, keys, keys, lengths.long()),
        ["lengths", "int32", "int64"],
    ),
    "decode_attention: heads": (
        lambda: ridgeline.decode_attention(step[:, :, :3], keys, keys, lengths),
        ["multiple", "3", "2"],
    ),
    "decode_attention: a longer sequence than the cache": (
        lambda: ridgeline.decode_attention(step, keys, keys, lengths + 9),
        ["lengths", "9", "10"],
    ),
    "decode_attention: a sparse cache": (
        lambda: ridgeline.decode_attention(step, keys.to_sparse(), keys, lengths),
        ["sparse", "dense"],
    ),
    "decode_attention: an 8-bit cache of odd strides": (
        lambda: ridgeline.decode_attention(step, *[odd_cache] * 2, lengths),
        ["k_cache", "even", "17"],
    ),
    "mla_decode: lengths of int64": (
        lambda: ridgeline.mla_decode(
            torch.ones(2, 1, 4, 48), torch.ones(2, 8, 48), torch.ones(2).long(), latent=32, scale=1.0
        ),
        ["lengths", "int32", "int64"],
    ),
    "mla_decode: a cache of another width": (
        lambda: ridgeline.mla_decode(
            torch.ones(2, 1, 4, 48), torch.ones(2, 8, 40), torch.ones(2).int(), latent=32, scale=1.0
        ),
        ["cache", "(2, S_max, 48)", "(2, 8, 40)"],
    ),
    "sample: integers": (lambda: ridgeline.sample(whole), ["logits", "floating-point", "int32"]),
    "sample: a vector": (lambda: ridgeline.sample(w), ["(B, V)", "(6,)"]),
    "sample: a sparse tensor": (lambda: ridgeline.sample(sparse), ["sparse", "dense"]),
    "sample: a mask of numbers": (lambda: ridgeline.sample(x, mask=x), ["mask", "bool", "float32"]),
    "sample: another mask": (lambda: ridgeline.sample(x, mask=yes[:2]), ["mask", "(4, 6)", "(2, 6)"]),
    "sample: a mask elsewhere": (lambda: ridgeline.sample(x, mask=away > 0), ["mask", "cpu", "meta"]),
    "sample: a negative temperature": (
        lambda: ridgeline.sample(x, temperature=-1.0),
        ["temperature", "from 0", "-1.0"],
    ),
    "sample: no temperature": (lambda: ridgeline.sample(x, temperature=None), ["temperature", "None"]),
    "sample: a top_k of 0": (lambda: ridgeline.sample(x, top_k=0), ["top_k", "from 1", "0"]),
    "sample: a broken top_k": (lambda: ridgeline.sample(x, top_k=2.5), ["top_k", "int", "2.5"]),
    "sample: a top_k in floats": (lambda: ridgeline.sample(x, top_k=w5[:4]), ["top_k", "whole", "float32"]),
    "sample: a top_p above 1": (lambda: ridgeline.sample(x, top_p=1.5), ["top_p", "to 1", "1.5"]),
    "sample: a top_p for other rows": (lambda: ridgeline.sample(x, top_p=w), ["top_p", "(4,)", "(6,)"]),
    "sample: a min_p elsewhere": (lambda: ridgeline.sample(x, min_p=away[:, 0]), ["min_p", "cpu", "meta"]),
    "sample: a seed in int32": (lambda: ridgeline.sample(x, seed=whole[0, 0]), ["seed", "int64", "int32"]),
    "sample: an offset that is none": (lambda: ridgeline.sample(x, offset=1.0), ["offset", "int", "1.0"]),
    "concat_kv: another width": (
        lambda: ridgeline.concat_kv(cache, cache, new[..., :3], new[..., :3], at),
        ["(2, 5, 3, 4)", "(2, 2, 3, 3)"],
    ),
    "concat_kv: another v": (
        lambda: ridgeline.concat_kv(cache, cache, new, new[:, :1], at),
        ["(2, 2, 3, 4)", "(2, 1, 3, 4)"],
    ),
    "concat_kv: numbers": (
        lambda: ridgeline.concat_kv(cache, cache, new[0, 0, 0, 0], new[0, 0, 0, 0], at),
        ["(B, S, H, D)", "k ()"],
    ),
    "concat_kv: more rows than the cache has": (
        lambda: ridgeline.concat_kv(new, new, cache, cache, at),
        ["at most", "2 rows", "have 5"],
    ),
    "concat_kv: two dtypes": (
        lambda: ridgeline.concat_kv(cache, cache, new, new.half(), at),
        ["v", "float32", "float16"],
    ),
    "concat_kv: a cache elsewhere": (
        lambda: ridgeline.concat_kv(cache, cache.to("meta"), new, new, at),
        ["cache_v", "cpu", "meta"],
    ),
    "concat_kv: an expanded cache": (
        lambda: ridgeline.concat_kv(cache, cache[:1].expand(2, 5, 3, 4), new, new, at),
        ["cache_v", "expanded"],
    ),
    "concat_kv: positions of floats": (
        lambda: ridgeline.concat_kv(cache, cache, new, new, at.float()),
        ["positions", "int32", "float32"],
    ),
    "concat_kv: positions of another shape": (
        lambda: ridgeline.concat_kv(cache, cache, new, new, at[:1]),
        ["positions", "(2,)", "(1,)"],
    ),
    "concat_kv: sparse positions": (
        lambda: ridgeline.concat_kv(cache, cache, new, new, at.to_sparse()),
        ["sparse", "dense"],
    ),
    "concat_kv: a row too far": (lambda: ridgeline.concat_kv(cache, cache, new, new, at + 4), ["0 to 3", "4"]),
    "concat_kv: a row before": (lambda: ridgeline.concat_kv(cache, cache, new, new, at - 1), ["0 to 3", "-1"]),
    "concat_kv: a gradient": (
        lambda: ridgeline.concat_kv(cache, cache, new, new.clone().requires_grad_(), at),
        ["gradients", "v", "detached"],
    ),
    "concat_kv: no tensor": (lambda: ridgeline.concat_kv(cache, cache, new, None, at), ["v", "NoneType"]),
    "repeat_kv: three dimensions": (lambda: ridgeline.repeat_kv(image, 2), ["(B, H, S, D)", "(2, 6, 3)"]),
    "repeat_kv: no copies": (lambda: ridgeline.repeat_kv(cache, 0), ["n", "at least 1", "0"]),
    "repeat_kv: copies that are no number": (lambda: ridgeline.repeat_kv(cache, 2.0), ["n", "2.0"]),
    "repeat_kv: lengths of another shape": (
        lambda: ridgeline.repeat_kv(cache, 2, lengths=labels),
        ["lengths", "(2,)", "(6,)"],
    ),
    "repeat_kv: a length too far": (lambda: ridgeline.repeat_kv(cache, 2, lengths=at + 4), ["0 to 3", "4"]),
    "repeat_kv: no tensor": (lambda: ridgeline.repeat_kv(None, 2), ["x", "NoneType"]),
    "adamw: a moment's shape": (lambda: ridgeline.adamw(x, x, x, x[:2], 1), ["(4, 6)", "(2, 6)"]),
    "adamw: a negative eps": (lambda: ridgeline.adamw(x, x, x, x, 1, eps=-1.0), ["eps", "-1.0"]),
    "clip_grad_norm: a negative norm": (lambda: ridgeline.clip_grad_norm([x], -1), ["max_norm", "-1"]),
    "clip_grad_norm: sparse": (lambda: ridgeline.clip_grad_norm([sparse], 1), ["sparse"]),
}


def _norm(name: str, weight: torch.Tensor, **options: object) -> object:
    return getattr(ridgeline, name)(*(x, x)[: 2 if name.startswith("add") else 1], weight, **options)


for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"):
    BAD |= {
        f"{name}: a short weight": (partial(_norm, name, w5), ["weight", "(6,)", "(5,)"]),
        f"{name}: a broadcast weight": (partial(_norm, name, w[:1]), ["weight", "(6,)", "(1,)"]),
        f"{name}: a weight elsewhere": (partial(_norm, name, waway), ["weight", "cpu", "meta"]),
        f"{name}: integer weights": (partial(_norm, name, wint), ["weight", "int32", "float32"]),
    }
    for eps in (*(() if name == "rms_norm" else (None,)), "a", -1, -1e-5, float("nan")):
        BAD[f"{name}: eps {eps!r}"] = partial(_norm, name, w, eps=eps), ["eps", "at least 0", repr(eps)]
for name in ("rms_norm", "add_rms_norm"):
    for offset in ("1", None, float("nan"), float("inf")):
        BAD[f"{name}: offset {offset!r}"] = partial(_norm, name, w, offset=offset), ["offset", "finite", repr(offset)]
    for rounding in ("twice", None, 1):
        said = ["rounding", "'once' or 'llama'", repr(rounding)]
        BAD[f"{name}: rounding {rounding!r}"] = partial(_norm, name, w, rounding=rounding), said
BAD["rms_norm: an offset without a weight"] = partial(ridgeline.rms_norm, x, offset=1.0), ["offset=1.0", "None"]
for eps in (None, "a", -1, float("nan")):
    BAD[f"group_norm: eps {eps!r}"] = partial(ridgeline.group_norm, image, 2, eps=eps), ["eps", "at least 0", repr(eps)]
for name, args in {
    "rms_norm": (sparse, w),
    "layer_norm": (sparse, w, w),
    "add_rms_norm": (square, sparse, w),
    "add_layer_norm": (square, sparse, w),
    "gelu": (sparse,),
    "gelu_mul": (sparse, square),
    "quick_gelu": (sparse.to_sparse_csr(),),
    "silu_mul": (square, sparse),
    "mul": (sparse, square),
    "bias_mask_scale_add": (square, w, square, 1.0, sparse),
    "rope": (q.to_sparse(), q, table, table),
    "softmax": (sparse,),
    "log_softmax": (sparse,),
    "cross_entropy": (sparse, labels),
    "binary_cross_entropy": (square, sparse),
    "linear_cross_entropy": (square, sparse, labels),
    "masked_softmax": (sparse, torch.ones(6, dtype=torch.bool)),
    "dropout": (sparse,),
    "reduce_sum": (sparse,),
    "sum_to": (sparse, (6,)),
    "dot": (w.to_sparse(), w),
    "weighted_sum": (sparse, w),
    "batch_norm": (sparse, w, w),
    "mlp": (square, sparse, square),
    "group_norm": (sparse, 2),
    "sparsify": (sparse,),
    "densify": (sparse, torch.zeros(1, 4, 8).byte()),
    "block_sparse_matmul": (sparse, square[None], at, at),
    "sparse_matmul": (sparse, square, torch.zeros(1, 4, 8).byte()),
    "matmul": (sparse, sparse),
    "sgemm": (square, sparse),
    "hgemm": (sparse, square),
    "linear": (square, sparse),
    "gated_linear": (sparse, square, square),
    "gemv": (sparse, w),
    "quantize_int8": (sparse,),
    "quantize_fp8": (sparse,),
    "dequantize": (sparse.to(torch.int8), w[:1]),
    "int8_matmul": (sparse.to(torch.int8), square.to(torch.int8), w[:1], w[:1]),
    "concat_kv": (cache, cache.to_sparse(), new, new, at),
    "repeat_kv": (cache.to_sparse(), 2),
    "adamw": (square, sparse, square, square, 1),
    "attention": (a, b.to_sparse(), b),
    "attention_varlen": (packed.to_sparse(), packed, packed, ends, ends),
}.items():
    BAD[f"{name}: a sparse tensor"] = partial(getattr(ridgeline, name), *args), ["sparse", "dense"]
nested = torch.nested.nested_tensor([x, x[:2]])
for name, args in {
    "matmul": (nested, x.T),
    "sgemm": (nested, x.T),
    "linear": (x, nested),
    "gated_linear": (x, square, nested),
    "gemv": (nested, w),
    "quantize_int8": (nested,),
    "quantize_fp8": (nested,),
    "dequantize": (nested, w[:1]),
    "int8_matmul": (codes, nested, w[:1], w[:1]),
    "fp8_matmul": (nested, nested, w[:1], w[:1]),
    "attention": (nested, b, b),
}.items():
    BAD[f"{name}: a nested tensor"] = partial(getattr(ridgeline, name), *args), ["nested", "dense", "to_padded_tensor"]


@pytest.mark.parametrize("name", BAD)
def test_is_refused(name: str) -> None:
    call, named = BAD[name]
    given = (x, w, square, cache, new) if registry()[name.split(":")[0]].mutates else ()
    before = [t.clone() for t in given]
    with pytest.raises(RidgelineError) as error:
        call()
    assert all(torch.equal(now, was) for now, was in zip(given, before, strict=True)), "something was written"
    said = str(error.value)
    assert said.startswith(name.split(":")[0]), said
    assert "\n" not in said
    assert not [word for word in named if word not in said], said


def test_every_op_refuses_something() -> None:
    assert {name.split(":")[0] for name in BAD} == set(registry())


@pytest.mark.parametrize("name", registry())
def test_unknown_implementation(name: str) -> None:
    op = registry()[name]
    args, kwargs = op.cases[0].make("float32")
    with pytest.raises(RidgelineError, match="no implementation 'nowhere'; it has ") as error:
        op.function(*args, **kwargs, impl="nowhere")
    assert all(impl in str(error.value) for impl in op.implementations)


@pytest.mark.parametrize("name", registry())
def test_an_implementation_that_this_machine_cannot_run(name: str) -> None:
    """On CPU tensors CUDA C++ cannot run anywhere, nor Triton outside the interpreter: if named, each says why."""
    op = registry()[name]
    args, kwargs = op.cases[0].make("float32")
    for impl in [i for i in op.implementations.values() if i.is_kernel]:
        with pytest.raises(RidgelineError, match=f"{name}: impl='{impl.name}' cannot run this call: .*GPU"):
            impl(*args, **kwargs)


@pytest.mark.parametrize("scale", [3, 1.5, (2, 3)])
def test_packs_of_twice_refuse_other_scales(scale: object) -> None:
    with device.pretend("sm_90"), pytest.raises(RidgelineError) as error:
        ridgeline.upsample_nearest2d(torch.empty(1, 2, 4, 8, device="meta"), scale, impl="cuda_packed")
    pair = scale if isinstance(scale, tuple) else (scale, scale)
    said = "upsample_nearest2d: impl='cuda_packed' cannot run this call: "
    said += "it makes images twice as high and wide, but scale_factor is "
    assert str(error.value) in (said + str(pair), said + str(tuple(map(float, pair))))


def test_a_name_that_is_no_op() -> None:
    with pytest.raises(AttributeError, match=r"no 'nowhere'; its ops are .*gelu") as raised:
        ridgeline.nowhere  # noqa: B018
    assert "RidgelineError" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_without_an_eps_takes_torchs(dtype: torch.dtype) -> None:
    small = (torch.arange(24.0).view(4, 6) / 2**14).to(dtype)
    torch.testing.assert_close(
        ridgeline.rms_norm(small, w.to(dtype), None), torch.nn.functional.rms_norm(small, (6,), w.to(dtype))
    )


def test_a_zero_weight_is_no_matter_without_gradients() -> None:
    with torch.no_grad():
        assert torch.equal(ridgeline.rms_norm(x, zero, memory_efficient=True), ridgeline.rms_norm(x, zero))


def test_autocast_mends_no_dtype() -> None:
    """Integers and complex numbers are refused under autocast too, which casts only floating-point numbers."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RidgelineError, match="int32"):
            ridgeline.attention(a.int(), b.int(), b.int())
        with pytest.raises(RidgelineError, match="complex64"):
            ridgeline.gemv(x, w.to(torch.complex64))
