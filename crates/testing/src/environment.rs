//! Where the oracle lives on disk, and the virtual environment it runs in.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fs4::FileExt;
use sha2::{Digest, Sha256};

/// The folder `oracle/` of the repository, with the Python scripts and their requirements.
pub(crate) fn scripts_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle")
}

/// Cargo's target folder: `CARGO_TARGET_DIR`, else the folder above the running test that Cargo tagged,
/// else `target` at the root of the workspace.
fn target_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from)
        && dir.is_absolute()
    {
        return dir;
    }
    let executable = std::env::current_exe().unwrap_or_default();
    executable
        .ancestors()
        .find(|dir| dir.join("CACHEDIR.TAG").is_file())
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"), Path::to_path_buf)
}

/// The folder of the clients' environment.
pub(crate) fn clients_dir() -> PathBuf {
    target_dir().join("clients")
}

/// Everything the oracle makes: environments, fixtures, references.
pub(crate) fn oracle_dir() -> PathBuf {
    target_dir().join("oracle")
}

/// The first 32 hexadecimal digits of the SHA-256 over `parts`, each preceded by its length.
pub(crate) fn digest<T: AsRef<[u8]>>(parts: &[T]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.as_ref().len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A virtual environment with the packages of a list of requirements.
pub(crate) struct Environment {
    /// The environment's interpreter.
    pub(crate) python: PathBuf,
    /// Digest of the requirements and of the Python version.
    pub(crate) key: String,
}

impl Environment {
    /// Opens the environment with the packages of the file `requirements`, creating it under `root` if it is not
    /// complete. Test binaries that run at the same time wait for the first of them.
    pub(crate) fn open(root: &Path, requirements: &Path) -> Result<Self, String> {
        let (base, version) = find_python()?;
        let list =
            fs::read(requirements).map_err(|e| format!("cannot read {}: {e}", requirements.display()))?;
        let key = digest(&[list.as_slice(), version.as_bytes()]);
        let dir = root.join(format!("environment-{key}"));
        let python = dir.join("bin/python");
        let environment = Self { python, key };
        let marker = dir.join("complete");
        // The interpreter is a link to the base Python, which may have been removed since.
        let complete = || marker.exists() && environment.python.exists();
        if complete() {
            return Ok(environment);
        }

        let io = |e: std::io::Error| format!("cannot create {}: {e}", dir.display());
        fs::create_dir_all(root).map_err(io)?;
        let lock = File::create(dir.with_extension("lock")).map_err(io)?;
        FileExt::lock(&lock).map_err(io)?;
        if complete() {
            return Ok(environment);
        }
        if dir.exists() {
            fs::remove_dir_all(&dir).map_err(io)?;
        }
        succeed(isolated(Command::new(&base)).args(["-m", "venv"]).arg(&dir))?;
        succeed(
            isolated(Command::new(&environment.python))
                .args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"])
                .args(["--only-binary", ":all:", "--require-hashes", "--requirement"])
                .arg(requirements),
        )?;
        File::create(&marker).map_err(io)?;
        Ok(environment)
    }

    /// A command that runs the environment's interpreter; files it makes outside its arguments stay in `root`.
    pub(crate) fn command(&self, root: &Path) -> Command {
        let mut command = isolated(Command::new(&self.python));
        // MLX compiles kernels into the temporary folder and finds them there again.
        command.env("TMPDIR", root.join("tmp"));
        command.env("HF_HUB_OFFLINE", "1");
        command.env("TRANSFORMERS_VERBOSITY", "error");
        command
    }
}

/// A digest of the scripts that make results, and of the environment they run in.
pub(crate) fn scripts_digest(environment: &Environment) -> Result<String, String> {
    let mut parts = vec![environment.key.clone().into_bytes()];
    for script in
        ["architectures", "fixture_tokenizer", "make_fixture", "cast", "reference", "embedding", "details"]
    {
        let path = scripts_dir().join(script).with_extension("py");
        parts.push(fs::read(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?);
    }
    Ok(digest(&parts))
}

/// A digest of one script more, for the results that alone depend on it.
pub(crate) fn script_digest(script: &str) -> Result<String, String> {
    let path = scripts_dir().join(script).with_extension("py");
    let source = fs::read(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Ok(digest(&[source]))
}

/// Names the processor: model and instruction sets.
pub(crate) fn processor() -> String {
    let described = if cfg!(target_os = "macos") {
        Command::new("sysctl")
            .args(["-n", "machdep.cpu.brand_string"])
            .output()
            .map(|o| o.stdout)
            .unwrap_or_default()
    } else {
        fs::read("/proc/cpuinfo").unwrap_or_default()
    };
    let described = String::from_utf8_lossy(&described);
    // One core's description; clock rates and the like change from reading to reading.
    let stable = ["model", "flags", "Features", "CPU ", "Apple"];
    let first_core = described.split("\n\n").next().unwrap_or_default();
    first_core.lines().filter(|line| stable.iter().any(|name| line.starts_with(name))).collect()
}

/// Cuts Python off from the user's own modules and keeps it from writing byte code beside the scripts.
fn isolated(mut command: Command) -> Command {
    command.env_remove("PYTHONHOME").env_remove("PYTHONPATH");
    command.env("PYTHONNOUSERSITE", "1").env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUTF8", "1");
    command
}

/// The first interpreter on the path that is recent enough, and its full version.
fn find_python() -> Result<(PathBuf, String), String> {
    const PROBE: &str = "import sys; print(sys.executable); print(sys.version, end=''); \
                         sys.exit(sys.version_info < (3, 11))";
    for name in ["python3", "python3.14", "python3.13", "python3.12", "python3.11"] {
        if let Ok(output) = isolated(Command::new(name)).args(["-c", PROBE]).output()
            && output.status.success()
            && let Some((executable, version)) = String::from_utf8_lossy(&output.stdout).split_once('\n')
        {
            return Ok((PathBuf::from(executable), version.to_owned()));
        }
    }
    Err("no python3 of version 3.11 or newer is on the path".to_owned())
}

/// Runs `command` to its end; a failure is described with what the command printed.
pub(crate) fn succeed(command: &mut Command) -> Result<Output, String> {
    let output = command.output().map_err(|e| format!("cannot run {command:?}: {e}"))?;
    describe(command, output)
}

/// `output` if its command succeeded, else what it printed.
pub(crate) fn describe(command: &Command, output: Output) -> Result<Output, String> {
    if output.status.success() {
        return Ok(output);
    }
    let program = command.get_program().to_string_lossy();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} failed ({}):\n{stdout}{stderr}", output.status))
}
