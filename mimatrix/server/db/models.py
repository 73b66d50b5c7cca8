"""The tables of the server. Times are seconds since 1970; lists and tables within a row are JSON."""

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite numbers rows by itself only in a column of plain INTEGER.
_Number = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """The base of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {dict[str, Any]: JSON, list[str]: JSON, dict[str, str]: JSON}


class JobRow(Base):
    """A job. Its `state` changes in `lifecycle.transition` and nowhere else."""

    __tablename__ = "jobs"

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    user: Mapped[str] = mapped_column(String(100), index=True)
    state: Mapped[str] = mapped_column(String(20), index=True)
    reason: Mapped[str] = mapped_column(Text, default="")
    reason_data: Mapped[dict[str, Any]] = mapped_column(default=dict)
    script: Mapped[str] = mapped_column(Text)
    arguments: Mapped[list[str]] = mapped_column(default=list)
    environment: Mapped[dict[str, str]] = mapped_column(default=dict)
    code_archive: Mapped[str] = mapped_column(String(64))
    devices: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(Integer)
    preemptible: Mapped[bool]
    max_time_s: Mapped[float | None] = mapped_column(Float)
    max_restarts: Mapped[int] = mapped_column(Integer, default=0)
    restarts: Mapped[int] = mapped_column(Integer, default=0)
    """How often it was restarted after a failure since a user queued it."""
    groups: Mapped[list[Any]] = mapped_column(JSON, default=list)
    """The ranks of each group of hybrid mode."""
    generation: Mapped[int] = mapped_column(Integer, default=0)
    allocation: Mapped[list[str]] = mapped_column(default=list)
    """The devices that it holds, in the order of its ranks."""
    stop_kind: Mapped[str] = mapped_column(String(20), default="")
    """A `StopKind` if it was told to stop."""
    stop_requested_at: Mapped[float | None] = mapped_column(Float)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    exit_cause: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    failed_rank: Mapped[int | None] = mapped_column(Integer)
    server_error: Mapped[str] = mapped_column(Text, default="")
    """What the server could not handle about it since it was started last, if anything."""
    start_failures: Mapped[int] = mapped_column(Integer, default=0)
    """Failed attempts to start it since it ran last."""
    created_at: Mapped[float] = mapped_column(Float)
    submitted_at: Mapped[float] = mapped_column(Float)
    """When a user queued it last: what it ages from, also after it was preempted or restarted."""
    waiting_since: Mapped[float] = mapped_column(Float)
    """When it came into the queue last."""
    started_at: Mapped[float | None] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    progress: Mapped[dict[str, Any]] = mapped_column(default=dict)
    # Large, and seldom asked for: read when somebody looks at it.
    profile: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    plan: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    checkpoints: Mapped[list[Any]] = mapped_column(JSON, default=list, deferred=True)
    """The newest first."""


class EventRow(Base):
    """An event of a job."""

    __tablename__ = "events"
    __table_args__ = (Index("events_of_job", "job", "id"), Index("events_of_time", "at"))

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(20))
    generation: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(40))
    reason: Mapped[str] = mapped_column(Text)
    """The sentence for people; no code reads it."""
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class NodeRow(Base):
    """A node that the launcher has listed."""

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    address: Mapped[str] = mapped_column(String(200))
    rack: Mapped[str] = mapped_column(String(200))
    devices: Mapped[dict[str, Any]] = mapped_column(default=dict)
    seen_at: Mapped[float] = mapped_column(Float)


class TokenRow(Base):
    """A token: the hash of a secret that only its bearer has."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    user: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(20))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    job: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    """The job of a worker's token, which is valid as long as the job runs."""
    created_at: Mapped[float] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)


class UsageRow(Base):
    """What a user had recently, as of a time."""

    __tablename__ = "usage"

    user: Mapped[str] = mapped_column(String(100), primary_key=True)
    amount: Mapped[float] = mapped_column(Float)
    at: Mapped[float] = mapped_column(Float)


class AllocationRow(Base):
    """A device that a job had, or has."""

    __tablename__ = "allocations"
    __table_args__ = (Index("allocations_of_device", "device", "id"), Index("allocations_of_job", "job", "ended_at"))

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    device: Mapped[str] = mapped_column(String(220))
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    generation: Mapped[int] = mapped_column(Integer)
    started_at: Mapped[float] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)


class SampleRow(Base):
    """Metrics of a job at a time, or means over a period (see `metrics.store`); those of the cluster under job 0."""

    __tablename__ = "samples"
    __table_args__ = (Index("samples_of_tier", "tier", "at"),)

    job: Mapped[int] = mapped_column(_Number, primary_key=True, autoincrement=False)
    tier: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float, primary_key=True)
    figures: Mapped[dict[str, Any]] = mapped_column(default=dict)


class AuditRow(Base):
    """A request that changed something, or tried to."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    at: Mapped[float] = mapped_column(Float, index=True)
    user: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(20))
    action: Mapped[str] = mapped_column(String(200))
    status: Mapped[int] = mapped_column(Integer)
    address: Mapped[str] = mapped_column(String(100))


class CodeArchiveRow(Base):
    """A code archive, and the user who uploaded it first."""

    __tablename__ = "code_archives"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    user: Mapped[str] = mapped_column(String(100), index=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    uploaded_at: Mapped[float] = mapped_column(Float)


class SubmissionKeyRow(Base):
    """The job that a user's submission with a key became, so that a repeated request is not another job."""

    __tablename__ = "submission_keys"

    user: Mapped[str] = mapped_column(String(100), primary_key=True)
    key: Mapped[str] = mapped_column(String(100), primary_key=True)
    job: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[float] = mapped_column(Float, index=True)
