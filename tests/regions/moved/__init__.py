"""Regions whose saved tensors go to the host."""
