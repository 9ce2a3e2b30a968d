"""Regions and torch.compile."""
