"""One file = one RL algorithm: its calls, what each reads and writes, its losses."""
