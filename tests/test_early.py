"""Programmatic dependent launch of CUDA C++: which kernels start early, and that they wait before they write.

Results must be right in streams and captured graphs, right after kernels that write the inputs.
"""

import re
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

import ridgeline
from graphs import captured
from ridgeline.boundary import Launch, early, launch, observe
from ridgeline.cuda import CudaError, CudaKernel
from ridgeline.device import gpu, pretend
from ridgeline.lab.analysis import inspect
from ridgeline.op import Implementation, RidgelineError, registry
from ridgeline.ops.movement import _radix_sort

FILE = Path(__file__).with_name("early.cu")
FIRST, SECOND = CudaKernel(FILE, "early_first", "Pi"), CudaKernel(FILE, "early_second", "PPP")
CUDA = [
    pytest.param(i, id=f"{o.name}-{i.name}")
    for o in registry().values()
    for i in o.implementations.values()
    if i.kind == "cuda"
]


def chains(implementation: Implementation, arch: str) -> Iterator[list[Launch]]:
    """Returns what each call of the op's cases starts, in order."""
    o = implementation.op
    for case in o.cases:
        for dtype in case.dtypes:
            try:
                found = inspect.launches(o, implementation, case, dtype, arch)
            except RidgelineError:
                continue
            for _, some in groupby(found, lambda one: one[0]):
                yield [launch for _, launch in some]


@pytest.mark.parametrize("implementation", CUDA)
def test_who_is_early(implementation: Implementation) -> None:
    """No kernel is early below sm_90, and on it only kernels after one of the same call that triggers them."""
    for started in chains(implementation, "sm_80"):
        assert not any([one.constants.get("PDL") or one.constants.get("launch_pdl") for one in started])
    for started in chains(implementation, "sm_90"):
        assert not started[0].constants.get("launch_pdl"), (
            f"{started[0].kernel} would not wait for what wrote its inputs"
        )
        for before, one in pairwise(started):
            if one.constants.get("launch_pdl"):
                assert one.constants["PDL"]
                assert before.constants["PDL"], f"{one.kernel} follows none that lets it come"


def test_early_is_off_below_hopper() -> None:
    for arch, expected in (
        ("sm_80", {"PDL": False}),
        ("sm_90", {"PDL": True, "launch_pdl": True}),
        ("gfx942", {"PDL": False}),
    ):
        with pretend(arch) as device:
            assert early(device) == expected


EARLY = {"dot": "cuda", "reduce_sum": "cuda_best", "index_add": "cuda", "cumsum": "cuda", "radix_sort": "cuda"}
WRITES = re.compile(r"\b(?:st|red|atom)\.[\w.:]*global")
READS = re.compile(r"\bld\.[\w.:]*global")
AHEAD = (
    "index_add_sorted",
    "radix_counts",
)  # before they wait, they read the op's inputs or what is written before the trigger


@pytest.mark.compiles
@pytest.mark.parametrize("name", EARLY)
def test_early_kernels_wait_before_they_write(name: str) -> None:
    """Checks the order of the PTX, in which a loop's body comes once. Without PDL there is no trigger and no wait."""
    seen = set()
    for started in chains(registry()[name].implementations[EARLY[name]], "sm_90"):
        for one in started:
            if not one.constants.get("launch_pdl") or one.kernel.name in seen:
                continue
            seen.add(one.kernel.name)
            ptx = body(one.kernel.compile("sm_90", one.constants).ptx, one.kernel.name)
            wait = ptx.find("griddepcontrol.wait")
            written, read = WRITES.search(ptx), READS.search(ptx)
            assert written, f"{one.kernel} writes nothing"
            assert 0 < wait < written.start(), f"{one.kernel} writes before it waits"
            assert one.kernel.name in AHEAD or not read or wait < read.start(), f"{one.kernel} reads before it waits"
            plain = one.kernel.compile("sm_90", one.constants | {"PDL": False})
            assert "griddepcontrol" not in body(plain.ptx, one.kernel.name)
    assert seen, f"no kernel of {name} is early"


