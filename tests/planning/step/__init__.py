"""One step: see torchckpt/planning/step."""
