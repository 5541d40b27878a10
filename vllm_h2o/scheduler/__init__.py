"""The scheduler's side, in the engine-core process: integers only."""
