"""Models between Hugging Face folders and Megatron checkpoints: import, export, check."""
