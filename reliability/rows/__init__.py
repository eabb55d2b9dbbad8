"""The rows of the table, one module for each group that is tested in the same way."""
