"""The Attention tab in a real browser, with TensorBoard around it."""
