"""Triton implementation for GPUs."""
