"""One step: see torchckpt/model/step."""
