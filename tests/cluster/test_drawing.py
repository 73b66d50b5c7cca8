"""Pictures looked at by the artists and the numbers that they are made of."""

import io
import math
import subprocess
import sys
import textwrap
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from mimatrix.cluster import Cluster, Device, Link, Node, Switch, topology_from_name
from mimatrix.cluster.drawing import draw
from mimatrix.cluster.layout import Box, GraphLayout, arrange
from mimatrix.cluster.layout.scene import SQUARE

FAMILIES = [
    "star:1",
    "star:2",
    "star:8",
    "star:4,rate=2*40Gbit+2*10Gbit",
    "star:30",
    "leaf_spine:4x8",
    "leaf_spine:4x8,oversubscription=2",
    "leaf_spine:2x2,devices=8",
    "leaf_spine:2x2,devices=4,nic=own,fanout=1",
    "fat_tree:4",
    "bigraph:4x4",
    "bigraph:2x2,parallel=2",
    "bigraph:4x4,devices=4,nic=own",
    "ring:1",
    "ring:2",
    "ring:8",
    "ring:3,devices=8",
    "torus:4x4",
    "torus:2x5",
    "torus:3x3x3",
    "mixed",
]


def mixed() -> Cluster:
    """Unlike nodes on three switches that are no family, one of them cut off."""
    nodes = (
        Node("server0", (Device("A100"),) * 4),
        Node("a-workstation-with-a-very-long-name", (Device("GTX1080"), Device("cpu"))),
        Node("laptop", (Device("cpu"),)),
        Node("lost", (Device("an accelerator with a name that fills a line"),)),
    )
    links = (
        Link("server0/0", "rack", 12.5e9),
        Link("server0/2", "rack", 1.25e9),
        Link("a-workstation-with-a-very-long-name", "office", 1.25e8),
        Link("laptop", "office", 1.25e7),
        Link("rack", "backbone", 5e9, parallel=4),
        Link("office", "backbone", 2.5e9),
        Link("rack", "office", 1.25e9),
        Link("rack", "store", 1.25e9),
        Link("office", "store", 2e9),
    )
    switches = (Switch("rack", "x"), Switch("store"), Switch("office"), Switch("backbone"))
    return Cluster("a $\\frac{lab}$ of x_1 machines", nodes, switches, links)


@cache
def cluster(word: str) -> Cluster:
    return mixed() if word == "mixed" else topology_from_name(word)


@cache
def picture(word: str) -> Figure:
    """Drawn once for all tests that only look."""
    return draw(cluster(word))


def boxes(figure: Figure, role: str) -> list[FancyBboxPatch]:
    patches = [each for each in figure.axes[0].patches if isinstance(each, FancyBboxPatch)]
    return [patch for patch in patches if str(patch.get_gid()).startswith(f"{role}:")]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]


def by_name(layout: GraphLayout) -> dict[str, Box]:
    return {box.name: box for box in layout.boxes}


def legend(figure: Figure) -> dict[str, object]:
    return {
        str(text.get_text()): handle
        for text, handle in zip(figure.legends[0].get_texts(), figure.legends[0].legend_handles, strict=True)
    }


@pytest.mark.parametrize("word", FAMILIES)
def test_saves_as_png_and_svg(word: str) -> None:
    figure = picture(word)
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        file = io.BytesIO()
        figure.savefig(file, format=kind)
        assert file.getvalue().startswith(start)
    assert to_hex(figure.get_facecolor()) == "#ffffff"


@pytest.mark.parametrize("word", FAMILIES)
def test_one_box_per_node_and_switch_and_one_square_per_device(word: str) -> None:
    figure = picture(word)
    for role, vertices in (("node", cluster(word).nodes), ("switch", cluster(word).switches)):
        drawn = sorted(str(box.get_gid()) for box in boxes(figure, role))
        assert drawn == sorted(f"{role}:{vertex.name}" for vertex in vertices)
    squares = next(each for each in figure.axes[0].collections if isinstance(each, PatchCollection))
    assert len(squares.get_paths()) == len(cluster(word).device_names)


@pytest.mark.parametrize("word", FAMILIES)
def test_one_line_per_link(word: str) -> None:
    figure = picture(word)
    lines = [each for each in figure.axes[0].collections if isinstance(each, LineCollection)]
    assert sum(len(each.get_segments()) for each in lines) == len(cluster(word).links)


@pytest.mark.parametrize("word", [*FAMILIES, "bigraph:8x8", "leaf_spine:16x8,devices=8"])
def test_no_text_overlaps_another_or_leaves_the_page(word: str) -> None:
    figure = picture(word)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()]
    frames = {f"{number}: {text.get_text()}": text.get_window_extent() for number, text in enumerate(texts)}
    page = figure.bbox.padded(1)
    for name, frame in frames.items():
        assert page.x0 <= frame.x0 <= frame.x1 <= page.x1, name
        assert page.y0 <= frame.y0 <= frame.y1 <= page.y1, name
    for (one, first), (other, second) in combinations(frames.items(), 2):
        assert not _overlap(first, second), (one, other)


