//! Safe binding to MLX.
