"""The `nodemend` command for operators: pause, resume, policy check, policy deploy."""
