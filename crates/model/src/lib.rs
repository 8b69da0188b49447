//! Config, weights, layers, caches and model graphs.
