"""Activations of float32 values and their slopes, shared by gelu, the gated units and capped scores."""

import triton
import triton.language as tl

from ridgeline.tiles.online_softmax import exact_exp, rounded_exp


@triton.jit
def _shares(x, dtype: tl.constexpr, EQUAL: tl.constexpr = False):
    """sigmoid(x) and sigmoid(-x); for float32 data without subtraction or bias, which sums of many terms would show.

    EQUAL: many x are one number, such as a limit."""
    if dtype == tl.float32:
        e = rounded_exp(-tl.abs(x)) if EQUAL else exact_exp(-tl.abs(x), dtype)
        near = tl.div_rn(1.0, 1 + e)
        p, q = tl.where(x < 0, e * near, near), tl.where(x < 0, near, e * near)
    else:
        p = tl.sigmoid(x)
        q = 1 - p
    return p, q


@triton.jit
def quick_sigmoid(x):
    """sigmoid(x) in four instructions, not Triton's dozen: accurate enough for 16-bit results, on NVIDIA GPUs only."""
    code: tl.constexpr = "{.reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e;}"
    return tl.inline_asm_elementwise(code, "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def silu(x, dtype: tl.constexpr = None):
    """x sigmoid(x). dtype, here and below: the data's, if float32 must be accurate to the last bit."""
    p, _ = _shares(x, dtype)
    return x * p


@triton.jit
def silu_slope(x, dtype: tl.constexpr = None, EQUAL: tl.constexpr = False):
    """x sigmoid(x), and its derivative."""
    p, q = _shares(x, dtype, EQUAL)
    return x * p, p * (1 + x * q)


@triton.jit
def sigmoid_slope(x, dtype: tl.constexpr = None, EQUAL: tl.constexpr = False):
    """sigmoid(x), and its derivative."""
    p, q = _shares(x, dtype, EQUAL)
    return p, p * q


@triton.jit
def gelu_tanh(x, dtype: tl.constexpr = None):
    """x/2 (1 + tanh z) as x sigmoid(2z), which needs one exponential."""
    p, _ = _shares(1.5957691216057308 * (x + 0.044715 * x * x * x), dtype)
    return x * p


@triton.jit
def gelu_tanh_slope(x, dtype: tl.constexpr = None):
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    e = exact_exp(-tl.abs(u), dtype)  # -|u| avoids overflow, and cancellation in 1 - sigmoid(u)
    p = tl.div_rn(1.0, 1 + e) if dtype == tl.float32 else 1 / (1 + e)
    share = tl.where(u > 0, p, e * p)
    return x * share, share + x * e * p * p * (1.5957691216057308 + 0.2140644488177927 * x * x)


@triton.jit
def normal(x, dtype: tl.constexpr = None):
    """P(Z <= x), and exp(-x^2/2).

    The tail beyond |x| is exp(-x^2/2) times a polynomial in t = 1 / (1 + |x|/4), fitted by weighted least squares to a
    relative error of 2e-8. That takes fewer instructions than erf, and backward needs the exponential anyway.
    """
    if dtype == tl.float32:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476), exact_exp(x * x * -0.5, dtype)
    t = 1 / (1 + 0.25 * tl.abs(x))
    e = tl.exp2(x * x * -0.7213475204444817)
    p = ((-0.09486207038 * t + 0.3564981441) * t - 0.2948817643) * t + 0.3085374243
    tail = (((p * t + 0.009996267251) * t + 0.1163705473) * t + 0.09834144025) * t * e
    return tl.where(x > 0, 1 - tail, tail), e


@triton.jit
def gelu(x, dtype: tl.constexpr = None):
    p, _ = normal(x, dtype)
    return x * p


@triton.jit
def gelu_slope(x, dtype: tl.constexpr = None):
    p, e = normal(x, dtype)
    return x * p, p + x * 0.3989422804014327 * e


@triton.jit
def capped(x, cap, CAP: tl.constexpr):
    """cap tanh(x / cap) and its slope. Near 0, where 1 - exp would cancel, tanh is a polynomial, fitted to 4e-9."""
    slope = 1.0
    if CAP:
        share = 1.0 / cap
        # The rounding error of 1 / cap, which would shift all of a row's scores one way.
        low = share * tl.fma(-cap, share, 1.0)
        u = tl.where(tl.abs(x) == float("inf"), x, tl.fma(x, share, x * low))
        e = tl.exp2(tl.abs(u) * -2.8853900817779268)
        z = u * u
        near = (
            (((-0.00663104431 * z + 0.021320804) * z - 0.0539113669) * z + 0.133331241) * z - 0.333333321
        ) * z * u + u
        far = (1 - e) / (1 + e)
        x = cap * tl.where(z < 0.25, near, tl.where(u < 0, -far, far))
        slope = 4 * e / ((1 + e) * (1 + e))
    return x, slope
