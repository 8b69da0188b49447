//! Ctrl-C: the first stops the work in hand at its next step, the second ends the program.

use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The exit code of an interrupted program.
pub(crate) const EXIT_CODE: u8 = 130;

/// Catches ctrl-C from here on.
pub(crate) fn install() -> anyhow::Result<()> {
    Ok(ctrlc::set_handler(|| {
        if REQUESTED.swap(true, Ordering::SeqCst) {
            // A step that does not end must not keep the user waiting.
            #[allow(clippy::exit)]
            std::process::exit(EXIT_CODE.into());
        }
    })?)
}

/// Whether ctrl-C was pressed.
pub(crate) fn is_requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Forgets a ctrl-C; returns whether there was one.
pub(crate) fn take() -> bool {
    REQUESTED.swap(false, Ordering::SeqCst)
}
