"""Compiles CUDA C++ sources with NVRTC, loads and launches their kernels, and describes tensors to the device."""
