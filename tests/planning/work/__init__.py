"""Blocks, links, choices: see torchckpt/planning/work."""
