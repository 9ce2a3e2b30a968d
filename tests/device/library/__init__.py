"""torchckpt on the simulated device."""
