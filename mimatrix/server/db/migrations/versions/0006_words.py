"""The words of the API: allocations, code archives, racks, restarts, stops."""

from alembic import op

revision = "0006"
down_revision = "0005"
_COLUMNS = (
    ("jobs", "seats", "allocation"),
    ("jobs", "snapshot", "code_archive"),
    ("jobs", "retries", "max_restarts"),
    ("jobs", "retried", "restarts"),
    ("jobs", "leaving", "stop_kind"),
    ("jobs", "leaving_at", "stop_requested_at"),
    ("nodes", "near", "rack"),
    ("stints", "seat", "device"),
)


def upgrade() -> None:
    """Rename columns, a table and its indexes."""
    for table, old, new in _COLUMNS:
        # As SQL: Alembic would copy whole tables of SQLite.
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    op.drop_index("stints_of_seat", "stints")
    op.drop_index("stints_of_job", "stints")
    op.rename_table("stints", "allocations")
    op.create_index("allocations_of_device", "allocations", ["device", "id"], unique=False)
    op.create_index("allocations_of_job", "allocations", ["job", "ended_at"], unique=False)
