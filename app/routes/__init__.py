"""The HTTP routes, one module a domain."""
