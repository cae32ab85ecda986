"""Seconds of single kernels as functions of shapes, fitted parameters and a device's datasheet numbers."""
