/// A failed MLX operation, with MLX's own message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    message: String,
}

/// The result of an MLX operation.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with a message of the caller.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

impl From<cxx::Exception> for Error {
    fn from(e: cxx::Exception) -> Self {
        Self::new(e.what())
    }
}
