"""What Gluon kernels for Hopper share: the copy engine's names in all versions of Triton, and arrays of barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load: gl.constexpr = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store: gl.constexpr = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier: gl.constexpr = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def make_barriers(SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Makes SIZE barriers in shared memory, each for COUNT arrivals. A fence must follow before they are used."""
    made = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SIZE):
        mbarrier.init(made.index(n), count=COUNT)
    return made
