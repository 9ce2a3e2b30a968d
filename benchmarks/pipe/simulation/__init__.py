"""What simulated.py runs: machines, stages, trials of variants, what was seen of them, bytes, torchgpipe's graph."""
