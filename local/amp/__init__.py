"""Amazon Managed Service for Prometheus on one machine.

`exporter` simulates the fleet's dcgm-exporters, `prometheus` runs a real Prometheus that scrapes
them, `front` answers as AMP's data plane before it, and `stack` starts all three.
"""
