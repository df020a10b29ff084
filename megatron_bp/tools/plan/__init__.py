"""The planner: which layout a model needs on so many GPUs, counted on any machine."""
