//! Why a kernel refused to run.

/// A kernel's arguments were inconsistent, or a thread failed while it ran.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A buffer's length disagrees with the shape it was passed with.
    #[error("{what} holds {actual} elements, but its shape needs {expected}")]
    Length {
        /// The argument.
        what: &'static str,
        /// Elements the shape calls for.
        expected: usize,
        /// Elements the buffer has.
        actual: usize,
    },
    /// A dimension or parameter has a value the kernel does not define.
    #[error("{what} is {value}, but must be {rule}")]
    Parameter {
        /// The parameter.
        what: &'static str,
        /// The value it had.
        value: String,
        /// What would be accepted.
        rule: &'static str,
    },
    /// A worker panicked; the output is unspecified.
    #[error("a kernel thread panicked: {0}")]
    Panicked(String),
}

pub(crate) fn parameter(what: &'static str, value: impl ToString, rule: &'static str) -> KernelError {
    KernelError::Parameter { what, value: value.to_string(), rule }
}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), KernelError> {
    if actual == expected { Ok(()) } else { Err(KernelError::Length { what, expected, actual }) }
}

/// The product of a shape, refused where it overflows.
pub(crate) fn product(what: &'static str, dims: &[usize]) -> Result<usize, KernelError> {
    dims.iter()
        .try_fold(1usize, |a, &d| a.checked_mul(d))
        .filter(|&n| n <= isize::MAX as usize / 8)
        .ok_or_else(|| parameter(what, format!("{dims:?}"), "small enough to address"))
}
