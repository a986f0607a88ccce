"""The GPU kernels: a package for each generation, and beside it what they share."""
