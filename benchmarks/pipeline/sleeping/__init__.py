"""Stages and links that sleep, so that processes which share a few cores behave as devices."""
