/// Why a generation could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model refused or failed.
    #[error(transparent)]
    Model(#[from] russet_model::Error),
    /// Tokenizer or template refused or failed.
    #[error(transparent)]
    Text(#[from] russet_text::Error),
    /// MLX refused or failed.
    #[error("MLX: {0}")]
    Mlx(#[from] russet_mlx::Error),
    /// A request option has a value that can't be used.
    #[error("{option}: {message}")]
    Option {
        /// The option, named as on the command line without dashes.
        option: &'static str,
        /// What is wrong.
        message: String,
    },
    /// The prompt does not fit.
    #[error("{0}")]
    Prompt(String),
    /// The request was not answered in time.
    #[error("the request's time is over")]
    Deadline,
    /// The engine is told to stop and takes no more requests.
    #[error("the engine is shutting down and takes no more requests")]
    Stopping,
    /// The engine can't run, or does not run any more.
    #[error("the engine can't run: {0}")]
    Engine(String),
    /// The model computed NaN or an infinity.
    #[error(
        "the model's logits are not finite after {tokens} tokens: its weights are damaged or overflow {dtype}"
    )]
    NotFinite {
        /// Tokens in the cache.
        tokens: usize,
        /// The dtype of the logits.
        dtype: russet_mlx::Dtype,
    },
}

/// The result of a generation.
pub type Result<T> = std::result::Result<T, Error>;
