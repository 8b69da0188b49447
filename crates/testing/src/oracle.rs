//! The oracle: one environment per test binary, shared by its tests.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::OnceLock;

use crate::environment::{self, Environment};

/// The reference implementation, ready to run.
pub struct Oracle {
    root: PathBuf,
    environment: Environment,
}

impl Oracle {
    /// The oracle, set up by the first caller. `None` only when `RUSSET_SKIP_ORACLE=1`: the calling test is then
    /// reported as skipped on standard error and should return.
    ///
    /// # Panics
    /// If Python or its packages cannot be had.
    pub fn get() -> Option<&'static Self> {
        static ORACLE: OnceLock<Result<Oracle, String>> = OnceLock::new();
        if std::env::var_os("RUSSET_SKIP_ORACLE").is_some_and(|value| value == "1") {
            let thread = std::thread::current();
            // Not `eprintln!`: the test harness would swallow it.
            let _ = writeln!(
                std::io::stderr(),
                "skipped, because RUSSET_SKIP_ORACLE=1: {}",
                thread.name().unwrap_or("a test that needs the Python oracle")
            );
            return None;
        }
        match ORACLE.get_or_init(Self::open) {
            Ok(oracle) => Some(oracle),
            Err(why) => panic!(
                "this test compares with the Python oracle, which could not be set up: {why}\n\
                 It needs Python 3.11 or newer with its venv and pip modules, and downloads the packages of \
                 oracle/requirements.txt once. Set RUSSET_SKIP_ORACLE=1 to skip the tests that need it."
            ),
        }
    }

    fn open() -> Result<Self, String> {
        let root = environment::oracle_dir();
        let environment = Environment::open(&root)?;
        let tmp = root.join("tmp");
        fs::create_dir_all(&tmp).map_err(|e| format!("cannot create {}: {e}", tmp.display()))?;
        Ok(Self { root, environment })
    }

    /// Runs the Python source `script` with `args` as `sys.argv[1:]` and `stdin` as its standard input; returns what
    /// it wrote to standard output. mlx, mlx-lm, transformers, tokenizers and jinja2 are importable.
    ///
    /// # Panics
    /// If the script fails; the message holds its standard error.
    pub fn run_script(&self, script: &str, args: &[&str], stdin: &str) -> String {
        let mut command = self.environment.command(&self.root);
        command.arg("-c").arg(script).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = command.spawn().and_then(|mut child| {
            let pipe = child.stdin.take();
            std::thread::scope(|scope| {
                // On a thread of its own, so that a script that writes before it has read everything does not block.
                // It may also end without reading: that is no error.
                scope.spawn(move || pipe.map(|mut pipe| pipe.write_all(stdin.as_bytes())));
                child.wait_with_output()
            })
        });
        let output = output
            .map_err(|e| format!("cannot run {}: {e}", self.environment.python.display()))
            .and_then(|output| environment::describe(&command, output))
            .unwrap_or_else(|why| panic!("{why}"));
        String::from_utf8(output.stdout).unwrap_or_else(|e| panic!("the script's output is not UTF-8: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_gets_its_arguments_and_its_input() {
        let Some(oracle) = Oracle::get() else { return };
        let script = "import sys, mlx_lm\nprint(sys.argv[1:], len(sys.stdin.read()), mlx_lm.__version__)";
        let printed = oracle.run_script(script, &["a", "ä"], &"x".repeat(300_000));
        assert_eq!(printed, "['a', 'ä'] 300000 0.32.2\n");
    }

    #[test]
    #[should_panic(expected = "ValueError: no such thing")]
    fn a_failing_script_panics_with_its_error() {
        let Some(oracle) = Oracle::get() else { panic!("ValueError: no such thing") };
        oracle.run_script("raise ValueError('no such thing')", &[], "");
    }
}
