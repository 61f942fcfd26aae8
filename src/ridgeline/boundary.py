"""The only way to the GPU: `kernel_op` registers a launcher with torch, `launch` starts a kernel.

A launcher is a function of tensors that allocates its outputs and calls `launch`. Launchers also run under tracing,
where `launch` does nothing, so output shapes cannot depend on tuning, pointers or device values. Therefore `launch`
takes grids and configurations as functions, and a `TensorMap` for a tensor descriptor; it evaluates them at the start.

The work of a launcher depends only on the kind of call: shapes, strides, dtypes, device, alignment and options.
`replay.py` records the second call of a kind and repeats its allocations and starts for later ones: host time falls to
about a third.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Number
from typing import Any

import torch
import triton
from torch.autograd import forward_ad
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline import device as devices
from ridgeline import flops, tuning
from ridgeline.codegen import Before, Loose, interceptions
from ridgeline.cuda import (
    SWIZZLES,
    Arranged,
    CudaKernel,
    Starter,
    TensorMap,
    View,
    driver_library,
    parameter_layout,
    parameters,
)
from ridgeline.op import OWN, RidgelineError, dense_only, dtensor
from ridgeline.replay import Plans, Start, inner, recorder

LIBRARY = torch.library.Library("ridgeline", "DEF")
INTERPRETED = bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    from ridgeline import interpreting

    interpreting.quicken()


class _Trace(threading.local):
    on = False


_trace = _Trace()
_observers: list[Callable[[Launch], None]] = []
launchers: dict[str, Callable[..., Any]] = {}  # by the registered op's name, for accounts of what they allocate
called: dict[str, Callable[..., Any]] = {}  # what `kernel_op` returned, for those who may not import the op's module


def kernel_op(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers a launcher as `torch.ops.ridgeline.<name>`, for real tensors and as the fake kernel of traced ones.

    schema: as in `torch.library`, e.g. "gelu_fwd(Tensor x, str approximate, str? impl) -> Tensor". A `SymInt` is a
        32-bit number that the launcher passes to kernels unchanged, and that they do not specialise on
        (`do_not_specialize`).
    Returns the function for an `autograd.Function` to call. It goes through the registered op if PyTorch traces,
    transforms or intercepts the call; otherwise it calls the launcher directly and saves the dispatcher's time.
    """
    name = schema.split("(")[0]
    leading = len(re.findall(r"Tensor\b", schema.split("->")[0]))  # tensors come first in a schema
    loose = [n for n, argument in enumerate(schema.split("->")[0].split(",")) if "SymInt" in argument]

    def register(launcher: Callable[..., Any]) -> Any:
        def fake(*args: Any) -> Any:
            _trace.on = devices.stand_in is None  # with a pretended GPU, meta tensors must reach `launch`
            try:
                return launcher(*args)
            finally:
                _trace.on = False

        launchers[name] = launcher
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ridgeline::{name}", fake, lib=LIBRARY)
        flops.register(name)
        registered = getattr(torch.ops.ridgeline, name).default
        inner[registered] = launcher
        names = {
            "registered": registered,
            "through": _through(registered, name.rpartition("_")[0]),
            "own": OWN,
            "observers": _observers,
            "devices": devices,
            "compiling": torch.compiler.is_compiling,
            "forward": forward_ad,
            "no_tangents": _no_tangents,
            "dense_only": dense_only,
            "op": name.rpartition("_")[0],
            "modes": torch._C._len_torch_dispatch_stack,
            "transforms": torch._C._are_functorch_transforms_active,
        }
        # A sparse tensor has no pointer and raises on its own: checking only then costs valid calls nothing.
        failed = "dense_only(op, [{tensors}])"
        plans, count = Plans(launcher, leading, loose), len(registered._schema.arguments)
        called[name] = plans.front(count, interceptions(leading), names, failed)
        return called[name]

    return register


