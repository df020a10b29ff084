"""How keys and values of other ranks come, and how their gradients go back."""
