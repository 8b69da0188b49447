//! Python with the official packages that people use servers with.

use std::path::Path;
use std::process::Command;

use crate::environment::{Environment, clients_dir};
use crate::oracle::is_skipped;

/// A command that runs a script of `tests/clients/` with the packages of its `requirements.txt`, which the first caller
/// installs under `target/clients/`. `None` only when `RUSSET_SKIP_ORACLE=1`.
///
/// # Panics
/// If Python or its packages cannot be had.
pub fn client_script(name: &str) -> Option<Command> {
    if is_skipped() {
        return None;
    }
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients");
    let root = clients_dir();
    let environment = Environment::open(&root, &scripts.join("requirements.txt"))
        .unwrap_or_else(|why| panic!("the packages of tests/clients/requirements.txt cannot be had: {why}"));
    let mut command = environment.command(&root);
    // These tests talk to this machine alone.
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(name);
    }
    command.env_remove("TMPDIR").arg(scripts.join(name));
    Some(command)
}
