"""The layout of a cluster's picture in numbers: its graph (`scene`), as boxes and polylines, and where they go."""

from mimatrix.cluster.layout.boxes import Box, GraphLayout, Polyline, Square
from mimatrix.cluster.layout.circular import circle, grid, torus_sides
from mimatrix.cluster.layout.layered import layers
from mimatrix.cluster.layout.scene import compose
from mimatrix.cluster.model import Cluster

__all__ = ["Box", "GraphLayout", "Polyline", "Square", "arrange"]

_MOST_AROUND_A_HUB = 20


def arrange(cluster: Cluster) -> GraphLayout:
    """Arrange the cluster in the layout that suits it.

    Networks of switches lie in layers, nodes below and the core on top; a BiGraph has its groups above and below; a
    small star has its hub in the middle; nodes that forward to one another make a circle, or a grid if a torus.
    """
    scene = compose(cluster)
    hubs, nodes = scene.of_kind("switch"), scene.of_kind("node")
    if not hubs:
        sides = torus_sides(scene)
        return grid(scene, sides) if sides else circle(scene)
    plain = all(scene.neighbours[node] == hubs for node in nodes) and all(edge.square is None for edge in scene.edges)
    if plain and len(hubs) == 1 and 3 <= len(nodes) <= _MOST_AROUND_A_HUB:
        return circle(scene, hubs[0])
    return layers(scene)
