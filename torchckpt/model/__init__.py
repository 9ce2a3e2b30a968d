"""Arithmetic without torch: schedules, their simulation and bounds."""
