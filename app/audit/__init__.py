"""The audit database: its tables, the values in them, every way of writing to it, every query."""
