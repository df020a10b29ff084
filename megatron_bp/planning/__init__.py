"""What a run would need and take, from counts alone: no rank, no device, no model is made."""
