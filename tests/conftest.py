"""Decides which tests run where.

Triton chooses between compiling and interpreting when it is imported, so a pytest process does one of the two.
With TRITON_INTERPRET=1 the tests marked `kernels` run in the interpreter; without it, all others run.
On a GPU the tests marked `kernels` run there, without the interpreter, together with those marked `gpu`.
In each test torch draws the same numbers in every run and order; SEED=7 in the environment draws others.
"""

import os
import zlib
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
GPU = torch.cuda.is_available() and not INTERPRETED
SEED = int(os.environ.get("SEED", 0))
torch.backends.cudnn.allow_tf32 = False  # products of float32 are full ones, as matmul's are by default


@pytest.fixture(scope="session")
def device() -> str:
    """Returns the device of a test's tensors: "cuda" if there is a GPU and Triton compiles, else "cpu"."""
    return "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def dice(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + SEED)


@pytest.fixture
def roomy() -> None:
    """Frees memory for a test of tensors with more than 2^31 elements, or skips the test."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of the GPU's memory")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="test_kernels: compile all kernels of large ops, not one of each kind",
    )
    parser.addoption(
        "--remember-kernels",
        action="store_true",
        help="test_kernels: compile what has changed, and write kernels_that_fit.txt",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sorts the digests that processes added to kernels_that_fit.txt, and drops those of tests that are gone."""
    path = Path(__file__).with_name("kernels_that_fit.txt")
    if session.config.getoption("remember_kernels") and not hasattr(session.config, "workerinput") and path.exists():
        from test_kernels import names

        known = dict(line.split() for line in path.read_text().splitlines())
        there = names()
        known = {test: digest for test, digest in known.items() if test in there}
        path.write_text("".join(f"{test} {digest}\n" for test, digest in sorted(known.items())))


def pytest_report_header() -> str:
    if INTERPRETED:
        return "ridgeline: kernels in Triton's interpreter; only tests marked `kernels`"
    if GPU:
        return f"ridgeline: kernels on {torch.cuda.get_device_name()}"
    return "ridgeline: no GPU; tests marked `kernels` are left to a run with TRITON_INTERPRET=1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items:
        kernels = item.get_closest_marker("kernels") is not None
        if item.get_closest_marker("gpu"):
            if INTERPRETED:
                left_out.append(item)
            elif not GPU:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif kernels != INTERPRETED and not (kernels and GPU):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
