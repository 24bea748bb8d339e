"""What the callback writes: scalars, pictures and pages for TensorBoard and the other loggers."""
