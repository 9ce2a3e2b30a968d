"""Away."""
