"""Wire shapes: what crosses the border of a process, parsed and checked by Pydantic."""
