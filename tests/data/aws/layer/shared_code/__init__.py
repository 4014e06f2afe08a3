"""Code that the functions share through a layer."""

GREETING = "from the layer"
