"""The service: routes, the MLX thread, the audit store and the command line."""
