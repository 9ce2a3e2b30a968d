"""The operators of the simulated device."""
