"""Kernels for machines that cannot run them natively: emulated, interpreted or only compiled; and their test inputs."""
