"""Options of a policy: their values, their checks, and what they go together with."""
