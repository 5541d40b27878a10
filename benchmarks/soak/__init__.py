"""A server under a mixed load, with its pages counted at every step, and then killed."""
