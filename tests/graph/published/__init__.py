"""Figures and semantics that others have published."""
