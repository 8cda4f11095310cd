"""Pipeline and expert parallelism for mixture-of-experts training in JAX."""
