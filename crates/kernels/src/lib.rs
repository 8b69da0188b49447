//! Kernels of Russet's own. [`cpu`] holds plain functions over slices for the central processor: they know
//! nothing of arrays or graphs and can be tested alone; [`ops`] makes them nodes of MLX's graph. [`gpu`] holds
//! kernels that MLX compiles for the GPU.

pub mod cpu;
pub mod gpu;
pub mod ops;
