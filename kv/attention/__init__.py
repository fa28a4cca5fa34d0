"""Where caches meet a model's attention: the hook, observed queries, and what a model asks of its caches."""
