"""The picture of a cluster in numbers: what it shows (`scene`), as which boxes and strands, and where they go."""

from mimatrix.cluster.layout.boxes import Box, Layout, Square, Strand
from mimatrix.cluster.layout.circular import circle, grid, torus_sides
from mimatrix.cluster.layout.layered import layers
from mimatrix.cluster.layout.scene import compose
from mimatrix.cluster.model import Cluster

__all__ = ["Box", "Layout", "Square", "Strand", "arrange"]

_MOST_AROUND_A_HUB = 20


def arrange(cluster: Cluster) -> Layout:
    """The arrangement that suits the cluster.

    Networks of switches lie in layers, nodes below and the core on top; a BiGraph has its groups above and below; a
    small star has its hub in the middle; nodes that forward to one another make a circle, or a grid if a torus.
    """
    scene = compose(cluster)
    hubs, nodes = scene.of_kind("switch"), scene.of_kind("node")
    if not hubs:
        sides = torus_sides(scene)
        return grid(scene, sides) if sides else circle(scene)
    plain = all(scene.neighbours[node] == hubs for node in nodes) and all(cord.square is None for cord in scene.cords)
    if plain and len(hubs) == 1 and 3 <= len(nodes) <= _MOST_AROUND_A_HUB:
        return circle(scene, hubs[0])
    return layers(scene)
