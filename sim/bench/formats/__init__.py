"""One file a tool: whether a document is its own, and the measured runs in it."""
