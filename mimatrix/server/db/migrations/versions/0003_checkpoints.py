"""What jobs have saved."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("checkpoints", sa.JSON(), nullable=False, server_default="[]"))
