//! Test support: the Python reference environment, fixtures and recorded reference files.
