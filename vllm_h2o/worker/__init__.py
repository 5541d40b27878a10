"""The worker's side: which slots are written, attended to, scored and evicted."""
