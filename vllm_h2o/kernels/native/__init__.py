"""Torch implementation for CPUs, batched over requests and heads."""
