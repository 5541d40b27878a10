"""What a budget costs, on a real model: see README.md in the folder above."""
