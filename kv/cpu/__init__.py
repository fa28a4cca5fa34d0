"""What MLX is slow at on a CPU, done elsewhere: a tuned BLAS, attention in NumPy."""
