"""Whole models and steps, beside eager."""
