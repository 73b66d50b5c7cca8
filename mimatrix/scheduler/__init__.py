"""Which jobs run next: a pure function of devices, jobs and time; and traces replayed through it."""

from mimatrix.core.resources import DeviceRequest, ResourceRequest
from mimatrix.scheduler.reasons import StartKind, StartReason, StopKind, StopReason, WaitKind, WaitReason
from mimatrix.scheduler.scheduler import Reservation, decide, effective_priorities, reservation
from mimatrix.scheduler.state import Decision, DeviceSlot, Policy, Preempt, Queued, Running, Start, State, Stop, Wait

__all__ = [
    "Decision",
    "DeviceRequest",
    "DeviceSlot",
    "Policy",
    "Preempt",
    "Queued",
    "Reservation",
    "ResourceRequest",
    "Running",
    "Start",
    "StartKind",
    "StartReason",
    "State",
    "Stop",
    "StopKind",
    "StopReason",
    "Wait",
    "WaitKind",
    "WaitReason",
    "decide",
    "effective_priorities",
    "reservation",
]
