"""The state of training: what it is made of, where it lies, how it is saved and comes back."""