def repeated(launcher: Callable[..., Any], leading: int, count: int) -> Callable[..., Any]:
    """Returns a function of a launcher's `count` arguments, of which the first `leading` are tensors, that repeats its
    work by kind of call. It is for launchers of other libraries, whose callers hand calls to torch that it intercepts.
    """
    seen = "seen = observers or devices.stand_in is not None or tuning.current_listener is not None"
    names = {"observers": _observers, "devices": devices}
    return Plans(launcher, leading).front(count, Before([seen], ["if seen: return launcher({args})"]), names)


def _through(registered: Any, op: str) -> Callable[..., Any]:
    """Returns the registered op, for calls that torch intercepts: active FLOP counters learn its formula first, and a
    DTensor gives one sentence instead of torch's error about sharding strategies."""

    def call(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active() and torch.is_grad_enabled() and any(map(_tracked, args)):
            raise RidgelineError(_TRANSFORMED)  # such as vmap inside grad: the outer tensors say nothing of gradients
        flops.tell(registered.overloadpacket)
        try:
            return registered(*args)
        except (NotImplementedError, RuntimeError) as error:
            if any(map(dtensor, args)):
                advice = (
                    "give local shards (x.to_local()), call ridgeline.parallel.sharding.enable() first, or shard the "
                    "module with FSDP2, whose forward has plain tensors"
                )
                raise RidgelineError(
                    f"{op}: a tensor is a DTensor, and kernels take plain tensors; {advice}"
                ) from error
            raise

    return call


def differentiate(function: Any, *args: Any) -> Any:
    """Returns `function.apply(*args)` of an `autograd.Function`, without the wrapper that only functorch needs."""
    if torch.compiler.is_compiling():
        return function.apply(*args)
    if forward_ad._current_level >= 0:
        _no_tangents(*args)
    if torch._C._are_functorch_transforms_active():
        raise RidgelineError(_TRANSFORMED)
    return function.quick_apply(*args)


_TRANSFORMED = (
    "Ridgeline's kernels cannot be differentiated inside torch.func's transforms; use impl='torch' or 'naive'"
)


def _tracked(value: Any) -> bool:
    """Returns whether a gradient is wanted of a tensor, or of one that torch.func's transforms have wrapped in it."""
    functorch = torch._C._functorch
    while isinstance(value, torch.Tensor) and not value.requires_grad:
        if not (functorch.is_batchedtensor(value) or functorch.is_gradtrackingtensor(value)):
            return False
        value = functorch.get_unwrapped(value)
    return isinstance(value, torch.Tensor)


def written(*tensors: torch.Tensor | None) -> None:
    """Tells autograd that a kernel wrote to tensors: what saved them earlier then raises in backward."""
    if not torch.compiler.is_compiling():
        torch._C._increment_version([t for t in tensors if t is not None])  # as autograd.graph.increment_version


bumped: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version  # as `written`, where nothing compiles


def _no_tangents(*args: Any) -> None:
    """Raises RidgelineError if an argument has a forward-mode tangent, which kernels would silently drop."""
    if any([isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args]):
        raise RidgelineError("Ridgeline's kernels have no forward-mode derivatives; use impl='torch' or 'naive'")


class Function(torch.autograd.Function):
    """Base class of the `autograd.Function`s that `differentiate` calls."""

    quick_apply: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        cls.quick_apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]


