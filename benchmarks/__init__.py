"""Measurements: each prints what it saw and ends with one line of JSON."""
