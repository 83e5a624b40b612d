"""The group's side of the star: a base model, its policies, their samples, losses and updates."""