class _FirstOrderOnly(torch.autograd.Function):
    """Passes a gradient through, and raises if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "Ridgeline's gradients cannot be differentiated again; for second derivatives use impl='torch'"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the backward of an `autograd.Function` over kernels: second derivatives raise instead of missing terms.

    Unlike torch's `once_differentiable`, it raises even if the incoming gradient needs no gradient itself."""

    @wraps(backward)
    def once(ctx: Any, *incoming: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        with torch.no_grad():
            gradients = backward(ctx, *incoming)
        if isinstance(gradients, torch.Tensor):
            gradients = (gradients,)
        return tuple([g if g is None else _FirstOrderOnly.apply(g.detach().requires_grad_()) for g in gradients])

    return once


_top_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def packed() -> str | None:
    """Returns what hooks on saved tensors do with what a forward saves now: None, "kept" or "recomputed".

    None: there are no hooks. "kept": they keep it in their way, for example on the CPU. "recomputed": a checkpoint
    drops it and runs this forward again in backward, so that gradients made now would be made in vain. If a dispatch
    mode watches too, as in selective checkpointing, both forwards must do the same, so the answer is "kept"."""
    if torch.compiler.is_compiling():
        return None
    hooks = _top_hooks(False)
    if hooks is None:
        return None
    name = getattr(hooks[0], "__qualname__", "")  # objects and partial functions have none
    again = name.startswith("_checkpoint_hook.") and not torch._C._len_torch_dispatch_stack()
    return "recomputed" if again else "kept"


def alone(x: torch.Tensor) -> bool:
    """Returns whether nothing but this forward's node will hold what it saves now, so that its last backward may write
    over that. Hooks may keep it elsewhere, and a backward that a CUDA graph replays may not be the last."""
    if torch.compiler.is_compiling() or packed() == "kept":
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def last_backward() -> bool:
    """Returns whether the running backward frees its graph, so that no other one reads what forward saved."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:  # a node that is called by hand
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def tracing() -> bool:
    """Returns whether PyTorch is tracing the running launcher: tensors then have no data and nothing may start."""
    return _trace.on


@dataclass(frozen=True)
class Launch:
    """One kernel start, as observers see it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    device: devices.Device


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Calls `observer` with every launch inside the context, before it starts (for `explain`, `profile`, `inspect`)."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def early(device: devices.Device) -> dict[str, Any]:
    """Returns the constants that let a kernel start while the launcher's previous kernel still runs.

    This is programmatic dependent launch, on sm_90 and later; elsewhere PDL is false. If PDL is true, the previous
    kernel triggers the start (`gdc_launch_dependents`), and this kernel waits for the end of that one (`gdc_wait`);
    `early.cuh` has both for CUDA C++. A kernel started early may read its predecessor's output only after the wait,
    except what was written before the trigger, and may write only after the wait. The first kernel of a launcher is
    never early: it starts when all earlier work in the stream has ended."""
    return {"PDL": True, "launch_pdl": True} if device.capability >= 90 and not INTERPRETED else {"PDL": False}


_started: dict[Any, tuple[Start | None, Callable[..., None] | None, dict[str, Any]]] = {}


def launch(
    kernel: Any,
    grid: Any,
    *args: Any,
    config: Callable[[], dict[str, Any]] | None = None,
    key: Any = None,
    **constants: Any,
) -> None:
    """Starts a kernel: Triton, Gluon or CUDA C++.

    kernel: a `triton.jit` or `gluon.jit` function whose constexpr parameters come last, or a `CudaKernel`.
    grid: a tuple, or a function from the constants to a tuple. A grid with a zero in it starts nothing.
    args: the runtime arguments in order; the first is a tensor or a tuple that begins with one. Give a tensor
        descriptor as a `TensorMap`. Tuples and NamedTuples of arguments may be nested.
    constants: the constexpr parameters and compile options (num_warps, num_stages, ...) by name; macros for CUDA C++.
        `assembler="newer"` takes the ptxas that Triton brings for Blackwell, where the other one makes wrong code.
    config: a function that returns the tile configuration, merged into `constants`. It is called once for each
        combination of argument kinds, constants and `key`.
    key: whatever else the configuration depends on.
    Raises RidgelineError if the tensor is not on a GPU and kernels are not interpreted.
    """
    if _trace.on:
        return
    first = args[0]
    while isinstance(first, tuple):
        first = first[0]
    interpreted = INTERPRETED and not isinstance(kernel, CudaKernel)
    elsewhere = interpreted or devices.stand_in is not None  # no GPU is used
    if not elsewhere:
        if not first.is_cuda:
            raise RidgelineError(
                f"a kernel needs a GPU, and the tensor is on {first.device}; "
                "Triton kernels also run on a CPU with TRITON_INTERPRET=1"
            )
        index = first.get_device()
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return launch(kernel, grid, *args, config=config, key=key, **constants)
    if elsewhere or _observers:
        constants |= config() if config else {}
        config = key = None
        grid = grid if isinstance(grid, tuple) else grid(constants)
        _show(kernel, grid, args, constants, devices.of(first))
        if devices.stand_in is not None or 0 in grid:
            return
        if interpreted:
            options = ("num_warps", "num_stages", "maxnreg", "num_ctas", "assembler")
            taken = {k: v for k, v in constants.items() if k not in options}
            kernel[grid](*_made(kernel, args, constants), **taken)
            return
    if (config is None) != (key is None):
        raise TypeError(
            f"launch of {kernel} needs both config and key, or neither; key holds what the configuration depends on"
        )
    if config is not None and tuning.listening():
        constants |= config()
        config = None
    values: list[Any] = []
    found: list[Any] = [id(kernel), index, key, tuning.version, *constants.values()]
    _read(args, values, found)
    where = tuple(found)
    started = _started.get(where)
    if started is None:
        constants |= config() if config else {}
        started = _started[where] = *_load(kernel, args, constants, values, index), constants
    start, slow, constants = started
    if type(grid) is not tuple:
        grid = grid(constants)
    if 0 in grid:
        return
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(index)
    watching = recorder()
    if watching is not None:
        watching.started(start, (x, y, z), args, values)
    if start is not None:
        start(x, y, z, stream, values)
    elif slow is not None:
        slow(x, y, z, stream, args)


def _show(kernel: Any, grid: Any, args: tuple[Any, ...], constants: dict[str, Any], device: devices.Device) -> None:
    """Shows a launch to the observers."""
    made = _made(kernel, args, constants)
    for observer in _observers:
        observer(Launch(kernel, grid, made, constants, device))


def _load(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], values: list[Any], index: int
) -> tuple[Start | None, Callable[..., None] | None]:
    """Compiles and loads the kernel for these arguments. Returns (start through the driver, start through Triton's
    launcher), one of them None."""
    with _loading():
        if isinstance(kernel, CudaKernel):
            return kernel.start(constants, values, index), None
        return _triton_start(kernel, _made(kernel, args, constants), constants, len(values), index)


