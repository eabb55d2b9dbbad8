"""Decisions: block pool, sequences, policies, the scheduler, the trace codec. Standard library only; no clock, threads or I/O."""
