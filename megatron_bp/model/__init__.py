"""Megatron's GPT model with core attention, rotary and output step of our own."""