@contextmanager
def _loading() -> Iterator[None]:
    """Lets this thread load kernels inside the context while it captures a CUDA graph; the driver otherwise refuses."""
    if torch.version.hip or not torch.cuda.is_current_stream_capturing():
        yield
        return
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange = driver_library().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _read(args: tuple[Any, ...], values: list[Any], key: list[Any]) -> None:
    """Appends each argument's value for the driver to `values`, and the facts that Triton specialises on to `key`.

    The facts are a tensor's dtype and 16-byte alignment; a tensor map's box, dtype and swizzle; and whether an integer
    is 1, is a multiple of 16, and fits in 32 bits."""
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            pointer = arg.data_ptr()
            values.append(pointer)
            key += arg.dtype, pointer & 15 == 0
        elif issubclass(kind, tuple):
            key.append(len(arg))
            _read(arg, values, key)
        elif kind is int or kind is Loose:
            values.append(arg)
            key.append(1 if arg == 1 else (arg & 15 == 0, -0x80000000 <= arg < 0x80000000))
        elif kind is float or kind is bool:
            values.append(arg)
            key.append(kind)
        elif arg is None:
            values.append(0)
            key.append(None)
        elif isinstance(arg, tuple):  # a NamedTuple
            key.append(kind)
            _read(arg, values, key)
        elif isinstance(arg, torch.Tensor):
            _read((arg.as_subclass(torch.Tensor),), values, key)
        elif kind is TensorMap:
            values.append(arg)
            key += arg.box, arg.tensor.dtype, arg.swizzle
        elif isinstance(arg, Number):  # for example NumPy's
            values.append(arg)
            key.append(kind)
        else:
            raise TypeError(
                f"launch takes tensors, TensorMaps (for tensor descriptors), numbers, None and tuples of these; "
                f"given: {kind}"
            )


