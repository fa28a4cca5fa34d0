"""A model ready to serve: weights, text codec, chat template, and how its sessions share a pass."""
