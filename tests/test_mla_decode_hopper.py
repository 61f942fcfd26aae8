"""mla_decode's Gluon kernel, run as Python (warps.py): finds deadlocks and places given back too early.

Gluon's compilation, `cut_columns` and `fetch` are not covered; appending and the combination of parts are models here.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import ridgeline
from ridgeline import device
from ridgeline.boundary import Launch, observe
from ridgeline.cuda import TensorMap
from ridgeline.lab.analysis import inspect as lab_inspect
from ridgeline.op import RidgelineError
from ridgeline.ops.decode import _latent_gluon, _latent_hopper
from ridgeline.ops.decode.mla_decode import reference
from ridgeline.tiles import warpgroup
from test_kernels import OWN
from test_matmul import said_of
from warps import Barrier, Pointer, Shared, Turns, define, language, nbytes, registers

SCALE = 192**-0.5


class Place(Pointer):
    """A pointer that knows its dtype."""

    def __init__(self, t: torch.Tensor, at: Any = 0):
        super().__init__(t, at)
        self.dtype = SimpleNamespace(element_ty=t.dtype)

    def __add__(self, more: Any) -> "Place":
        return Place(self.t, self.at + more)


def names_of(turns: Turns, launch: Launch, program: int) -> dict[str, Any]:
    """The names that the kernel's source uses."""
    names = language(turns)
    define(names, warpgroup, _latent_hopper)
    facts = ("ROWS", "BN", "HALF", "LATENT", "ROPE", "PIECES", "NO_KEYS")
    names |= {n: getattr(_latent_hopper, n).value for n in facts} | {"FAR": TensorMap.FAR}

    def load(source: Any, at: list[int], ready: Barrier, tile: Shared) -> None:
        rows, columns = source.block_shape[-2:]
        tile.held.fill_(0)
        at = [int(n) for n in at]
        if len(at) == 5:  # a sequence, which ends at its length
            far, end, b, last, column = at
            assert far == TensorMap.FAR
            t, first = source.base[0, b, :end], last - far + end
        else:
            b, first, column = at
            t = source.base[b]
        here = t[first : first + rows, column : column + columns]
        tile.held.view(rows, columns)[: len(here)] = here
        turns.until(lambda: True)
        ready.come(0, -nbytes(source))

    def store(to: Place, x: torch.Tensor, mask: torch.Tensor) -> None:
        at, x, mask = torch.broadcast_tensors(to.at, torch.as_tensor(x), mask)
        to.t[at[mask]] = x[mask].to(to.t.dtype)

    def where(c: Any, x: Any, y: Any) -> Any:
        return torch.where(torch.as_tensor(c), x, y)

    gl = names["gl"]
    gl.program_id, gl.num_programs = lambda _: program, lambda _: launch.grid[0]
    gl.load, gl.store, gl.where = lambda of: of.t[of.at], store, where
    names |= {
        "load": load,
        "uniform": int,
        "fetch": lambda *_: None,
        "barrier": lambda: None,
        "sums_layout": lambda _: None,
        "operand_layout": lambda _: None,
        "column_chunks": lambda x, count: x.chunk(count, 1),
        "cut_columns": lambda s, last: registers(s.masked_fill(torch.arange(64) > last[:, None], -torch.inf)),
    }
    return names


def run(launch: Launch, program: int, dice: random.Random) -> None:
    """Runs one program."""
    turns = Turns(dice)
    names, (results, maps, lengths, sizes) = names_of(turns, launch, program), launch.args
    results = _latent_hopper.Results(*(None if t is None else Place(t) for t in results))
    for desc in maps:
        if desc is not None and not isinstance(desc, torch.Tensor):
            desc.block_type = SimpleNamespace(shape=desc.block_shape, nbytes=nbytes(desc))

    def tiles(count: int, columns: int) -> Shared:
        return Shared(torch.full((count, 64, columns), float("nan"), dtype=results.o.t.dtype))

    def rows() -> Shared:
        return Shared(torch.full((2, 64), float("nan")))

    def barriers(count: int, arrivals: int) -> Shared:
        return Shared([Barrier(arrivals) for _ in range(count)])

    room = _latent_hopper.Room(
        tiles(2, 256), tiles(1, 64), tiles(4, 256), tiles(2, 64), rows(), rows(), barriers(1, 1), barriers(6, 1),
        barriers(6, 1), barriers(2, 1), barriers(1, 2),
    )  # fmt: skip
    work = names["share_out"](Pointer(lengths), sizes, launch.constants["APPENDED"], launch.constants["FIXED"])
    works = [lambda g=g: names["consumer"](g, results, room, work, sizes) for g in range(2)]
    turns.run([*works, lambda: names["producer"](maps, room, work, sizes, False, 2)])


