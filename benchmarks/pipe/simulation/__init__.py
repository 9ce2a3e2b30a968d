"""The parts of simulated.py: machines, stages, trials of variants, observed steps, bytes, and torchgpipe's graph."""
