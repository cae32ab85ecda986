"""One module a command, each with `register(app)`; what takes long to import is imported inside the command."""