def combined(launch: Launch, B: int, S: int, H: int) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of all parts, as `combine` makes them."""
    results, _, _, sizes = launch.args
    rows, parts = S * H, sizes.parts
    count = B * parts * rows
    tops = results.pieces[count * 512 : count * 513].view(B, parts, rows)
    sums = results.pieces[count * 513 :].view(B, parts, rows).nan_to_num(0)  # parts that do not exist write nothing
    values = results.pieces[: count * 512].view(B, parts, rows, 512).nan_to_num(0)
    most = tops.nan_to_num(-torch.inf, neginf=-torch.inf).amax(1, keepdim=True)
    weights = (tops - most.clamp(min=-1e30)).exp2().nan_to_num(0)
    whole = (weights * sums).sum(1)
    o = (weights[..., None] * values).sum(1) / whole.clamp(min=1e-30)[..., None]
    lse = torch.where(whole > 0, (most[:, 0] + whole.log2()) * 0.6931471805599453, -torch.inf)
    return o.view(B, S, H, 512), lse.view(B, S, H).transpose(1, 2)


CALLS: list[tuple[tuple[int, int, int, int], list[int], bool, bool]] = [  # (B, S, heads, capacity), lengths
    ((3, 1, 64, 200), [200, 64, 1], False, False),
    ((4, 1, 128, 400), [399, 0, -1, 129], True, False),
    ((2, 2, 64, 130), [130, 63], False, False),
    ((3, 3, 40, 192), [192, 191, 128], True, False),
    ((3, 2, 64, 200), [200, 199, 190], True, False),
    ((2, 1, 64, 700), [700, 65], True, True),
    ((2, 1, 64, 700), [513, 256], False, True),
]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("size", "held", "new", "invariant"), CALLS, ids=str)
def test_every_row(
    size: tuple[int, ...], held: list[int], new: bool, invariant: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks o and lse over memory that is NaN where no token lies."""
    (B, S, H, capacity), dice = size, random.Random(parts)
    torch.manual_seed(parts)
    parts = _latent_gluon.parts_of(132, B, capacity, True) if invariant else parts
    monkeypatch.setattr(_latent_gluon, "parts_of", lambda *_: parts)
    q, cache = torch.randn(B, S, H, 576).half(), torch.randn(B, capacity, 576).half()
    kv = torch.randn(B, S, 576).half() if new else None
    lengths = torch.tensor(held, dtype=torch.int32)
    cache[torch.arange(capacity) >= lengths[:, None]] = float("nan")
    given = {"kv": kv, "scale": SCALE, "return_lse": True}
    expected = reference(q, cache.clone(), lengths, **given)
    launched: list[Launch] = []
    with device.pretend("sm_90"), observe(launched.append):
        o, lse = ridgeline.mla_decode(q, cache, lengths, impl="gluon", invariant=invariant, **given)
    (launch,) = [one for one in launched if one.kernel is _latent_hopper.attend]
    for t in launch.args[0]:
        if t is not None:
            t.fill_(float("nan"))
    if kv is not None:
        for b, n in enumerate(held):
            if n >= 0:
                cache[b, n : n + S] = kv[b, : max(0, min(S, capacity - n))]
    for program in range(launch.grid[0]):
        run(launch, program, dice)
    if launch.args[0].pieces is not None:
        o, lse = combined(launch, B, S, H)
    torch.testing.assert_close(o.float(), expected[0].float(), atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=1e-3)


@pytest.mark.compiles
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("batch", [128, 32])
def test_products_are_not_serialized(batch: int, new: bool, tmp_path: Any) -> None:
    """ptxas must not report that it serialises products; group 1's products run beside its exponentials."""
    launched: list[Launch] = []
    q, cache, kv = (torch.empty(batch, n, 576, dtype=torch.bfloat16, device="meta") for n in (128, 8192, 1))
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    with device.pretend("sm_90"), observe(launched.append):
        ridgeline.mla_decode(q[:, None], cache, lengths, kv=kv if new else None, scale=SCALE, impl="gluon")
    (launch,) = [one for one in launched if one.kernel is _latent_hopper.attend]
    found = lab_inspect.of_launch(launch, True)
    assert found.shared <= 227 << 10
    assert triton.__version__ != OWN or found.spill_loads == found.spill_stores == 0
    assert "C75" not in said_of(found, tmp_path)
    assert "serial" not in said_of(found, tmp_path)


def test_what_it_refuses() -> None:
    """Calls that only Triton takes name the reason, and automatic choice goes there."""
    q, cache = torch.zeros(2, 1, 64, 576).half(), torch.zeros(2, 64, 576).half()
    lengths = torch.ones(2, dtype=torch.int32)
    table, angles = torch.zeros(2, 2, dtype=torch.int32), torch.ones(99, 32).half()
    bad: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "a contiguous cache": (q, cache, {"block_table": table}),
        "already rotated": (q, cache, {"cos": angles, "sin": angles}),
        "of q's dtype": (q, cache.to(torch.float8_e4m3fn), {}),
        "scale must be above 0": (q, cache, {"scale": -1.0}),
        "64 for rotation": (q[..., :544], cache[..., :544], {}),
        "the heads of a query": (q.view(2, 32, 2, 576).transpose(1, 2), cache, {}),
    }
    with device.pretend("sm_90"):
        for words, (some, tokens, given) in bad.items():
            with pytest.raises(RidgelineError, match=words):
                ridgeline.mla_decode(some, tokens, lengths, **({"scale": SCALE, "impl": "gluon"} | given))
