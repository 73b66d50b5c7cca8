"""Replaces sentences in the processes that tests start, which import this file before anything else."""

from support import pseudo_locale

pseudo_locale.install()
