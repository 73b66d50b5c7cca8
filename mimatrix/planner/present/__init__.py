"""A plan for people: rows of a table, and a drawing."""
