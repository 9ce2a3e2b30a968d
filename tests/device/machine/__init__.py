"""The simulated device itself: its streams, clocks, memory, random numbers, and how it is built."""
