"""Word documents made ready for their converter, which leaves out what it does not know."""
