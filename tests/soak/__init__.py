"""A training of many observed steps, and what must not grow in it."""