def _overlap(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    # The frames of text have room for letters that reach below the line: a pixel or two is no collision.
    return shared is not None and shared.width > 1 and shared.height > 2


@pytest.mark.parametrize("word", [*FAMILIES, "leaf_spine:40x40", "torus:12x12"])
def test_no_box_overlaps_another(word: str) -> None:
    for one, other in combinations(arrange(cluster(word)).boxes, 2):
        apart_x = abs(one.at[0] - other.at[0]) - (one.width + other.width) / 2
        apart_y = abs(one.at[1] - other.at[1]) - (one.height + other.height) / 2
        assert max(apart_x, apart_y) > 0, (one.name, other.name)


def test_names_and_counts_are_written() -> None:
    said = words(draw(topology_from_name("leaf_spine:2x2,devices=8")))
    assert said.count("leaf_spine:2x2,devices=8") == 1
    assert "4 nodes, 32 devices, 4 switches" in said
    assert {"leaf0", "leaf1", "spine0", "spine1", "n0", "n3", "100Gbit", "gpu", "2 spine switches"} <= set(said)


def test_long_names_are_shortened_and_dollars_are_no_formulas() -> None:
    said = words(draw(mixed()))
    assert "a-workstation-w…" in said
    assert "a $\\frac{lab}$ of x_1 machines" in said


def test_names_go_where_they_have_no_room() -> None:
    assert "n0" in words(draw(topology_from_name("star:40")))
    said = words(draw(topology_from_name("star:41")))
    assert "n0" not in said
    assert "41 nodes" in said


def test_layers_from_nodes_to_core() -> None:
    placed = by_name(arrange(topology_from_name("fat_tree:4")))
    tiers = [
        {box.at[1] for box in placed.values() if box.name.startswith(kind)} for kind in ("n", "edge", "agg", "core")
    ]
    assert [len(tier) for tier in tiers] == [1, 1, 1, 1]
    assert sorted(tiers, key=max) == tiers


def test_nodes_hang_under_their_own_leaf() -> None:
    placed = by_name(arrange(topology_from_name("leaf_spine:4x8")))
    for index in range(32):
        leaf = min(
            (placed[f"leaf{each}"] for each in range(4)), key=lambda box: abs(box.at[0] - placed[f"n{index}"].at[0])
        )
        assert leaf.name == f"leaf{index // 8}"


def test_bigraph_has_its_groups_above_and_below() -> None:
    placed = by_name(arrange(topology_from_name("bigraph:4x4")))
    heights = [placed[name].at[1] for name in ("n0", "upper0", "lower0", "n16")]
    assert heights == sorted(heights, reverse=True)
    # Devices face the network: below the name in the upper nodes, above it in the lower.
    assert placed["n0"].squares[0].at[1] < placed["n0"].text_at[1]
    assert placed["n16"].squares[0].at[1] > placed["n16"].text_at[1]


def test_bigraph_of_rails_has_its_nodes_between_the_groups() -> None:
    placed = by_name(arrange(topology_from_name("bigraph:4x4,devices=4,nic=own")))
    assert placed["lower0"].at[1] < placed["n0"].at[1] < placed["upper0"].at[1]
    up, down = (placed["n0"].squares[number].at[1] for number in (0, 1))
    assert down < placed["n0"].text_at[1] < up


@pytest.mark.parametrize("word", ["star:8", "ring:8"])
def test_star_and_ring_are_round(word: str) -> None:
    layout = arrange(topology_from_name(word))
    around = [box.at for box in layout.boxes if box.kind == "node"]
    assert len(around) == 8
    assert [math.hypot(*at) for at in around] == pytest.approx([math.hypot(*around[0])] * 8)
    assert all(box.at == (0, 0) for box in layout.boxes if box.kind == "switch")


def test_torus_is_a_grid_whose_ends_are_joined_around() -> None:
    layout = arrange(topology_from_name("torus:3x4"))
    assert len({box.at[0] for box in layout.boxes}) == 4
    assert len({box.at[1] for box in layout.boxes}) == 3
    assert sum(polyline.pale for polyline in layout.polylines) == 3 + 4
    placed = by_name(layout)
    assert placed["n0"].at[1] == placed["n3"].at[1] > placed["n4"].at[1]


def test_nodes_that_are_not_a_torus_make_a_circle() -> None:
    whole = topology_from_name("torus:4x4")
    broken = Cluster("broken", whole.nodes, (), whole.links[1:])
    assert len({round(math.hypot(*box.at), 6) for box in arrange(broken).boxes}) == 1


def test_own_nics_end_at_devices_and_shared_ones_at_the_box() -> None:
    layout = arrange(topology_from_name("leaf_spine:2x2,devices=4,nic=own"))
    placed = by_name(layout)
    ends = [polyline.points[0] for polyline in layout.polylines if polyline.edge.a == "n1"]
    squares = [square.at for square in placed["n1"].squares]
    assert ends == [pytest.approx((x, y + SQUARE / 2)) for x, y in squares]
    layout = arrange(topology_from_name("leaf_spine:2x2,devices=4"))
    node = by_name(layout)["n1"]
    ends = [polyline.points[0] for polyline in layout.polylines if polyline.edge.a == "n1"]
    assert ends == [pytest.approx((node.at[0], node.at[1] + node.height / 2))]


def test_polylines_of_switches_end_at_their_edges() -> None:
    layout = arrange(topology_from_name("leaf_spine:4x8"))
    placed = by_name(layout)
    for polyline in layout.polylines:
        for name, (x, y) in ((polyline.edge.a, polyline.points[0]), (polyline.edge.b, polyline.points[-1])):
            box = placed[name]
            assert abs(y - box.at[1]) == pytest.approx(box.height / 2)
            assert abs(x - box.at[0]) <= box.width / 2


def test_rates_differ_in_colour_and_width() -> None:
    figure = draw(topology_from_name("star:4,rate=2*40Gbit+2*10Gbit"))
    entries = legend(figure)
    assert list(entries) == ["10Gbit", "40Gbit", "gpu"]
    (lines,) = (each for each in figure.axes[0].collections if isinstance(each, LineCollection) and each.get_segments())
    colours, widths = np.asarray(lines.get_edgecolor()).tolist(), np.asarray(lines.get_linewidth()).tolist()
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert widths[0] == widths[1] > widths[2] == widths[3]


def test_many_rates_share_colours() -> None:
    rates = "+".join(f"{rate}Gbit" for rate in range(1, 21))
    entries = list(legend(draw(topology_from_name(f"star:20,rate={rates}"))))
    assert len(entries) == 7
    assert entries[0] == "1Gbit to 4Gbit"


def test_parallel_cables_are_counted() -> None:
    figure = draw(topology_from_name("bigraph:2x2,parallel=3"))
    assert "3 × 100Gbit" in legend(figure)
    nodes, links = (
        (Node("a", (Device(),)), Node("b", (Device(),))),
        (Link("a", "s", 1e9, parallel=2), Link("b", "s", 1e9)),
    )
    assert words(draw(Cluster("two", nodes, (Switch("s"),), links))).count("×2") == 1


def test_labels_of_cables_are_on_all_alike_strands_or_on_none() -> None:
    assert words(draw(topology_from_name("bigraph:4x4,parallel=2"))).count("×2") in (0, 16)


def test_kinds_of_devices_are_in_the_legend() -> None:
    assert {"A100", "GTX1080", "cpu"} <= legend(draw(mixed())).keys()


@pytest.mark.parametrize("word", ["bigraph:16x16", "leaf_spine:32x32", "fat_tree:12", "star:4096", "bigraph:64x8"])
def test_crowds_become_bundles(word: str) -> None:
    layout = arrange(cluster(word))
    bundles = [box for box in layout.boxes if box.kind == "bundle"]
    homes = {link.b for link in cluster(word).links if link.a.startswith("n")}
    assert len(bundles) == len(homes)
    nics = [polyline.edge.cables for polyline in layout.polylines if polyline.edge.a in {box.name for box in bundles}]
    assert sum(nics) == len(cluster(word).nodes)


def test_bundles_say_how_many_they_are() -> None:
    figure = draw(topology_from_name("bigraph:16x16"))
    assert len(boxes(figure, "bundle")) == 32
    assert words(figure).count("16 nodes") == 32
    assert words(figure).count("16 × 16 nodes") == 2
    assert words(figure).count("×16") == 32
    said = words(draw(topology_from_name("leaf_spine:8x16,devices=8")))
    assert said.count("16 nodes\n128 devices") == 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("word", ["leaf_spine:128x32", "torus:32x32", "ring:300"])
def test_large_clusters_are_drawn_within_the_page(word: str) -> None:
    figure = draw(topology_from_name(word))
    figure.savefig(io.BytesIO(), format="png", dpi=50)
    width, height = figure.get_size_inches()
    assert width < 23
    assert height < 13


def test_neither_pyplot_nor_the_package_itself_loads_a_screen() -> None:
    program = """
        import sys
        import mimatrix.cluster
        assert "matplotlib" not in sys.modules, "mimatrix.cluster imports matplotlib"
        from mimatrix.cluster.drawing import draw
        draw(mimatrix.cluster.topology_from_name("star:4"))
        assert "matplotlib.pyplot" not in sys.modules, "drawing imports pyplot"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
