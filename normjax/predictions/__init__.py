"""What is expected of a grid before it runs: read, asked for, stored with its time. No JAX."""
