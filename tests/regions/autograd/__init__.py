"""Autograd: what regions leave as it is: backwards of every kind, transforms, hooks, outputs."""
