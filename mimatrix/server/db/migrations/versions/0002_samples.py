"""Figures over time, and who had which device."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
_number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make their tables."""
    op.create_table(
        "samples",
        sa.Column("job", _number, nullable=False),
        sa.Column("tier", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job", "tier", "at"),
    )
    op.create_index("samples_of_tier", "samples", ["tier", "at"], unique=False)
    op.create_table(
        "stints",
        sa.Column("id", _number, nullable=False),
        sa.Column("seat", sa.String(length=220), nullable=False),
        sa.Column("job", _number, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("stints_of_seat", "stints", ["seat", "id"], unique=False)
    op.create_index("stints_of_job", "stints", ["job", "ended_at"], unique=False)
