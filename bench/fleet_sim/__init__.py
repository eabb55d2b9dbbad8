"""Runs a fleet of replicas in simulated time: conversations, replicas with prefix caches, and competing routers.

Nothing sleeps and no model runs, so a thousand replicas take minutes on one processor. Not part of the wheel.
"""
