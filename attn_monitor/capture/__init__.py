"""Seeing attention calls: the function mode, following tensors, which axis is which, who owns a call."""
