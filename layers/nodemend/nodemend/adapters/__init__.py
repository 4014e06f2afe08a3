"""One module per outside system; each implements a port of `application/ports.py`."""
