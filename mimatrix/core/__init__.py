"""The words every other package speaks: errors, units, configuration tables. Imports nothing of ours."""
