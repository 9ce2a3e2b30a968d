"""The private modules of the graph level."""
