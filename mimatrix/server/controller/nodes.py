"""The nodes that answer, and their devices as the scheduler sees them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from mimatrix.core.errors import MiMatrixError
from mimatrix.launch import NodeInfo
from mimatrix.scheduler import DeviceSlot
from mimatrix.scheduler.device_speeds import speed_of_kind
from mimatrix.server.context import Context
from mimatrix.server.controller.faults import RepeatedLog
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.db.models import NodeRow

_REFRESH_S = 2.0
"""How often it is written that nodes still answer."""
_MAX_DEVICES = 4096


class NodeTracker:
    """Lists nodes, writes down those that answer, and keeps their devices."""

    def __init__(self, context: Context, log: RepeatedLog) -> None:
        self._context, self._log = context, log
        self._nodes: dict[str, NodeInfo] = {}
        self._written_s = float("-inf")
        self.slots: Mapping[str, DeviceSlot] = {}
        """Devices of nodes that answer, by name; replaced as a whole."""
        self.version = 0
        """Rises when the slots may have changed."""

    def refresh(self) -> None:
        """Look which nodes answer. A node whose facts cannot be used is left out, with a word in the log."""
        try:
            listed = {node.name: node for node in self._context.launcher.nodes()}
        except MiMatrixError as error:
            self._log.warn(f"nodes cannot be listed: {error}")
            return
        now_s = self._context.monotonic()
        if listed == self._nodes and now_s - self._written_s < _REFRESH_S:
            return
        slots: dict[str, DeviceSlot] = {}
        with self._context.sessions.begin(durable=False) as session:
            for node in listed.values():
                try:
                    with session.begin_nested():
                        self._write(session, node)
                    slots |= _slots_of(node)
                except DATABASE_UNAVAILABLE:
                    raise
                except Exception as error:  # noqa: BLE001 (other nodes must not suffer)
                    self._log.warn(f"node {node.name} cannot be used ({error}); see what it says of its devices")
        self.version += slots != self.slots
        self._nodes, self.slots, self._written_s = listed, slots, now_s

    def _write(self, session: Session, node: NodeInfo) -> None:
        """Write what a node says now; what was written before is not read, since it may be unreadable."""
        devices = [{"kind": each.kind, "memory_bytes": each.memory_bytes} for each in node.devices]
        values = {"address": node.address, "rack": node.rack, "seen_at": self._context.clock()}
        values |= {"devices": {"devices": devices}}
        if session.scalar(select(NodeRow.name).where(NodeRow.name == node.name)) is None:
            session.execute(insert(NodeRow).values(name=node.name, **values))
        else:
            session.execute(update(NodeRow).where(NodeRow.name == node.name).values(**values))


def slots_of_row(row: NodeRow) -> dict[str, DeviceSlot]:
    """Return the devices of a node as they were written down."""
    kinds = [str(device["kind"]) for device in row.devices["devices"]]
    return _slots(row.name, row.rack, kinds)


def _slots_of(node: NodeInfo) -> dict[str, DeviceSlot]:
    return _slots(node.name, node.rack, [device.kind for device in node.devices])


def _slots(node: str, rack: str, kinds: list[str]) -> dict[str, DeviceSlot]:
    slots = (
        DeviceSlot(node, number, kind, speed_of_kind(kind), rack) for number, kind in enumerate(kinds[:_MAX_DEVICES])
    )
    return {slot.name: slot for slot in slots}


def slot_named(name: str, slots: Mapping[str, DeviceSlot]) -> DeviceSlot:
    """Return a device by its name, also one whose node does not answer now: the job has it all the same."""
    if name in slots:
        return slots[name]
    node, _, number = name.rpartition("/")
    return DeviceSlot(node, int(number))


def cluster_point(slots: Mapping[str, DeviceSlot], used: int, queued: int) -> dict[str, Any]:
    """Return the metrics of the whole cluster at one time."""
    return {"devices": len(slots), "used": used, "queued": queued}
