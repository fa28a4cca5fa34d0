"""One controller for each kind of thing that has an address."""
