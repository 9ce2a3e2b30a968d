"""The cells of the result table: pipelines to run, their rounds and variants, and their requirements."""
