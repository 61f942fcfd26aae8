"""Tile configurations: from committed JSON if there, else by the op's own rule. Only `ridgeline tune` searches.

`configs/<arch>/<op>.json` holds {"<kernel>": {"<key>": {"BLOCK": 1024, "num_warps": 4}}} for an architecture's cards.
`configs/<arch>-l2-<MiB>/<op>.json` holds what differs on cards with that much L2, as an H200 (60) and an H100 (50) do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ridgeline.device import Device

CONFIGS = Path(__file__).with_name("configs")
Config = dict[str, int]


@dataclass(frozen=True)
class Request:
    """One request for a configuration, as `ridgeline tune` sees it: op, kernel, key, and the space of candidates."""

    op: str
    kernel: str
    key: str
    space: tuple[tuple[tuple[str, int], ...], ...]


_requests: dict[tuple[str, str, str, str], Request] = {}
current_listener: Callable[[Request], Config | None] | None = None
version = 0  # increases at each save, so that caches keyed by it look configurations up again


def folder(device: Device) -> str:
    """Returns the folder of configurations for cards with this one's architecture and L2, such as "sm_90-l2-60"."""
    return f"{device.arch}-l2-{device.l2 >> 20}"


@cache
def _table(name: str, op: str) -> dict[str, dict[str, Config]]:
    path = CONFIGS / name / f"{op}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def config(
    device: Device,
    op: str,
    kernel: str,
    key: str,
    rule: Callable[[], Config],
    space: Callable[[], list[Config]] | None = None,
) -> Config:
    """Returns the configuration of `kernel` for `key` (a bucket such as "float32 16384") on this device.

    rule: gives the configuration if none is committed.
    space: gives the candidates for `tune`; without it the kernel is not tuned.
    """
    if current_listener is not None and space is not None:
        where = device.arch, op, kernel, key
        if where not in _requests:
            _requests[where] = Request(op, kernel, key, tuple(tuple(c.items()) for c in space()))
        chosen = current_listener(_requests[where])
        if chosen is not None:
            return chosen
    for name in (folder(device), device.arch):
        if found := _table(name, op).get(kernel, {}).get(key):
            return found
    return rule()


def listening() -> bool:
    """Returns whether a search is running, so that no configuration may be cached."""
    return current_listener is not None


@contextmanager
def listen(listener: Callable[[Request], Config | None]) -> Iterator[None]:
    """Inside the context, `listener` answers every request first; None from it means the usual answer."""
    global current_listener
    before, current_listener = current_listener, listener
    try:
        yield
    finally:
        current_listener = before


def save(name: str, op: str, found: dict[str, dict[str, Config]], configs: Path = CONFIGS) -> Path:
    """Merges configurations into `configs/<name>/<op>.json`, atomically, and returns its path."""
    global version
    path = configs / name / f"{op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text()) if path.exists() else {}
    for kernel, keys in found.items():
        table.setdefault(kernel, {}).update(keys)
    fresh = path.with_suffix(".json.new")
    fresh.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    fresh.replace(path)
    _table.cache_clear()
    version += 1
    return path
