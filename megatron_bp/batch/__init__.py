"""The rows of a step that one rank computes."""
