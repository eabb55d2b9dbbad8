"""Predicts what a machine would do: simulates recorded and invented days with the scheduler that serves.

No model computes here. The real scheduler plans on a simulated clock, a model of step times says how long steps take
(`step_costs`), and requests come from records, published traces or distributions. Only `calibration` runs an engine, to
measure steps.
"""
