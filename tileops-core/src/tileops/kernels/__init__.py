"""Kernel interfaces and the in-tree kernels, one package per interface family."""
