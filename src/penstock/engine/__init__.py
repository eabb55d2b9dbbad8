"""The loop that joins core, text and a runner; local clients; recording."""
