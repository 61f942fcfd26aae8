"""The time of collectives over a cluster's links: T = a + b S, by ring or tree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.parallel.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. members: how many; near: how many of them are in one node."""

    members: int
    near: int


def group(cluster: Cluster, members: int, stride: int) -> Group:
    """Returns a group of ranks that are `stride` apart: strides of fewer than a node's GPUs put several in a node."""
    return Group(members, max(1, min(members, cluster.node // stride)))


def rate(cluster: Cluster, who: Group, link: float = 1.0) -> float:
    """Returns the bytes/s at which a ring passes data on: what the node's links to others carry, at most NVLink's.

    link: the share of the network's rate that collectives reach."""
    if who.members <= who.near:
        return cluster.collective
    return min(cluster.collective, who.near * cluster.nic * link)


def hops(cluster: Cluster, who: Group) -> float:
    """Returns the seconds in which a ring's first byte goes once around: NVLink's hops, and one out of each node."""
    nodes = math.ceil(who.members / who.near)
    far = nodes if nodes > 1 else 0
    return (who.members - 1 - far) * cluster.hop_near + far * cluster.hop_far if who.members > 1 else 0.0


def gather(cluster: Cluster, who: Group, nbytes: float, link: float = 1.0) -> float:
    """Returns the seconds of an all-gather or a reduce-scatter whose whole tensor has `nbytes` bytes, by a ring."""
    if who.members == 1 or not nbytes:
        return 0.0
    share = (who.members - 1) / who.members
    return cluster.start + hops(cluster, who) + share * nbytes / rate(cluster, who, link)


def all_reduce(cluster: Cluster, who: Group, nbytes: float, link: float = 1.0) -> float:
    """Returns the seconds of an all-reduce of `nbytes` bytes: two passes of a ring, or a tree over nodes if quicker."""
    if who.members == 1 or not nbytes:
        return 0.0
    moved = 2 * (who.members - 1) / who.members * nbytes / rate(cluster, who, link)
    depth = math.ceil(math.log2(max(2, who.members / who.near)))
    tree = 2 * (depth * cluster.hop_far + who.near * cluster.hop_near)
    return cluster.start + min(2 * hops(cluster, who), tree) + moved


def all_to_all(cluster: Cluster, who: Group, nbytes: float, link: float = 1.0) -> float:
    """Returns the seconds in which each rank sends `nbytes` bytes in equal parts to the group's members."""
    if who.members == 1 or not nbytes:
        return 0.0
    inside = nbytes * (who.near - 1) / who.members / cluster.collective
    outside = nbytes * (who.members - who.near) / who.members
    return cluster.start + max(inside, outside / (cluster.nic * link) if outside else 0.0)


def send(cluster: Cluster, far: bool, nbytes: float, link: float = 1.0) -> float:
    """Returns the seconds of a message of `nbytes` bytes to a neighbour, in the node or outside it."""
    return cluster.hop_far + nbytes / (cluster.nic * link) if far else cluster.hop_near + nbytes / cluster.collective
