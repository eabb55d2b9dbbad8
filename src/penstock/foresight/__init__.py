"""What a machine would do: recorded days run again, and days that never were, on the scheduler that serves.

No model computes here. The real scheduler plans on a simulated clock, steps take what a model of step times says
(`step_costs`), and requests come from records, published traces or distributions. Only `calibration` runs an engine, to
measure steps.
"""
