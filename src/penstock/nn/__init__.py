"""Stateless layers made of kernels."""
