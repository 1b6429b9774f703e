"""Runs models: the only part that imports MLX and mlx-lm, and does so lazily."""
