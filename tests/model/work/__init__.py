"""Blocks, links, choices: see torchckpt/model/work."""
