"""Other servers of MLX models beside ours: installed from PyPI, asked the same in turns, and watched from outside."""
