"""What a machine with a GPU has to prove: ``make gpu-check``."""
