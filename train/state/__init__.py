"""The state of training: its arrays, their placement on devices, and how it is saved and restored."""
