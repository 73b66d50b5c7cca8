"""Keys of submissions, by which a client that repeats a request gets the same job."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "submission_keys",
        sa.Column("user", sa.String(length=100), nullable=False),
        sa.Column("key", sa.String(length=100), nullable=False),
        sa.Column("job", number, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("user", "key"),
    )
    op.create_index("ix_submission_keys_at", "submission_keys", ["at"], unique=False)
