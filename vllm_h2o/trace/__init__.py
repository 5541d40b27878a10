"""What the cache kept of one prompt, step by step, and a page that shows it."""
