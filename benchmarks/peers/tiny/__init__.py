"""Small settings from large ones: by the names and values of a configuration, and what some families need besides."""
