"""Keeps what `ridgeline micro` measured: one JSON file for each GPU, in the user's cache and in results/micro/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.lab.measurement import store
from ridgeline.lab.measurement.micro.parts import PARTS, SCHEMA

Row = dict[str, Any]
FIELDS: dict[str, Any] = {"gpu": str, "machine": dict, "multiprocessors": int, "parts": dict, "rows": list}


def recorded() -> Path:
    return store.recorded() / "micro"


def cached() -> Path:
    return store.cached() / "micro"


def load(path: Path) -> Row:
    """A record. Raises RidgelineError, in one sentence, if the file is missing, corrupt or of a newer version."""
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise store.refusal(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise store.refusal(f"{path} is no record of ridgeline micro: it is not JSON ({error})") from error
    if not isinstance(record, dict) or "schema" not in record:
        raise store.refusal(f"{path} is no record of ridgeline micro: it has no schema")
    if record["schema"] != SCHEMA:
        raise store.refusal(f"{path} has schema {record['schema']!r}, and this version of Ridgeline reads {SCHEMA}")
    wrong = [name for name, kind in FIELDS.items() if not isinstance(record.get(name), kind)]
    if wrong or not all(map(_whole, record["rows"])):
        raise store.refusal(f"{path} is no record of ridgeline micro: {', '.join(wrong) or 'a row'} is missing or torn")
    return record


def _whole(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("part", "name", "at")):
        return False
    figures = row.get("figures")
    if figures is None:
        return isinstance(row.get("reason"), str)
    return isinstance(figures, dict) and all(
        isinstance(f, dict) and isinstance(f.get("median"), int | float) for f in figures.values()
    )


def text(record: Row) -> str:
    """A record as JSON with a line for each row."""
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in record["rows"])
    head = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1, allow_nan=False)
    return f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def merged(old: Row | None, new: Row) -> Row:
    """The new record, with the parts of the old one that the new one did not measure, in the order of PARTS."""
    if old is None:
        return new
    rows = new["rows"] + [row for row in old["rows"] if row["part"] not in new["parts"]]
    about = old["parts"] | new["parts"]
    order = list(PARTS)
    return new | {
        "parts": {part: about[part] for part in order if part in about},
        "rows": sorted((row for row in rows if row["part"] in order), key=lambda row: order.index(row["part"])),
    }


def keep(record: Row, folder: Path) -> Path:
    """Merges a record into its GPU's file in a folder, in one step and under a lock; returns the file."""
    with store.locked(folder):
        path = folder / f"{store.slug(record['gpu'])}.json"
        content = text(merged(load(path) if path.exists() else None, record))
        fresh = path.with_name(f".{path.name}.new")
        try:
            fresh.write_text(content)
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise store.refusal(f"cannot write {path}: {error.strerror}") from error
    return path


def every() -> dict[str, Row]:
    """The recorded run of each GPU, by its short name; those of `h200` and `h100` first."""
    paths = sorted(
        recorded().glob("*.json"), key=lambda path: (path.stem not in ("h200", "h100"), path.stem != "h200", path.stem)
    )
    return {path.stem: load(path) for path in paths}


def of(gpu: str) -> Row | None:
    """The newest record of a GPU, by its full name: from results/micro/ or from the user's cache; None without one."""
    paths = [folder / f"{store.slug(gpu)}.json" for folder in (recorded(), cached())]
    found = [load(path) for path in paths if path.exists()]
    return max(found, key=newest, default=None)


def newest(record: Row) -> str:
    """When a record's newest part was measured."""
    return max((about["time"] for about in record["parts"].values()), default="")