def _made(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments in the form that Triton's compiler and interpreter take."""
    if isinstance(kernel, CudaKernel):
        return args

    def made(a: Any) -> Any:
        if type(a) is TensorMap:
            return _descriptor(kernel, a, constants)
        return _mapped(made, a) if isinstance(a, tuple) else int(a) if type(a) is Loose else a

    return tuple([made(a) for a in args])


def _mapped(function: Callable[[Any], Any], some: Any) -> Any:
    """Returns a tuple of the same kind, perhaps a NamedTuple, with the function's results."""
    found = [function(a) for a in some]
    return type(some)(*found) if hasattr(some, "_fields") else tuple(found)


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Returns a Triton kernel compiled for arguments of this kind; args as `Launch` has them.

    Triton specialises on the integers in a tuple even if the kernel names the tuple in `do_not_specialize` (3.6.0 and
    3.7.1). So such integers are replaced here by one that says nothing but its width.
    """

    def loose(a: Any) -> Any:
        if isinstance(a, tuple):
            return _mapped(loose, a)
        return (3 if -0x80000000 <= a < 0x80000000 else 1 << 40 | 3) if type(a) is int else a

    if any([isinstance(a, tuple) for a in args]):
        marked = [p.do_not_specialize for p in kernel.params]
        args = tuple([loose(a) if isinstance(a, tuple) and free else a for a, free in zip(args, marked)])
    with _assembler(constants) as constants:
        return kernel.warmup(*args, grid=(1,), **constants)


@contextmanager
def _assembler(constants: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields constants without `assembler`, inside which Triton assembles as it says. No other thread compiles then.

    ptxas 12.8, which Triton 3.6 and 3.7 take for Hopper, lets some products read where no operand is; the tests look
    for it by `unwritten` of lab/analysis/disassembly.py. Triton also brings a newer one, for Blackwell, which replaces
    an older one even if TRITON_PTXAS_PATH names it. The option in the kernel's key keeps its cubin apart from the
    other's. Raises RidgelineError if both are older than 12.9."""
    taken = {k: v for k, v in constants.items() if k != "assembler"}
    with _assembling:
        if len(taken) == len(constants) or _is_new(triton.knobs.nvidia.ptxas):
            yield taken
            return
        newer = _newer()
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "cuda":  # Triton keeps the first answer for the keys of all kernels: it must be the usual
            from triton.backends.nvidia.compiler import get_ptxas_version

            get_ptxas_version(target.arch)
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.ptxas = newer
            yield taken | {"ptx_options": "--opt-level=3"}


_assembling = threading.RLock()


def _is_new(tool: Any) -> bool:
    """Whether a ptxas, as Triton's knobs give it, is 12.9 or newer."""
    return tuple(map(int, tool.version.split("."))) >= (12, 9)


def _newer() -> str:
    """The path of the ptxas that Triton takes for Blackwell. Raises RidgelineError if it is too old as well."""
    chosen = triton.knobs.nvidia.ptxas
    try:
        newer: Any = triton.knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # this Triton brings none
        newer = chosen
    if not _is_new(newer):
        raise RidgelineError(
            f"this kernel needs ptxas 12.9 or newer, and {chosen.path} is {chosen.version}; "
            "set TRITON_PTXAS_PATH to a newer one"
        )
    return newer.path


def _descriptor(kernel: Any, seen: TensorMap, constants: dict[str, Any]) -> Any:
    """Returns a tensor map as Triton's TensorDescriptor; kernels of Triton and of Gluon have a class each."""
    view = seen.view(constants)
    facts = seen.tensor, list(view.shape), list(view.stride), list(view.box)
    if not isinstance(kernel, triton.JITFunction) or not kernel.is_gluon():
        return TensorDescriptor(*facts)
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia import hopper

    return hopper.TensorDescriptor(
        *facts, NVMMASharedLayout(seen.swizzle, 8 * seen.tensor.element_size(), len(view.box))
    )


_CODES = {"i1": "?", "u1": "?", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}


def _triton_start(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], count: int, index: int
) -> tuple[Start | None, Any]:
    """Compiles the kernel for these arguments and returns (start through the driver, start through Triton's launcher).

    One of them is None. The driver is called directly if all parameters are pointers, numbers and tensor maps, laid out
    as we pack them; Triton's own launcher is slower, and much slower for tensor maps.
    Raises RidgelineError if a kernel with tensor maps cannot be started through the driver."""
    found = compiled(kernel, args, constants)
    metadata, signature = found.metadata, list(found.src.signature.values())
    types = list(_leaves(signature))[:count]
    maps = _views(kernel, types, metadata)
    bundled = any([t.startswith("tensordesc") for s in signature if isinstance(s, tuple | list) for t in _leaves(s)])
    run: Any = None
    if bundled:
        function = _loaded(found, index)
    else:
        run, function = found.run, found.function
    passed = [n for n, t in enumerate(types) if t != "constexpr"]  # Triton compiles a 1 or a None into the kernel
    codes = [
        f"M{len(maps[n].keywords['box'])}" if n in maps else "P" if types[n][0] == "*" else _CODES.get(types[n], "")
        for n in passed
    ]
    plain = metadata.num_ctas == 1 and not (metadata.launch_cooperative_grid or metadata.global_scratch_size)
    if plain and all(codes) and not torch.version.hip:
        # The parameters of every Triton kernel end with two pointers to scratch memory, which these kernels do not use.
        layout = parameter_layout([*codes, "8x", "8x"], parameters(function))
        if layout is not None:
            threads, pdl = 32 * metadata.num_warps, bool(metadata.launch_pdl)
            starter = Starter(function, layout, threads, metadata.shared, index, pdl=pdl, what=kernel.__name__)
            if len(passed) == count and not maps:
                return starter, None
            return Arranged(starter, [(n, maps.get(n)) for n in passed]), None
    if maps:
        raise RidgelineError(
            f"{kernel.__name__} takes tensor maps, and `launch` cannot start it: that needs num_ctas=1, "
            f"no cooperative grid, no scratch memory, and parameters {' '.join(codes)} (as in cuda.parameter_layout); "
            f"the driver's (offset, bytes) are {parameters(function)}"
        )
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    trailing = tuple([constants[n] if n in constants else defaults[n] for n in kernel.arg_names[len(args) :]])
    packed = found.packed_metadata
    return None, lambda x, y, z, stream, args: run(
        x, y, z, stream, function, packed, None, None, None, *args, *trailing
    )


