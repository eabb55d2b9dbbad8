"""A runner without tensors, a model without weights and a simulated clock: for tests of everything but numbers."""

from penstock.sim.clock import SimClock
from penstock.sim.fake_model import golden
from penstock.sim.fake_runner import FakeRunner, PlanViolation, StepCost

__all__ = ["FakeRunner", "PlanViolation", "SimClock", "StepCost", "golden"]
