"""Pipelines on several processes."""
