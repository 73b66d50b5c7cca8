"""Reasons as values: kinds and data of events, groups and exit causes of jobs; failed starts."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns, and fill in what older rows can tell."""
    op.add_column("jobs", sa.Column("groups", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("reason_data", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("exit_cause", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("failed_rank", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("server_error", sa.Text(), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("start_failures", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("submitted_at", sa.Float(), nullable=False, server_default="0"))
    op.add_column("events", sa.Column("kind", sa.String(length=40), nullable=False, server_default="phase_changed"))
    op.add_column("events", sa.Column("data", sa.JSON(), nullable=False, server_default="{}"))
    op.create_index("events_of_time", "events", ["at"], unique=False)
    op.create_table(
        "code_archives",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("user", sa.String(length=100), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("uploaded_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_index(op.f("ix_code_archives_user"), "code_archives", ["user"], unique=False)
    op.execute("UPDATE jobs SET submitted_at = waiting_since")
    op.execute("UPDATE jobs SET leaving = 'time_limit' WHERE leaving = 'limit'")
    states = "('starting', 'preempted', 'done', 'failed', 'cancelled')"
    op.execute(f"UPDATE events SET kind = state WHERE state IN {states}")  # noqa: S608 (constants)
