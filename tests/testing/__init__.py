"""What users' tests count: replays, saved bytes by line, peaks."""
