"""What ``keep`` leaves for a replay."""
