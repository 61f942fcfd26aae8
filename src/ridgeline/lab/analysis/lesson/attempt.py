"""A learner's own file, its function, and how that joins an op's ladder."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.lab.analysis.lesson.exercises import Exercise
from ridgeline.lab.analysis.lesson.wording import say
from ridgeline.op import Implementation, RidgelineError
from ridgeline.translation import told

CUDA_ERROR = re.compile(r"\.cu\((\d+)\): (?:catastrophic )?error: (.*)")


class Attempt(Implementation):
    """The learner's function as a rung of the op, called as `given` calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.call
        return self.call(*args, **kwargs)


def given(exercise: Exercise, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the learner's function as one of the op's arguments: it gets the tensors and its own options."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args[: exercise.tensors], **{k: v for k, v in kwargs.items() if k in exercise.options})

    return call


def load(path: Path, number: int, exercise: Exercise) -> Callable[..., Any]:
    """Returns the learner's function. Raises RidgelineError if the file cannot be imported or lacks it."""
    spec = importlib.util.spec_from_file_location("learner", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RidgelineError(say("file", path=path, error="no such Python file"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["learner"] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a learner's file raises is what the check says
        text, at = short(error), None if isinstance(error, SyntaxError) else line(error, path)
        said = say("import-at", line=at, path=path, error=text) if at else say("import", path=path, error=text)
        raise RidgelineError(said) from error
    function = getattr(module, exercise.op, None)
    if not callable(function):
        facts = {"name": exercise.op, "number": number, "signature": exercise.signature}
        raise RidgelineError(say("function", path=path, **facts))
    return function


def line(error: BaseException, path: Path) -> int | None:
    """Returns the line of a file that an error comes from, the innermost one; None if it comes from elsewhere."""
    import traceback

    found, cause = None, error
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            found = frame.lineno if Path(frame.filename).resolve() == path.resolve() else found
        cause = cause.__cause__  # type: ignore[assignment]
    return found


def short(error: BaseException) -> str:
    """Returns an error's kind and its first line of text; Triton's own frames are left out."""
    while error.__cause__ is not None and type(error).__name__ in ("InterpreterError", "CompilationError"):
        error = error.__cause__
    if wrong := CUDA_ERROR.search(str(error)):
        return say("cuda-line", line=wrong[1], error=wrong[2])
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and set(line.strip()) != {"^"}]
    text = lines[-1] if type(error).__name__ == "CompilationError" and lines else (lines or [""])[0]
    if isinstance(error, RidgelineError):
        return told(text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def configured() -> None:
    """Makes `triton.autotune` take its first configuration instead of timing them all."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    Autotuner.run = run
