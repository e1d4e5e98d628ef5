"""Tests of `deeprnn.cells`."""
