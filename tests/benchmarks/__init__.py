"""Each benchmark, in short: counts and orders, no seconds."""
