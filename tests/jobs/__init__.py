"""Jobs that are described: by hand in closed forms, against published counts, and whole plans."""
