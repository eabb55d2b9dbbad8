"""A fleet of replicas in made-up time: conversations, replicas with prefix caches, and routers that compete.

Nothing sleeps and nothing is computed, so a thousand replicas fit into minutes of one processor. No part of the wheel.
"""