def _loaded(found: Any, index: int) -> int:
    """Loads a compiled kernel and returns its function, without Triton's own launcher.

    Triton 3.6 cannot make that for a kernel with tensor maps inside a tuple."""
    active: Any = triton.runtime.driver.active
    runtime: Any = triton.knobs.runtime
    hooks = [getattr(runtime, f"kernel_load_{when}_hook", None) for when in ("start", "end")]
    about = found.name, found.metadata_group, found.hash
    if hooks[0] is not None:
        hooks[0](None, None, *about)
    shared, most = found.metadata.shared, active.utils.get_device_properties(index)["max_shared_mem"]
    if shared > most:
        raise OutOfResources(shared, most, "shared memory")
    module, function, _, _, threads = active.utils.load_binary(found.name, found.kernel, found.metadata.shared, index)
    wanted = 32 * found.metadata.num_warps
    if wanted > threads:
        raise OutOfResources(wanted, threads, "threads")
    if hooks[1] is not None:
        hooks[1](module, function, *about)
    return function


def _views(kernel: Any, types: list[str], metadata: Any) -> dict[int, partial[View]]:
    """Returns, by argument number, the function that makes each tensor map's `View` for the compiled kernel."""
    places = [n for n, t in enumerate(types) if t.startswith("tensordesc")]
    wanted = getattr(metadata, "tensordesc_meta", None) or [None] * len(places)
    if places and None in wanted:
        raise RidgelineError(
            f"{kernel.__name__} takes tensor maps, and Triton compiled it for a GPU without their copy engine; "
            "sm_90 and later have it"
        )
    boxes = [(tuple(w["block_size"]), SWIZZLES[w["swizzle"]]) for w in wanted]
    return {
        n: partial(TensorMap.view_as, box=box, swizzle=swizzle, sizes=True)
        for n, (box, swizzle) in zip(places, boxes, strict=True)
    }


def _leaves(types: Any) -> Iterator[str]:
    for t in types:
        if isinstance(t, tuple | list):
            yield from _leaves(t)
        else:
            yield t
