"""Triton's interpreter, without work that it repeats.

It looks through all of Triton's language whenever a device function is called, to put NumPy's functions in place of the
compiler's, and makes a table of dtypes for each value. That takes two thirds of a kernel's time. Here the language is
changed once a launch, and a dtype is looked up once. What kernels compute is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Replaces two functions of the interpreter, once for the process."""
    if not getattr(interpreter._patch_lang, "quick", False):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
        interpreter._get_np_dtype = _once_a_dtype(interpreter._get_np_dtype)


def _once_a_launch(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `change`, which puts NumPy's functions into the languages that a kernel sees, for those not changed yet.

    A launch restores them at its end; a device function's call restores nothing."""
    changed: set[str] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            changed.clear()
            super().restore()

    @functools.cache
    def languages(kernel: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in kernel.__globals__.values() if value is tl or value is tl.core)

    def changed_once(kernel: Any) -> Any:
        scope = Scope()
        if not languages(kernel) <= changed:
            scope._changes = change(kernel)._changes
            changed.update(languages(kernel))
        return scope

    changed_once.quick = True  # type: ignore[attr-defined]
    return changed_once


def _once_a_dtype(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def known(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return known
