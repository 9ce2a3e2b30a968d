"""Each example, run as users run it, in short."""
