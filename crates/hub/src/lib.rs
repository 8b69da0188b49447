//! The model store: finding checkpoints and installing the starter model.
