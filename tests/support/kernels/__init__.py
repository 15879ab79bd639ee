"""Kernels on a machine that cannot run them: emulated, interpreted or only compiled; and what they are tried on."""
