"""Checkpoints of a training run, written by a thread while training goes on: each file is whole or is not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from ridgeline.op import RidgelineError

KEPT = 2  # the newest so many stay


def copied(state: Any) -> Any:
    """Returns a state with its tensors copied to the CPU, so that training may change the originals."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([copied(value) for value in state])
    return state


class Snapshots:
    """The checkpoints in a folder, `step-<number>.pt`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread: threading.Thread | None = None
        self.error: OSError | RuntimeError | None = None

    def files(self) -> list[Path]:
        """Returns the checkpoints, the oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Copies a state now and writes it in a thread; waits first for the one before. Returns the file's path."""
        self.wait()
        path, state = self.folder / f"step-{step:08d}.pt", copied(state)
        self.thread = threading.Thread(target=self._write, args=(path, state), name="checkpoint")
        self.thread.start()
        return path

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        part = path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            for old in self.files()[:-KEPT]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # `wait` raises it in the thread that trains
            self.error = error
            if part.is_file():
                part.unlink()

    def wait(self) -> None:
        """Waits until the last checkpoint is on the disk. Raises RidgelineError if it could not be written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise RidgelineError(f"lm: a checkpoint cannot be written to {self.folder}: {error}") from error

    def newest(self) -> dict[str, Any]:
        """Returns the newest state. Raises RidgelineError if there is none or if it is damaged."""
        files = self.files()
        if not files:
            raise RidgelineError(f"lm: {self.folder} holds no checkpoint to resume; leave --resume out to begin")
        try:
            return torch.load(files[-1], map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises whatever its first bad byte leads to
            other = f"; remove it to resume from {files[-2].name}" if len(files) > 1 else ""
            said = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise RidgelineError(f"lm: the checkpoint {files[-1]} is damaged ({said}){other}") from error
