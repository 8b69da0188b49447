//! Kernels of Russet's own. [`cpu`] holds plain functions over slices for the central processor: they know
//! nothing of arrays or graphs and can be tested alone.

pub mod cpu;
pub mod ops;
