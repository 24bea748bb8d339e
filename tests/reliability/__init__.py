"""What goes wrong around a training that is watched, injected on purpose, and what is left standing."""
