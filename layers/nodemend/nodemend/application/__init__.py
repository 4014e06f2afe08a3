"""The use cases, one file each, named like its Lambda function, and the ports that they need."""
