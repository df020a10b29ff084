"""Pictures of plans and runs, from the code that training uses; needs the extra `plot`."""
