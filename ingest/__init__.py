"""Documents in, passages out: reading, cutting, indexing and searching, all in one SQLite file."""
