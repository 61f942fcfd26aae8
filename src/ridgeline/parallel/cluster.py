"""Clusters of GPUs as facts: each figure of clusters/*.json has a source."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.op import RidgelineError

FOLDER = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """GPUs, their links, and how often they stop.

    peak, peak_fp8: FLOP/s of the datasheet, without sparsity. roof: FLOP/s of bfloat16 products in a burst; lasting:
    over seconds, at the power limit. memory: bytes of a GPU. bandwidth: bytes/s of a copy in it. node: GPUs that
    NVLink joins. nvlink: bytes/s of a GPU in one direction; collective: what collectives reach of it. nic: bytes/s of
    a GPU out of its node. hop_near, hop_far: seconds of a ring's hop inside and outside a node; start: of a collective.
    gpu_hours_per_stop, save_seconds, restart_seconds: of failures; storage: bytes/s
    of checkpoints, of the whole cluster. most: GPUs there are; 0 for no limit.
    sites, wan, wan_latency: groups of nodes, the bytes/s of a site to the others, and seconds to get there.
    """

    name: str
    title: str
    gpu: str
    peak: float
    peak_fp8: float
    roof: float
    lasting: float
    memory: float
    bandwidth: float
    multiprocessors: int
    node: int
    nvlink: float
    collective: float
    nic: float
    hop_near: float
    hop_far: float
    start: float
    gpu_hours_per_stop: float
    storage: float
    save_seconds: float
    restart_seconds: float
    most: int = 0
    sites: int = 1
    wan: float = 0.0
    wan_latency: float = 0.0

    @property
    def sustained(self) -> float:
        """The share of the burst's rate of products that lasts."""
        return self.lasting / self.roof


def names() -> list[str]:
    """Returns the names of the clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def facts(name: str) -> dict[str, dict[str, Any]]:
    """Returns a cluster's facts: by name, the value and its source."""
    return {key: value for key, value in read(name).items() if key != "title"}


def read(name: str) -> dict[str, Any]:
    """Returns a cluster's file. Raises RidgelineError if it is no JSON object."""
    try:
        found = json.loads(Path(name if name.endswith(".json") else FOLDER / f"{name}.json").read_text())
    except ValueError as error:
        raise RidgelineError(f"parallel: {name!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RidgelineError(f"parallel: {name!r} holds no JSON object of facts, as clusters/dgx-h100.json does")
    return found


@cache
def cluster(name: str) -> Cluster:
    """Returns the cluster of that name, or of a JSON file of the same form.

    Raises RidgelineError if there is none, or if a fact is missing or unknown."""
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise RidgelineError(f"parallel: there is no file {name!r}; a cluster is one of {', '.join(names())}")
    elif name not in names():
        near = get_close_matches(name, names(), 1, 0.0)[0]
        raise RidgelineError(
            f"parallel: there is no cluster {name!r} (the nearest is {near!r}); the clusters are {', '.join(names())}"
        )
    found = facts(name)
    known = {f.name for f in fields(Cluster)} - {"name", "title"}
    optional = {"most", "sites", "wan", "wan_latency"}
    if wrong := sorted(set(found) - known) or sorted(known - optional - set(found)):
        raise RidgelineError(f"parallel: the cluster {name!r} has unknown or missing facts: {', '.join(wrong)}")
    if loose := [key for key, fact in found.items() if not isinstance(fact, dict) or "value" not in fact]:
        raise RidgelineError(
            f"parallel: the cluster {name!r} needs a value and a source, as {{'value': 8, 'source': '...'}}, "
            f"for {', '.join(loose)}"
        )
    if bare := [key for key, fact in found.items() if not fact.get("source")]:
        raise RidgelineError(f"parallel: the cluster {name!r} gives no source for {', '.join(bare)}")
    values = {key: fact["value"] for key, fact in found.items()}
    free = {"peak_fp8", "nvlink", "nic", "most", "wan", "wan_latency"}  # 0: there is none
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "gpu" and not (number and (value > 0 or (key in free and value == 0))):
            raise RidgelineError(f"parallel: the cluster {name!r} needs a number above 0 for {key}, and has {value!r}")
    title = read(name).get("title", Path(name).stem)
    return Cluster(name=Path(name).stem if name.endswith(".json") else name, title=title, **values)
