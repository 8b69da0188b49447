//! Russet: local inference for MLX checkpoints.

fn main() {}
