"""Goodput: the share of time that makes progress where GPUs stop and checkpoints take time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ridgeline.parallel.cluster import Cluster


@dataclass(frozen=True)
class Goodput:
    """Seconds between stops, of a checkpoint, and between checkpoints; and the share of time that is progress.

    saving, lost, restarting: the other shares."""

    between_stops: float
    save: float
    interval: float
    saving: float
    lost: float
    restarting: float

    @property
    def share(self) -> float:
        """The share of time that makes progress."""
        return max(0.0, 1 - self.saving - self.lost - self.restarting)


def between_stops(cluster: Cluster, gpus: int) -> float:
    """Returns the mean seconds between stops of a job on this many GPUs: each stop is one GPU's, and stops all."""
    return cluster.gpu_hours_per_stop * 3600 / gpus


def save_seconds(cluster: Cluster, nbytes: float) -> float:
    """Returns the seconds of a checkpoint of this many bytes in all."""
    return cluster.save_seconds + nbytes / cluster.storage


def goodput(cluster: Cluster, gpus: int, nbytes: float, interval: float | None = None) -> Goodput:
    """Returns the goodput with checkpoints every `interval` seconds; None: the best, sqrt(2 M save) (Young 1974).

    A stop loses half an interval on average, and a restart."""
    mean, save = between_stops(cluster, gpus), save_seconds(cluster, nbytes)
    chosen = interval or math.sqrt(2 * mean * save)
    saving = save / (chosen + save)
    return Goodput(mean, save, chosen, saving, (chosen + save) / 2 / mean, cluster.restart_seconds / mean)


def drawn(found: Goodput, restart: float, seconds: float, seed: int = 0) -> float:
    """Returns the share of progress of a job that lasts `seconds`, with stops drawn at random: the formula's check."""
    chance, now, progress = random.Random(seed), 0.0, 0.0
    while now < seconds:
        stop = chance.expovariate(1 / found.between_stops)
        progress += int(stop / (found.interval + found.save)) * found.interval
        now += stop + restart
    return progress / now
