//! Ctrl-C: the first stops the work in hand at its next step, the second ends the program.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

static REQUESTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// The exit code of an interrupted program.
pub(crate) const EXIT_CODE: u8 = 130;

/// Catches ctrl-C from here on.
pub(crate) fn install() -> io::Result<()> {
    // A step that does not end must not keep the user waiting: where there was a ctrl-C before, this ends the program
    // at once, without destructors that would take memory from under running threads.
    flag::register_conditional_shutdown(SIGINT, EXIT_CODE.into(), Arc::clone(&REQUESTED))?;
    flag::register(SIGINT, Arc::clone(&REQUESTED))?;
    Ok(())
}

/// Whether ctrl-C was pressed.
pub(crate) fn is_requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Forgets a ctrl-C; returns whether there was one.
pub(crate) fn take() -> bool {
    REQUESTED.swap(false, Ordering::SeqCst)
}
