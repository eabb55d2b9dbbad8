"""A runner without tensors and a clock without time, for tests."""
