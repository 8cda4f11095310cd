"""JAX collectives and the mesh they run on; knows no schedules."""

from dualpipe_jax.parallel.mesh import EP, PP, make_mesh

__all__ = ["EP", "PP", "make_mesh"]