@pytest.mark.compiles
def test_what_is_read_before_the_wait_lies_in_l2() -> None:
    """In index_add's copy a block stores, fences, synchronises its threads, and only then triggers the next kernel.

    That kernel reads past the multiprocessor's own caches."""
    names, found = (
        ["index_add_copy", "index_add_sorted"],
        chains(registry()["index_add"].implementations["cuda"], "sm_90"),
    )
    pairs = [some for some in found if [one.kernel.name for one in some] == names]
    assert pairs
    for pair in pairs:
        first, second = (body(one.kernel.compile("sm_90", one.constants).ptx, one.kernel.name) for one in pair)
        places = [
            first.rfind(what) for what in ("st.global", "membar.gl", "bar.sync", "griddepcontrol.launch_dependents")
        ]
        assert -1 < places[0] < places[1] < places[2] < places[3], places
        before = second[: second.index("griddepcontrol.wait")]
        looks = re.findall(r"ld\.global\.cg\S*v4", before)  # at a row's first index, and at each that is added
        assert len(looks) == 1 + pair[1].constants["BATCH"]


def body(ptx: str, name: str) -> str:
    return ptx.split(f".entry {name}(")[1].split(".entry ")[0]


@pytest.mark.compiles
def test_no_early_kernel_compiles_below_hopper() -> None:
    assert "griddepcontrol" not in SECOND.compile("sm_80", {"PDL": False, "WAITS": 1}).ptx
    with pytest.raises(CudaError, match="PDL is for sm_90 and later"):
        SECOND.compile("sm_80", {"PDL": True, "WAITS": 1})


@pytest.fixture
def hopper() -> None:
    if gpu(torch.cuda.current_device()).capability < 90:
        pytest.skip("needs sm_90 or later")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("graph", [False, True])
def test_the_second_kernel_starts_early_and_waits(graph: bool) -> None:
    """A kernel that does not wait reads old values: so the two do overlap, and the wait makes the result right."""
    made, given = torch.empty(32, dtype=torch.int32, device="cuda"), torch.arange(32, dtype=torch.int32, device="cuda")

    def work(waits: int) -> torch.Tensor:
        made.fill_(-100)
        total = torch.empty_like(made)
        launch(FIRST, (1,), made, 7, block=32, WAITS=waits, PDL=True)
        launch(SECOND, (1,), total, made, given, block=32, WAITS=waits, **early(gpu(0)))
        return total

    for waits, there in ((1, 7), (0, -100)):
        run = captured(lambda waits=waits: work(waits)) if graph else lambda waits=waits: work(waits)
        run()  # compiling here would come too late
        for _ in range(3):
            assert torch.equal(run(), given + there)
            torch.cuda.synchronize()  # the first may still run if the second did not wait


N = 1 << 24
KEYS = _radix_sort.EARLY.start


def ops() -> dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]:
    """Returns by name calls on a vector x of integers from -8 to 8, and their results.

    The rows of index_add are among the last, which its copy writes last, and differ for each x, so that an earlier
    call's sorting is no help."""

    def index(x: torch.Tensor) -> torch.Tensor:
        return N - 1 - (torch.arange(1000, device="cuda") * 7 + x[:1000].long() * 11 + 88) % 997

    return {
        "dot": (lambda x: ridgeline.dot(x, x, impl="cuda"), lambda x: (x.double() * x.double()).sum().float()),
        "reduce_sum": (lambda x: ridgeline.reduce_sum(x, impl="cuda_best"), lambda x: x.double().sum().float()),
        "cumsum": (lambda x: ridgeline.cumsum(x, 0, impl="cuda"), lambda x: x.double().cumsum(0).float()),
        "radix_sort": (lambda x: ridgeline.radix_sort(x[:KEYS], impl="cuda")[0], lambda x: x[:KEYS].sort().values),
        "index_add": (
            lambda x: ridgeline.index_add(x, 0, index(x), x[:1000], impl="cuda"),
            lambda x: torch.index_add(x.double(), 0, index(x), x[:1000].double()).float(),
        ),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", EARLY)
def test_right_after_kernels_that_write_the_inputs(name: str, graph: bool) -> None:
    """With integers every order of additions gives the same bits; in a stream of its own or a graph, several times."""
    started: list[Launch] = []
    run, expected = ops()[name]
    with observe(lambda one: started.append(one)):
        run(torch.ones(N, device="cuda"))
    assert any([one.constants.get("launch_pdl") for one in started]), "nothing starts early"
    data = [torch.randint(-8, 9, (N,), device="cuda").float() for _ in range(4)]
    given = torch.empty_like(data[0])
    source = torch.empty_like(given)

    def work() -> torch.Tensor:
        given.copy_(source)
        y = run(given)
        given.zero_()  # it waits for both of the op's kernels
        return y

    stream = torch.cuda.Stream()
    replay = captured(work) if graph else work
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for x in data:
            source.copy_(x)
            assert torch.equal(replay(), expected(x))
