"""What Alembic runs: upgrades go over the connection that the server has open."""

from alembic import context

from mimatrix.server.db.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
