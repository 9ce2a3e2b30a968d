"""The cells of the table: what is run, in which rounds, in which variants, and what must hold of it."""
