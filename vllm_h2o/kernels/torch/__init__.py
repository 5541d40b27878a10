"""Kernels in plain torch, for any device."""
