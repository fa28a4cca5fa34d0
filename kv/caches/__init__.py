"""The cache of a layer and its books: what is held, scored, chosen to leave, lifted out and put in."""
