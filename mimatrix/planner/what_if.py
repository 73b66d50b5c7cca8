"""Plans for devices that may not exist: a described cluster, or measured ranks, with some devices added."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from mimatrix.cluster import Cluster
from mimatrix.cluster.model import Bus, Device, Link, Node
from mimatrix.core.device_kinds import match_kind
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_rate
from mimatrix.planner.communication import MeasuredCommunication, SimulatedCommunication
from mimatrix.planner.device_matching import assign_profiles, label_devices, list_devices
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import CommunicationModel, Problem
from mimatrix.planner.model.profile import STAGES, Measurements, Profile
from mimatrix.planner.planner import make_plan

_MAX_ADDED = 1024


@dataclass(frozen=True, slots=True)
class Addition:
    """A number of devices of a kind."""

    kind: str
    count: int

    @classmethod
    def parse(cls, text: str) -> "Addition":
        """Read `RTX 3090:2`, or `RTX 3090` for one."""
        match = re.fullmatch(r"\s*(?P<kind>[^:]*[^:\s])\s*(?::\s*(?P<count>\d+)\s*)?", text)
        count = int(match["count"] or 1) if match else 0
        if not match or not 1 <= count <= _MAX_ADDED:
            raise UserError(f'"{text}" names no devices to add; write a kind and a number from 1, as in "RTX 3090:2"')
        return cls(match["kind"], count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A planning problem, with where it comes from."""

    title: str
    """What the devices are, for people."""
    problem: Problem
    additions: tuple[str, ...] = ()
    """How devices were added, a sentence for each."""

    def make_plan(self) -> Plan:
        """Return the plan. Its first reason is a warning if nothing is known of communication."""
        plan = make_plan(self.problem)
        if plan.communication_known:
            return plan
        reason = self.problem.communication.cost(tuple(range(len(plan.parts)))).reason
        warning = (
            f"communication is unknown{f' ({reason})' if reason else ''} and counted as nothing, so steps will take "
            f"longer; describe the network: --cluster lab.toml"
        )
        return replace(plan, reasons=(warning, *plan.reasons))


def scenario(
    measurements: Measurements,
    cluster: Cluster | None = None,
    additions: Sequence[Addition] = (),
    *,
    global_batch: int,
    stages: tuple[int, ...] = STAGES,
    may_leave_out: bool = False,
) -> Scenario:
    """Return the problem of training the measured model on a cluster, or on the measured ranks, with more devices.

    Args:
        measurements: What was measured of the model, on some device of every kind.
        cluster: The devices and the network, whose communication is simulated; if omitted, the measured ranks, whose
            communication is scaled to their number.
        additions: Devices to add.
        global_batch: Samples of a step, on all devices together.
        stages: The stages that may be chosen.
        may_leave_out: Whether devices that slow the job down may be left out.

    Raises:
        UserError: A kind of device was not measured, or devices cannot be added to this cluster.

    Example:
        more = scenario(measurements, load_cluster("lab.toml"), [Addition("RTX 3090", 2)], global_batch=512)
        print(more.make_plan().samples_per_s)
    """
    devices = _on_cluster(measurements, cluster, additions) if cluster else _on_ranks(measurements, additions)
    problem = Problem(
        global_batch=global_batch,
        model=measurements.model,
        profiles=devices.profiles,
        names=devices.names,
        communication=devices.communication,
        stages=stages,
        equal_counts=measurements.equal_counts,
        one_micro_step=measurements.equal_counts,
        may_leave_out=may_leave_out,
    )
    return Scenario(title=devices.title, problem=problem, additions=devices.additions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScenarioDevices:
    title: str
    profiles: tuple[Profile, ...]
    names: tuple[str, ...]
    communication: CommunicationModel
    additions: tuple[str, ...]


def _on_cluster(measurements: Measurements, cluster: Cluster, additions: Sequence[Addition]) -> _ScenarioDevices:
    sentences = []
    for addition in additions:
        cluster, sentence = add_node(cluster, addition)
        sentences.append(sentence)
    return _ScenarioDevices(
        title=cluster.name,
        profiles=assign_profiles(list_devices(cluster), measurements.profiles),
        names=label_devices(cluster),
        communication=SimulatedCommunication(cluster, measurements.model.gradient_bytes),
        additions=tuple(sentences),
    )


def _on_ranks(measurements: Measurements, additions: Sequence[Addition]) -> _ScenarioDevices:
    ranks = len(measurements.profiles)
    added = [Device(addition.kind) for addition in additions for _ in range(addition.count)]
    profiles = (*measurements.profiles, *assign_profiles(added, measurements.profiles))
    group = f"{ranks} measured ranks" if ranks > 1 else "measured rank"
    cost = "unknown" if ranks == 1 or measurements.communication.is_free else "scaled from theirs"
    return _ScenarioDevices(
        title="the measured ranks",
        profiles=profiles,
        names=tuple(f"rank {rank} {profile.device}" for rank, profile in enumerate(profiles)),
        communication=MeasuredCommunication(measurements.communication, ranks),
        additions=tuple(
            f"{addition.count} x {addition.kind} added to the {group}, communication {cost}" for addition in additions
        ),
    )


def add_node(cluster: Cluster, addition: Addition) -> tuple[Cluster, str]:
    """Return the cluster with one more node that holds the devices, and a sentence that says where it is.

    The node is connected to the switch with most nodes and is like those: a kind of device that the cluster has brings
    its memory, and the NIC is the median of the switch's.
    """
    switch, links = _busiest_switch(cluster)
    rate = median_low(link.rate_bytes_per_s for link in links)
    link = next(link for link in links if link.rate_bytes_per_s == rate)
    device = _device_like(cluster, addition.kind)
    name = _new_name(cluster)
    node = Node(name, (device,) * addition.count, _bus(cluster) if addition.count > 1 else None)
    grown = replace(
        cluster,
        nodes=(*cluster.nodes, node),
        links=(*cluster.links, Link(name, switch, rate, link.latency_s)),
    )
    what = f"{addition.count} x {addition.kind}"
    return grown, f"{what} added as node {name} on switch {switch}, with one NIC of {format_rate(rate)}"


def _device_like(cluster: Cluster, kind: str) -> Device:
    devices = list_devices(cluster)
    matches = match_kind(kind, [device.kind for device in devices])
    return next((device for device in devices if device.kind in matches), Device(kind))


def _busiest_switch(cluster: Cluster) -> tuple[str, Sequence[Link]]:
    """Return the switch that most nodes and devices are connected to, and their links."""
    switches = {switch.name for switch in cluster.switches}
    nics: dict[str, list[Link]] = {}
    for link in cluster.links:
        if (link.a in switches) != (link.b in switches):
            nics.setdefault(link.a if link.a in switches else link.b, []).append(link)
    if not nics:
        raise UserError(
            f"nothing can be added to {cluster.name}, whose nodes are not connected to a switch; describe the larger "
            f"cluster in a file"
        )
    name = max(nics, key=lambda name: len(nics[name]))
    return name, nics[name]


def _bus(cluster: Cluster) -> Bus | None:
    return next((node.bus for node in cluster.nodes if node.bus), None)


def _new_name(cluster: Cluster) -> str:
    names = (f"added{number or ''}" for number in range(len(cluster.kind_of) + 1))
    return next(name for name in names if name not in cluster.kind_of)
