"""The rows of the table, a module for each group that is tried in the same way."""
