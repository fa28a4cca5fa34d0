"""What HTTP sees: the Litestar application and its server, bodies, problem responses, server-sent events."""
