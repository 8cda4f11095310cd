"""The trainer: `python -m train`, or `scripts/train`. Nothing else of the project imports it."""
