"""What nodemend knows and decides. Pure: standard library only, no clock, no network."""
